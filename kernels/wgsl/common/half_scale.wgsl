// A power of two by which values, the largest of which is `most`, come close to the largest f16: none overflows,
// and those that f16 can't tell from zero are below 2^-39 of the largest.
struct HalfScale {
  factor: f32,   // 2^14 <= most * factor < 2^15
  inverse: f32,
}

fn half_scale(most: f32) -> HalfScale {
  // The exponent of zeros, or of values that are nearly zeros, is taken for one that has an inverse.
  let exponent = min(max((bitcast<u32>(most) >> 23u) & 255u, 20u), 254u);
  return HalfScale(bitcast<f32>((268u - exponent) << 23u), bitcast<f32>((exponent - 14u) << 23u));
}

fn eight_halves(low: vec4<f32>, high: vec4<f32>) -> vec4<u32> {
  return vec4<u32>(
    pack2x16float(low.xy), pack2x16float(low.zw), pack2x16float(high.xy), pack2x16float(high.zw));
}
