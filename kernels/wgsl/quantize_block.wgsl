// Activations as int8: a block of 32 columns has the scale max|x| / 127, and its integers lie in two
// planes of a row, the first halves of all blocks and the second halves. A second plane of scales
// has the sum of squares of each block, for a norm that is applied later.
// Needs the bindings `x_int8: array<u32>` and `x_int8_scales: array<f32>`.
// @param QUANTIZE bool
#if QUANTIZE

fn magnitude(x: vec4<f32>) -> u32 {  // as bits, so that NaN is larger than all numbers
  let bits = bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu);
  return max(max(bits.x, bits.y), max(bits.z, bits.w));
}

// Values 4 * part to 4 * part + 3 of a block whose largest magnitude is `most`.
fn store_int8(row: u32, blocks: u32, block: u32, part: u32, x: vec4<f32>, most: u32) {
  let largest = bitcast<f32>(most);
  let inverse = select(0.0, 127.0 / largest, largest > 0.0);
  let plane = row * 2u * blocks + part / 4u * blocks;
  x_int8[(plane + block) * 4u + part % 4u] = pack4xI8(vec4<i32>(round(x * inverse)));
}

fn store_scale(row: u32, blocks: u32, block: u32, most: u32, squares: f32) {
  x_int8_scales[row * 2u * blocks + block] = bitcast<f32>(most) / 127.0;
  x_int8_scales[row * 2u * blocks + blocks + block] = squares;
}
#endif
