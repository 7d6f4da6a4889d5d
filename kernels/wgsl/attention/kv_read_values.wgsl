// Eight dimensions of the binding `values: array<KvWords>`.
#include "kv_read.wgsl"
fn load_value(i: u32) -> Kv8 {
#if KV == f32
  return Kv8(values[2u * i], values[2u * i + 1u]);
#elif KV == q8
  let at = kv_scale_index(i, 2u * arrayLength(&values));
  return Kv8(values[i].x, values[i].y, bitcast<f32>(values[at / 2u][at % 2u]));
#else
  return values[i];
#endif
}
