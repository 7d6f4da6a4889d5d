// The splits of attention joined: a sum weighted by exp(max of the split - max of all).
#include "reduce.wgsl"
#include "step.wgsl"
#include "attention_range.wgsl"
#include "attention_split.wgsl"
// @param HEAD_DIM u32
// @param Y_STRIDE u32
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> x: array<f32>;              // [row][head][split][HEAD_DIM]
@group(0) @binding(2) var<storage, read> weights: array<vec2<f32>>;  // (max, sum) of each split
@group(0) @binding(3) var<storage, read_write> y: array<f32>;

var<workgroup> factors: array<f32, STORED_SPLITS>;

// grid (heads, rows)
@compute @workgroup_size(WG)
fn main(
  @builtin(workgroup_id) id: vec3<u32>,
  @builtin(num_workgroups) size: vec3<u32>,
  me: Invocation,
) {
  let position = step.rows[id.y].position;
  let positions = position + 1u - first_position(position);
  let length = split_length(positions);
  let n_splits = (positions + length - 1u) / length;
  let first = (id.y * size.x + id.x) * STORED_SPLITS;
  var most = weights[first].x;
  for (var i = me.index; i < n_splits; i += WG) {
    most = max(most, weights[first + i].x);
  }
  most = workgroup_max(most, me);
  var total = 0.0;
  for (var i = me.index; i < n_splits; i += WG) {
    let factor = exp(weights[first + i].x - most);
    factors[i] = factor;
    total += factor * weights[first + i].y;
  }
  total = workgroup_add(total, me);  // its barriers also publish the factors
  for (var d = me.index; d < HEAD_DIM; d += WG) {
    var sum = vec4<f32>();
    for (var i = 0u; i < n_splits; i += 4u) {  // four loads in flight
#for j in 0..4
      let split$j = min(i + $ju, n_splits - 1u);
      let x$j = x[(first + split$j) * HEAD_DIM + d];
#endfor
#for j in 0..4
      sum[$j] += select(0.0, x$j * factors[split$j], i + $ju < n_splits);
#endfor
    }
    y[id.y * Y_STRIDE + id.x * HEAD_DIM + d] = (sum.x + sum.y + sum.z + sum.w) / total;
  }
}
