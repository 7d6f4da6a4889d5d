// Two dimensions of keys or values as a cache stores them; for int8, a head in workgroup memory.
#include "kv.wgsl"
#include "int8.wgsl"
// Caches are bound as array<KvWord>.
#if KV == f32
alias KvWord = vec2<f32>;
#else
alias KvWord = u32;
#endif
#if KV == q8
var<workgroup> kept: array<vec2<f32>, HEAD_DIM / 2u>;  // pairs, as an invocation may have no more

struct KeptInt8 {
  values: u32,
  scale: u32,
}

fn kept_four(d: u32) -> vec4<f32> {
  return vec4<f32>(kept[d / 2u], kept[d / 2u + 1u]);
}

// Four dimensions, and the scale of their block.
fn kept_int8(d: u32) -> KeptInt8 {
  var most = 0u;
  for (var i = 0u; i < KV_BLOCK / 4u; i++) {
    most = max(most, magnitude(kept_four(d / KV_BLOCK * KV_BLOCK + 4u * i)));
  }
  return KeptInt8(to_int8(kept_four(d), most), bitcast<u32>(int8_scale(most)));
}
#elif KV == f32
fn stored(pair: vec2<f32>) -> vec2<f32> {
  return pair;
}
#else
fn stored(pair: vec2<f32>) -> u32 {
  return pack2x16float(pair);
}
#endif
