// Eight consecutive weights of the binding `weight: array<vec4<u32>>`, as stored and widened to f32.
// @param WEIGHT f32|f16|bf16|q8|q4
#if WEIGHT == f32
struct Packed8 {
  low: vec4<u32>,
  high: vec4<u32>,
}

fn load8(i: u32) -> Packed8 {
  return Packed8(weight[2u * i], weight[2u * i + 1u]);
}

fn low4(w: Packed8) -> vec4<f32> {
  return bitcast<vec4<f32>>(w.low);
}

fn high4(w: Packed8) -> vec4<f32> {
  return bitcast<vec4<f32>>(w.high);
}
#else
alias Packed8 = vec4<u32>;

fn load8(i: u32) -> Packed8 {
  return weight[i];
}

fn low4(w: Packed8) -> vec4<f32> {
  return widen(w.xy);
}

fn high4(w: Packed8) -> vec4<f32> {
  return widen(w.zw);
}
#if WEIGHT == f16

fn widen(w: vec2<u32>) -> vec4<f32> {
  return vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y));
}
#else

fn widen(w: vec2<u32>) -> vec4<f32> {  // bf16 is the upper half of an f32
  return bitcast<vec4<f32>>(
    vec4<u32>(w.x << 16u, w.x & 0xffff0000u, w.y << 16u, w.y & 0xffff0000u));
}
#endif
#endif
