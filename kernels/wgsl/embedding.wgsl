// y = SCALE * weight[token] for each row of the step; a shard holds SHARD_ROWS tokens from START on.
#include "step.wgsl"
#include "weight.wgsl"
// @param WIDTH u32
// @param START u32
// @param SHARD_ROWS u32
// @param SCALE f32
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> weight: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> y: array<vec4<f32>>;  // [rows][WIDTH]

const GROUPS = (WIDTH + 7u) / 8u;

// grid (groups of eight / 64, rows)
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let token = step.rows[id.y].token;
  if (id.x >= GROUPS || token < START || token >= START + SHARD_ROWS) {
    return;
  }
  let w = load8((token - START) * GROUPS + id.x);
  let out = (id.y * GROUPS + id.x) * 2u;
  y[out] = SCALE * low4(w);
  y[out + 1u] = SCALE * high4(w);
}
