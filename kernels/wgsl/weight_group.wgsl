// Eight values of a row of the binding `weight: array<vec4<u32>>`, as f32. Quantised weights need the
// binding `scales: array<u32>`, and some of them a table in workgroup memory: fill_tables, called by all
// invocations of a workgroup, before anything is loaded.
#include "weight.wgsl"
#let COPIES = 1
#include "integers.wgsl"
// @param K u32                   columns of W
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

fn fill_tables(i: u32, size: u32) {
#if WEIGHT == iq4nl
  fill_table(i, size);
#elif WEIGHT == nf4
  fill_codes(i);
#endif
}
