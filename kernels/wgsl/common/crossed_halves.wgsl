// Columns in f16, in the order in which matmul_matrix.wgsl multiplies those of x and of W: of each four the second
// and the third have changed places. So the nibbles of a word are pairs as soon as they are masked.
fn crossed_four(four: vec4<f32>) -> vec2<u32> {
  return vec2<u32>(pack2x16float(four.xz), pack2x16float(four.yw));
}

fn crossed_halves(low: vec4<f32>, high: vec4<f32>) -> vec4<u32> {
  return vec4<u32>(crossed_four(low), crossed_four(high));
}
