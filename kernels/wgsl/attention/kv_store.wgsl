// Eight dimensions as the cache stores them. For q8, neighbouring lanes have neighbouring groups.
#include "kv_read.wgsl"
#include "int8.wgsl"
#if KV == q8
fn to_kv(low: vec4<f32>, high: vec4<f32>) -> Kv8 {
  var most = max(magnitude(low), magnitude(high));
  for (var other = 1u; other < KV_BLOCK / 8u; other *= 2u) {
    most = max(most, subgroupShuffleXor(most, other));
  }
  return Kv8(to_int8(low, most), to_int8(high, most), int8_scale(most));
}

// The scales of a block and of the next, in lanes of the first of both.
fn two_scales(kv: Kv8) -> vec2<u32> {
  let next = subgroupShuffleXor(kv.scale, KV_BLOCK / 8u);
  return bitcast<vec2<u32>>(vec2<f32>(kv.scale, next));
}
#elif KV == f32
fn to_kv(low: vec4<f32>, high: vec4<f32>) -> Kv8 {
  return Kv8(bitcast<vec4<u32>>(low), bitcast<vec4<u32>>(high));
}
#else
fn to_kv(low: vec4<f32>, high: vec4<f32>) -> Kv8 {
  return vec4<u32>(
    pack2x16float(low.xy), pack2x16float(low.zw), pack2x16float(high.xy), pack2x16float(high.zw)
  );
}
#endif
