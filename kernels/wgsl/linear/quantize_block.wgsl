// Activations as int8: 16 columns, half a block, have the scale max|x| / 127. The first halves of all
// blocks of a row lie together, and so do the second ones. Beside a scale is the sum of squares of its
// columns, for a norm that is applied later.
// Needs the bindings `x_int8: array<u32>` and `x_int8_scales: array<vec2<f32>>`.
#include "int8.wgsl"
// @param QUANTIZE bool
#if QUANTIZE

// Where a half lies: number `half` of a row that has so many blocks.
fn half_at(row: u32, blocks: u32, half: u32) -> u32 {
  return (2u * row + half % 2u) * blocks + half / 2u;
}

// Values 4 * part to 4 * part + 3 of a half whose largest magnitude is `most`.
fn store_int8(at: u32, part: u32, x: vec4<f32>, most: u32) {
  x_int8[4u * at + part] = to_int8(x, most);
}

fn store_scale(at: u32, most: u32, squares: f32) {
  x_int8_scales[at] = vec2<f32>(int8_scale(most), squares);
}
#endif
