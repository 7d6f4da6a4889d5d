// Activations as int8: a block of 32 columns has the scale max|x| / 127, and its integers lie in two
// planes of a row, the first halves of all blocks and the second halves. A second plane of scales
// has the sum of squares of each block, for a norm that is applied later.
// Needs the bindings `x_int8: array<u32>` and `x_int8_scales: array<f32>`.
#include "int8.wgsl"
// @param QUANTIZE bool
#if QUANTIZE

// Values 4 * part to 4 * part + 3 of a block whose largest magnitude is `most`.
fn store_int8(row: u32, blocks: u32, block: u32, part: u32, x: vec4<f32>, most: u32) {
  let plane = row * 2u * blocks + part / 4u * blocks;
  x_int8[(plane + block) * 4u + part % 4u] = to_int8(x, most);
}

fn store_scale(row: u32, blocks: u32, block: u32, most: u32, squares: f32) {
  x_int8_scales[row * 2u * blocks + block] = int8_scale(most);
  x_int8_scales[row * 2u * blocks + blocks + block] = squares;
}
#endif
