// y[i] = x[logits_rows[i]], [STRIDE]: the rows that get logits.
#include "step.wgsl"
// @param STRIDE u32
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

// grid (STRIDE / 64, rows that get logits)
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x < STRIDE) {
    y[id.y * STRIDE + id.x] = x[step.logits_rows[id.y] * STRIDE + id.x];
  }
}
