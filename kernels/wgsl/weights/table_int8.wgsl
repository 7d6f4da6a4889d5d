// iq4nl and nf4 as int8: each byte of codes finds its two integers in a table in workgroup memory, of
// which there are COPIES (#let): invocations that look up different bytes at a time then seldom want the
// same bank.
// @param WEIGHT f32|f16|bf16|q8|q6|q5|q4|e4m3|mxfp4|nf4|iq4nl
#let TABLE = WEIGHT == iq4nl or WEIGHT == nf4
#if TABLE
#if WEIGHT == iq4nl
alias Int8 = vec4<u32>;
// llama.cpp, ggml-common.h
const INTEGERS_OF_CODES: array<i32, 16> = array<i32, 16>(
  -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113);
#else
alias Int8 = array<vec4<u32>, 2>;  // a number is the first + 256 * the second
// 31,908 times the quantiles of weight.wgsl: the multiple of at most 16 bits that rounds them least, by
// 7.9e-6 at most. Activations in int8 are rounded by up to 3.9e-3.
const INTEGERS_OF_CODES: array<i32, 16> = array<i32, 16>(
  -31908, -22214, -16754, -12601, -9076, -5896, -2905, 0, 2539, 5135,
  7853, 10782, 14062, 17952, 23068, 31908);
#endif
const TABLE_SIZE = 256u * $(COPIES)u;

var<workgroup> table: array<u32, TABLE_SIZE>;
var<private> copy: u32;  // this invocation's

// Needed before the first look-up; i: this invocation's index among `size`.
fn fill_table(i: u32, size: u32) {
  var values = INTEGERS_OF_CODES;
  for (var at = i; at < TABLE_SIZE; at += size) {
    let byte = at / $(COPIES)u;
    let pair = vec2<i32>(values[byte & 15u], values[byte >> 4u]);
#if PLANES == 2
    let coarse = (pair + 128) >> vec2<u32>(8u);
    table[at] = pack4xI8(vec4<i32>(coarse, pair - 256 * coarse));
#else
    table[at] = pack4xI8(vec4<i32>(pair, 0, 0));
#endif
  }
  copy = i % $(COPIES)u;
  workgroupBarrier();
}

// The first and the second half of a block.
fn low_int8(codes: vec4<u32>) -> Int8 {
  return half_int8(codes.xy);
}

fn high_int8(codes: vec4<u32>) -> Int8 {
  return half_int8(codes.zw);
}

fn half_int8(codes: vec2<u32>) -> Int8 {
  let first = vec4<u32>(
    look_up(codes.x), look_up(codes.x >> 16u), look_up(codes.y), look_up(codes.y >> 16u));
  let second = vec4<u32>(
    look_up(codes.x >> 8u), look_up(codes.x >> 24u), look_up(codes.y >> 8u), look_up(codes.y >> 24u));
#if PLANES == 2
  return Int8(
    (first >> vec4<u32>(16u)) | (second & vec4<u32>(0xffff0000u)),
    (first & vec4<u32>(0xffffu)) | (second << vec4<u32>(16u)));
#else
  return first | (second << vec4<u32>(16u));
#endif
}

fn look_up(codes: u32) -> u32 {
  return table[(codes & 255u) * $(COPIES)u + copy];
}
#endif
