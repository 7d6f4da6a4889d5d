// y = a * b.
#include "each_pair.wgsl"
fn result(a: f32, b: f32) -> f32 {
  return a * b;
}
