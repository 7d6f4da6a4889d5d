// y[row][head] = sum of p[position] v[position] over the positions that the row attends to: [HEAD_DIM].
#include "step.wgsl"
#include "kv_read_values.wgsl"
#include "attention_range.wgsl"
// @param GROUP u32               query heads per KV head
// @param SCORES_STRIDE u32
// @param Y_STRIDE u32
// @param LANES u32               positions at once
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> pages: array<u32>;
@group(0) @binding(2) var<storage, read> probabilities: array<f32>;  // [row][head][SCORES_STRIDE]
@group(0) @binding(3) var<storage, read> values: array<KvWords>;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;

const CHUNKS = HEAD_DIM / 8u;
const WG = LANES * CHUNKS;

var<workgroup> sums: array<f32, LANES * HEAD_DIM>;

// grid (heads, rows)
@compute @workgroup_size(WG)
fn main(
  @builtin(workgroup_id) id: vec3<u32>,
  @builtin(num_workgroups) size: vec3<u32>,
  @builtin(local_invocation_index) tid: u32,
) {
  let row = step.rows[id.y];
  let chunk = tid % CHUNKS;
  let lane = tid / CHUNKS;
  var low = vec4<f32>();
  var high = vec4<f32>();
  for (var i = first_position(row.position) + lane; i <= row.position; i += LANES) {
    let p = probabilities[(id.y * size.x + id.x) * SCORES_STRIDE + i];
    let value = load_value(kv_index(id.x / GROUP, kv_slot(row.sequence, i)) + chunk);
    low += p * kv_low(value);
    high += p * kv_high(value);
  }
#for i in 0..4
  sums[lane * HEAD_DIM + 8u * chunk + $iu] = low[$i];
  sums[lane * HEAD_DIM + 8u * chunk + 4u + $iu] = high[$i];
#endfor
  workgroupBarrier();
  for (var d = tid; d < HEAD_DIM; d += WG) {
    var sum = 0.0;
    for (var i = 0u; i < LANES; i++) {
      sum += sums[i * HEAD_DIM + d];
    }
    y[id.y * Y_STRIDE + id.x * HEAD_DIM + d] = sum;
  }
}
