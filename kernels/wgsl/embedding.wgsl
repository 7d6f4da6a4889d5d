// y = SCALE * weight[token] for each row of the step; a shard holds SHARD_ROWS tokens from START on.
#include "step.wgsl"
#include "weight.wgsl"
#include "scales.wgsl"
#include "e2m1.wgsl"
// @param K u32                   columns of W
// @param START u32
// @param SHARD_ROWS u32
// @param SCALE f32
#let BLOCKWISE = WEIGHT == q8 or WEIGHT == q4 or WEIGHT == mxfp4
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> weight: array<vec4<u32>>;
#if SCALES_BOUND
@group(0) @binding(2) var<storage, read> scales: array<u32>;
#endif
@group(0) @binding($(2 + SCALES_BOUND)) var<storage, read_write> y: array<vec4<f32>>;  // [rows][K]

const EIGHTS = (K + 7u) / 8u;  // groups of eight columns
#if BLOCKWISE
const BLOCKS = (K + 31u) / 32u;

// Eight values of a row, as kernels/tensor.py describes.
fn load_group(row: u32, group: u32) -> array<vec4<f32>, 2> {
  let block = group / 4u;
  let half = group % 4u / 2u;  // of the block
  let pair = vec2<u32>(0u, 1u) + group % 2u * 2u;
#if WEIGHT == mxfp4
  let codes = weight[row * BLOCKS + block];
  var unit = low_int8(codes);
  if (half == 1u) {
    unit = high_int8(codes);
  }
  let words = vec2<u32>(unit[pair.x], unit[pair.y]);
  let unit_scale = 0.5;
#elif WEIGHT == q4
  let unit = weight[row * BLOCKS + block];
  let left = select(4u, 0u, half == 1u);  // moves the nibbles to the upper halves of bytes
  let words = (vec2<u32>(unit[pair.x], unit[pair.y]) << vec2<u32>(left)) & vec2<u32>(0xf0f0f0f0u);
  let unit_scale = 0.0625;
#else
  let unit = weight[(row * 2u + half) * BLOCKS + block];
  let words = vec2<u32>(unit[pair.x], unit[pair.y]);
  let unit_scale = 1.0;
#endif
#if GROUP_SIZE == 16
  let of_columns = min(2u * block + half, GROUPS - 1u);
#else
  let of_columns = block / (GROUP_SIZE / 32u);
#endif
  let scale = widen_scale(load_scale(row, of_columns), of_columns);
  return array<vec4<f32>, 2>(
    unit_scale * scale.x * vec4<f32>(unpack4xI8(words.x)) + scale.y,
    unit_scale * scale.x * vec4<f32>(unpack4xI8(words.y)) + scale.y);
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
#if TABLE
  fill_codes(tid);
#endif
  let token = step.rows[id.y].token;
  if (id.x >= EIGHTS || token < START || token >= START + SHARD_ROWS) {
    return;
  }
  let w = load_group(token - START, id.x);
  let out = (id.y * EIGHTS + id.x) * 2u;
  y[out] = SCALE * w[0];
  y[out + 1u] = SCALE * w[1];
}
