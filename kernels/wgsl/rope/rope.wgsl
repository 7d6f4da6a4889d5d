// y = rotate(x, position of the row) for the first HEAD_DIM values of each head (rotate_head.wgsl): x is
// [rows][heads][X_HEAD], y [rows][heads][Y_HEAD].
#include "step.wgsl"
#include "rotate_head.wgsl"
// @param X_HEAD u32              from one head to the next
// @param X_STRIDE u32
// @param X_OFFSET u32
// @param Y_HEAD u32
// @param Y_STRIDE u32
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> table: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read_write> y: array<f32>;

// grid (heads, rows)
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  for (var d = tid; d < HEAD_DIM; d += 64u) {
    head[d] = x[id.y * X_STRIDE + X_OFFSET + id.x * X_HEAD + d];
  }
  workgroupBarrier();
  for (var d = tid; d < HEAD_DIM; d += 64u) {
    y[id.y * Y_STRIDE + id.x * Y_HEAD + d] = rotated(d, step.rows[id.y].position);
  }
}
