// y = x * factor[0].
#let X = 1
#include "each.wgsl"
@group(0) @binding(0) var<storage, read> factor: array<f32>;

fn result(x: f32, row: u32) -> f32 {
  return factor[0] * x;
}
