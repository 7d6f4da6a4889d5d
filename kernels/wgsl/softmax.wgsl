// y = exp(x - max(x)) / sum(exp(x - max(x))) over the positions that a row attends to.
#include "reduce.wgsl"
#include "step.wgsl"
#include "attention_range.wgsl"
// @param STRIDE u32
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

// grid (heads, rows)
@compute @workgroup_size(WG)
fn main(
  @builtin(workgroup_id) id: vec3<u32>,
  @builtin(num_workgroups) size: vec3<u32>,
  me: Invocation,
) {
  let position = step.rows[id.y].position;
  let first = first_position(position);
  let row = (id.y * size.x + id.x) * STRIDE;
  var most = x[row + position];
  for (var i = first + me.index; i <= position; i += WG) {
    most = max(most, x[row + i]);
  }
  most = workgroup_max(most, me);
  var sum = 0.0;
  for (var i = first + me.index; i <= position; i += WG) {
    sum += exp(x[row + i] - most);
  }
  sum = workgroup_add(sum, me);
  for (var i = first + me.index; i <= position; i += WG) {
    y[row + i] = exp(x[row + i] - most) / sum;
  }
}
