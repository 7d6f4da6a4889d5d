// Eight consecutive weights of the binding `weight: array<vec4<u32>>`, as stored and widened to f32.
// Some are codes, without their scale: e4m3, in pairs of 16 bits, and nf4, which index a table, from the
// lowest bits on. They are widened to multiples of CODE.
// @param WEIGHT f32|f16|bf16|q8|q6|q5|q4|e4m3|mxfp4|nf4|iq4nl
#let CODES = WEIGHT == e4m3 or WEIGHT == nf4
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
#elif WEIGHT == e4m3
alias Packed8 = vec2<u32>;

fn load8(i: u32) -> Packed8 {
  let both = weight[i / 2u];
  return select(both.xy, both.zw, i % 2u == 1u);
}

fn low4(w: Packed8) -> vec4<f32> {
  return widen(w.x);
}

fn high4(w: Packed8) -> vec4<f32> {
  return widen(w.y);
}

const CODE = 256.0;  // as f16 they have an exponent with the bias 15 instead of 7

// A pair of codes has 16 bits: sign of the first, sign of the second, the rest of both.
fn widen(w: u32) -> vec4<f32> {
  let even = unpack2x16float(w & 0xbf80bf80u);
  let odd = unpack2x16float(((w << 1u) & 0x80008000u) | ((w << 7u) & 0x3f803f80u));
  return vec4<f32>(even.x, odd.x, even.y, odd.y);
}
#elif WEIGHT == nf4
alias Packed8 = u32;

fn load8(i: u32) -> Packed8 {
  return weight[i / 4u][i % 4u];
}

// QLoRA (Dettmers et al. 2023)
const QUANTILES = array<f32, 16>(
  -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
  -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
  0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
  0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0);
const CODE = 1.0;
var<workgroup> codes: array<f32, 16>;  // where lanes read different ones at a time

fn fill_codes(i: u32) {
  var table = QUANTILES;
  if (i < 16u) {
    codes[i] = table[i];
  }
  workgroupBarrier();
}

fn low4(w: Packed8) -> vec4<f32> {
  return vec4<f32>(
    codes[w & 15u], codes[(w >> 4u) & 15u], codes[(w >> 8u) & 15u], codes[(w >> 12u) & 15u]);
}

fn high4(w: Packed8) -> vec4<f32> {
  return low4(w >> 16u);
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
