// y[row] = sum of weight[row][slot] x[row][slot] over the slots of a row, plus its residual where RESIDUAL:
// what its experts made of it, [WIDTH] each.
#include "routing.wgsl"
// @param WIDTH u32
// @param STRIDE u32              of a row of x, y and residual
// @param RESIDUAL bool
@group(0) @binding(0) var<storage, read> routing: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;  // [row][slot][STRIDE]
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
#if RESIDUAL
@group(0) @binding(3) var<storage, read> residual: array<f32>;
#endif

// grid (WIDTH / 64, rows)
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= WIDTH) {
    return;
  }
  var sum = 0.0;
  for (var slot = 0u; slot < ALL_SLOTS; slot++) {
    sum += weight_of(id.y, slot) * x[(id.y * ALL_SLOTS + slot) * STRIDE + id.x];
  }
#if RESIDUAL
  sum += residual[id.y * STRIDE + id.x];
#endif
  y[id.y * STRIDE + id.x] = sum;
}
