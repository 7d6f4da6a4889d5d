// Two dimensions of keys or values as a cache stores them; for int8, a head in workgroup memory.
#include "kv.wgsl"
#include "int8.wgsl"
#if KV == q8
var<workgroup> kept: array<vec4<f32>, HEAD_DIM / 4u>;

struct KeptInt8 {
  values: u32,
  scale: u32,
}

// Four dimensions, and the scale of their block.
fn kept_int8(d: u32) -> KeptInt8 {
  var most = 0u;
  for (var i = 0u; i < KV_BLOCK / 4u; i++) {
    most = max(most, magnitude(kept[d / KV_BLOCK * (KV_BLOCK / 4u) + i]));
  }
  return KeptInt8(to_int8(kept[d / 4u], most), bitcast<u32>(int8_scale(most)));
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
