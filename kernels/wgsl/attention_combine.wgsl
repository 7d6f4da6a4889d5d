// The splits of attention joined: a sum weighted by exp(max of the split - max of all).
#include "step.wgsl"
#include "attention_range.wgsl"
#include "attention_split.wgsl"
// @param HEAD_DIM u32
// @param Y_STRIDE u32
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> x: array<f32>;              // [row][head][split][HEAD_DIM]
@group(0) @binding(2) var<storage, read> weights: array<vec2<f32>>;  // (max, sum) of each split
@group(0) @binding(3) var<storage, read_write> y: array<f32>;

// grid (heads, rows)
@compute @workgroup_size(64)
fn main(
  @builtin(workgroup_id) id: vec3<u32>,
  @builtin(num_workgroups) size: vec3<u32>,
  @builtin(local_invocation_index) tid: u32,
) {
  let position = step.rows[id.y].position;
  let positions = position + 1u - first_position(position);
  let length = split_length(positions);
  let n_splits = (positions + length - 1u) / length;
  let first = (id.y * size.x + id.x) * STORED_SPLITS;
  var most = weights[first].x;
  for (var i = 1u; i < n_splits; i++) {
    most = max(most, weights[first + i].x);
  }
  var total = 0.0;
  for (var i = 0u; i < n_splits; i++) {
    total += weights[first + i].y * exp(weights[first + i].x - most);
  }
  for (var d = tid; d < HEAD_DIM; d += 64u) {
    var sum = 0.0;
    for (var i = 0u; i < n_splits; i++) {
      sum += x[(first + i) * HEAD_DIM + d] * exp(weights[first + i].x - most);
    }
    y[id.y * Y_STRIDE + id.x * HEAD_DIM + d] = sum / total;
  }
}
