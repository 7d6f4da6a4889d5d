// Eight dimensions of the binding `keys: array<KvWords>`.
#include "kv_read.wgsl"
fn load_key(i: u32) -> Kv8 {
#if KV == f32
  return Kv8(keys[2u * i], keys[2u * i + 1u]);
#elif KV == q8
  let at = kv_scale_index(i, 2u * arrayLength(&keys));
  return Kv8(keys[i].x, keys[i].y, bitcast<f32>(keys[at / 2u][at % 2u]));
#else
  return keys[i];
#endif
}
