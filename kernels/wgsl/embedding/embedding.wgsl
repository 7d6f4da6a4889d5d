// y = SCALE * weight[id], [K], for each row of the step, where id is its token or, with BY_POSITION, its
// position; a shard holds SHARD_ROWS of them from START on.
#include "step.wgsl"
#include "weight_group.wgsl"
// @param K u32                   columns of W
// @param START u32
// @param SHARD_ROWS u32
// @param SCALE f32
// @param BY_POSITION bool
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> weight: array<vec4<u32>>;
#if SCALES_BOUND
@group(0) @binding(2) var<storage, read> scales: array<u32>;
#endif
@group(0) @binding($(2 + SCALES_BOUND)) var<storage, read_write> y: array<vec4<f32>>;  // [rows][K]

const EIGHTS = (K + 7u) / 8u;  // groups of eight columns
// grid (groups of eight / 64, rows)
@compute @workgroup_size(64)
fn main(
  @builtin(global_invocation_id) id: vec3<u32>,
  @builtin(local_invocation_index) tid: u32,
) {
  fill_tables(tid, 64u);
#if BY_POSITION
  let row = step.rows[id.y].position;
#else
  let row = step.rows[id.y].token;
#endif
  if (id.x >= EIGHTS || row < START || row >= START + SHARD_ROWS) {
    return;
  }
  let w = load_group(row - START, id.x);
  let out = (id.y * EIGHTS + id.x) * 2u;
  y[out] = SCALE * w[0];
  y[out + 1u] = SCALE * w[1];
}
