// Values as int8, in a block of them that has the scale max|x| / 127.
fn magnitude(x: vec4<f32>) -> u32 {  // as bits, so that NaN is larger than all numbers
  let bits = bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu);
  return max(max(bits.x, bits.y), max(bits.z, bits.w));
}

// Four values of a block whose largest magnitude is `most`.
fn to_int8(x: vec4<f32>, most: u32) -> u32 {
  let largest = bitcast<f32>(most);
  return pack4xI8(vec4<i32>(round(x * select(0.0, 127.0 / largest, largest > 0.0))));
}

fn int8_scale(most: u32) -> f32 {
  return bitcast<f32>(most) / 127.0;
}
