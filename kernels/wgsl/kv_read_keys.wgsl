// Eight dimensions of the binding `keys: array<vec4<u32>>`.
#include "kv_read.wgsl"
fn load_key(i: u32) -> Kv8 {
#if KV == f32
  return Kv8(keys[2u * i], keys[2u * i + 1u]);
#else
  return keys[i];
#endif
}
