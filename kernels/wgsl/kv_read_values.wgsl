// Eight dimensions of the binding `values: array<vec4<u32>>`.
#include "kv_read.wgsl"
fn load_value(i: u32) -> Kv8 {
#if KV == f32
  return Kv8(values[2u * i], values[2u * i + 1u]);
#else
  return values[i];
#endif
}
