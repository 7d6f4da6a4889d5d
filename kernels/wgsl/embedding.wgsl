// y = SCALE * weight[id] for each row of the step, where id is its token or, with BY_POSITION, its
// position; a shard holds SHARD_ROWS of them from START on.
#include "step.wgsl"
#include "weight.wgsl"
#let COPIES = 1
#include "integers.wgsl"
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
#if INTEGERS

// Eight values of a row.
fn load_group(row: u32, group: u32) -> array<vec4<f32>, 2> {
  let block = group / 4u;
  let half = group % 4u / 2u;  // of the block
  let integers = load_integers(row, block);
  var sixteen = low_int8(integers);
  if (half == 1u) {
    sixteen = high_int8(integers);
  }
  let first = group % 2u * 2u;
#if GROUP_SIZE == 16
  let of_columns = min(2u * block + half, GROUPS - 1u);
#else
  let of_columns = block / (GROUP_SIZE / 32u);
#endif
  let scale = widen_scale(load_scale(row, of_columns), of_columns);
  return array<vec4<f32>, 2>(
    INT8_UNIT * scale.x * vec4<f32>(unpack4xI8(sixteen[first])) + scale.y,
    INT8_UNIT * scale.x * vec4<f32>(unpack4xI8(sixteen[first + 1u])) + scale.y);
}
#else

fn load_group(row: u32, group: u32) -> array<vec4<f32>, 2> {
  let w = load8(row * W_EIGHTS + group);
#if CODES
  let of_columns = group / (GROUP_SIZE / 8u);
  let scale = CODE * widen_scale(load_scale(row, of_columns), of_columns).x;
  return array<vec4<f32>, 2>(scale * low4(w), scale * high4(w));
#else
  return array<vec4<f32>, 2>(low4(w), high4(w));
#endif
}
#endif

// grid (groups of eight / 64, rows)
@compute @workgroup_size(64)
fn main(
  @builtin(global_invocation_id) id: vec3<u32>,
  @builtin(local_invocation_index) tid: u32,
) {
#if WEIGHT == iq4nl
  fill_table(tid, 64u);
#elif WEIGHT == nf4
  fill_codes(tid);
#endif
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
