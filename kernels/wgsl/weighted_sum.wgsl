// y[row][head] = sum of probability * value over the positions that the row attends to.
#include "step.wgsl"
#include "kv_read_values.wgsl"
#include "attention_range.wgsl"
// @param GROUP u32               query heads per KV head
// @param SCORES_STRIDE u32
// @param Y_STRIDE u32
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> pages: array<u32>;
@group(0) @binding(2) var<storage, read> probabilities: array<f32>;  // [row][head][SCORES_STRIDE]
@group(0) @binding(3) var<storage, read> values: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read_write> y: array<vec4<f32>>;

const CHUNKS = HEAD_DIM / 8u;

// grid (heads, rows)
@compute @workgroup_size(CHUNKS)
fn main(
  @builtin(workgroup_id) id: vec3<u32>,
  @builtin(num_workgroups) size: vec3<u32>,
  @builtin(local_invocation_index) chunk: u32,
) {
  let row = step.rows[id.y];
  var low = vec4<f32>();
  var high = vec4<f32>();
  for (var i = first_position(row.position); i <= row.position; i++) {
    let p = probabilities[(id.y * size.x + id.x) * SCORES_STRIDE + i];
    let value = load_value(kv_index(id.x / GROUP, kv_slot(row.sequence, i)) + chunk);
    low += p * kv_low(value);
    high += p * kv_high(value);
  }
  let out = (id.y * Y_STRIDE + id.x * HEAD_DIM) / 4u + 2u * chunk;
  y[out] = low;
  y[out + 1u] = high;
}
