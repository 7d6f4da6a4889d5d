// Eight dimensions as the cache stores them.
#include "kv_read.wgsl"
#if KV == f32
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
