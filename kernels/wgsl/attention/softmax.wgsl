// y = exp(x - max(x)) / sum(exp(x - max(x))) over the positions that a row attends to; x and y are
// [rows][heads][STRIDE]. SINKS: and over one more logit of each head, to which no y belongs.
#include "reduce.wgsl"
#include "step.wgsl"
#include "attention_range.wgsl"
// @param STRIDE u32
// @param SINKS bool
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
#if SINKS
@group(0) @binding(3) var<storage, read> sinks: array<f32>;
#endif

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
#if SINKS
  var most = sinks[id.x];
#else
  var most = x[row + position];
#endif
  for (var i = first + me.index; i <= position; i += WG) {
    most = max(most, x[row + i]);
  }
  most = workgroup_max(most, me);
  var sum = 0.0;
  for (var i = first + me.index; i <= position; i += WG) {
    sum += exp(x[row + i] - most);
  }
  sum = workgroup_add(sum, me);
#if SINKS
  sum += exp(sinks[id.x] - most);
#endif
  for (var i = first + me.index; i <= position; i += WG) {
    y[row + i] = exp(x[row + i] - most) / sum;
  }
}
