// Eight dimensions of a key or value, as stored and widened to f32.
#include "kv.wgsl"
#if KV == f32
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
alias Kv8 = vec4<u32>;

fn kv_low(kv: Kv8) -> vec4<f32> {
  return vec4<f32>(unpack2x16float(kv.x), unpack2x16float(kv.y));
}

fn kv_high(kv: Kv8) -> vec4<f32> {
  return vec4<f32>(unpack2x16float(kv.z), unpack2x16float(kv.w));
}
#endif
