// Eight dimensions of a key or value, as stored and widened to f32. Caches are arrays of KvWords.
#include "kv.wgsl"
#if KV == q8
alias KvWords = vec2<u32>;

struct Kv8 {
  low: u32,
  high: u32,
  scale: f32,
}

fn kv_low(kv: Kv8) -> vec4<f32> {
  return kv.scale * vec4<f32>(unpack4xI8(kv.low));
}

fn kv_high(kv: Kv8) -> vec4<f32> {
  return kv.scale * vec4<f32>(unpack4xI8(kv.high));
}
#elif KV == f32
alias KvWords = vec4<u32>;

struct Kv8 {
  low: vec4<u32>,
  high: vec4<u32>,
}

fn kv_low(kv: Kv8) -> vec4<f32> {
  return bitcast<vec4<f32>>(kv.low);
}

fn kv_high(kv: Kv8) -> vec4<f32> {
  return bitcast<vec4<f32>>(kv.high);
}
#else
alias KvWords = vec4<u32>;
alias Kv8 = vec4<u32>;

fn kv_low(kv: Kv8) -> vec4<f32> {
  return vec4<f32>(unpack2x16float(kv.x), unpack2x16float(kv.y));
}

fn kv_high(kv: Kv8) -> vec4<f32> {
  return vec4<f32>(unpack2x16float(kv.z), unpack2x16float(kv.w));
}
#endif
