// y = clamp(x, -LIMIT, LIMIT).
#let X = 0
#include "each.wgsl"
// @param LIMIT f32
fn result(x: f32, row: u32) -> f32 {
  return clamp(x, -LIMIT, LIMIT);
}
