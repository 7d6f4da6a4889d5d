// scores[row][head][position] = SCALE q k, perhaps capped, for every position that the row attends to: q is
// [rows][heads][HEAD_DIM], k the cache's [positions][KV heads][HEAD_DIM].
#include "step.wgsl"
#include "kv_read_keys.wgsl"
#include "attention_range.wgsl"
#include "capped.wgsl"
// @param GROUP u32               query heads per KV head
// @param SCALE f32
// @param Q_STRIDE u32
// @param Q_OFFSET u32
// @param SCORES_STRIDE u32
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> pages: array<u32>;
@group(0) @binding(2) var<storage, read> q: array<f32>;
@group(0) @binding(3) var<storage, read> keys: array<KvWords>;
@group(0) @binding(4) var<storage, read_write> scores: array<f32>;

var<workgroup> query: array<f32, HEAD_DIM>;

// grid (positions / 64, heads, rows)
@compute @workgroup_size(64)
fn main(
  @builtin(workgroup_id) id: vec3<u32>,
  @builtin(num_workgroups) size: vec3<u32>,
  @builtin(local_invocation_index) tid: u32,
) {
  for (var d = tid; d < HEAD_DIM; d += 64u) {
    query[d] = SCALE * q[id.z * Q_STRIDE + Q_OFFSET + id.y * HEAD_DIM + d];
  }
  workgroupBarrier();
  let row = step.rows[id.z];
  let position = id.x * 64u + tid;
  if (position < first_position(row.position) || position > row.position) {
    return;
  }
  let k = kv_index(id.y / GROUP, kv_slot(row.sequence, position));
  var score = 0.0;
  for (var i = 0u; i < HEAD_DIM / 8u; i++) {
    let key = load_key(k + i);
    let d = 8u * i;
    score += dot(kv_low(key), vec4<f32>(query[d], query[d + 1u], query[d + 2u], query[d + 3u]))
      + dot(kv_high(key), vec4<f32>(query[d + 4u], query[d + 5u], query[d + 6u], query[d + 7u]));
  }
#if SOFTCAP > 0
  score = capped(score);
#endif
  scores[(id.z * size.y + id.y) * SCORES_STRIDE + position] = score;
}
