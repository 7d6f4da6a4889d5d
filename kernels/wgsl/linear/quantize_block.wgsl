// Activations as int8, in blocks of 32 columns: the first halves of all blocks of a row lie together, and so do
// the second ones. A scale is max|x| / 127.
//
// X_SCALES, a parameter or #let, says which there are:
// - halves: one of each half, and beside it the sum of squares of its columns, for a norm that is applied later;
// - blocks: the same, but both halves have that of the larger one;
// - rows: one of each block, and those of all rows, SCALE_ROWS, side by side.
// Needs the bindings `x_int8: array<u32>` and `x_int8_scales: array<Int8Scale>`.
#include "int8.wgsl"
// @param QUANTIZE bool
#if QUANTIZE
#let SHARERS = 4 + 4 * (X_SCALES != halves)  // vectors of four values that have one scale
#if X_SCALES == rows
alias Int8Scale = f32;
#else
alias Int8Scale = vec2<f32>;
#endif

// Where a half lies: number `half` of a row that has so many blocks.
fn half_at(row: u32, blocks: u32, half: u32) -> u32 {
  return (2u * row + half % 2u) * blocks + half / 2u;
}

// Values 4 * part to 4 * part + 3 of a half, of which the largest magnitude is `most`, as of those with which
// it shares its scale.
fn store_int8(row: u32, blocks: u32, half: u32, part: u32, x: vec4<f32>, most: u32, squares: f32) {
  let at = half_at(row, blocks, half);
  x_int8[4u * at + part] = to_int8(x, most);
  if (part == 0u) {
#if X_SCALES == rows
    if (half % 2u == 0u) {
      x_int8_scales[half / 2u * SCALE_ROWS + row] = int8_scale(most);
    }
#else
    x_int8_scales[at] = vec2<f32>(int8_scale(most), squares);
#endif
  }
}
#endif
