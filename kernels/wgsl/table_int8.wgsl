// iq4nl and nf4 as int8: each byte of codes finds its two integers in a table in workgroup memory, of
// which there are COPIES (#let): invocations that look up different bytes at a time then seldom want the
// same bank.
// @param WEIGHT f32|f16|bf16|q8|q6|q5|q4|e4m3|mxfp4|nf4|iq4nl
#let TABLE = WEIGHT == iq4nl or WEIGHT == nf4
#if TABLE
#if WEIGHT == iq4nl
alias Int8 = vec4<u32>;
// llama.cpp, ggml-common.h
const CODES_0_3 = vec4<i32>(-127, -104, -83, -65);
const CODES_4_7 = vec4<i32>(-49, -35, -22, -10);
const CODES_8_11 = vec4<i32>(1, 13, 25, 38);
const CODES_12_15 = vec4<i32>(53, 69, 89, 113);
#else
alias Int8 = array<vec4<u32>, 2>;  // a number is the first + 256 * the second
// 31,908 times the quantiles of weight.wgsl: the multiple of at most 16 bits that rounds them least, by
// 7.9e-6 at most. Activations in int8 are rounded by up to 3.9e-3.
const CODES_0_3 = vec4<i32>(-31908, -22214, -16754, -12601);
const CODES_4_7 = vec4<i32>(-9076, -5896, -2905, 0);
const CODES_8_11 = vec4<i32>(2539, 5135, 7853, 10782);
const CODES_12_15 = vec4<i32>(14062, 17952, 23068, 31908);
#endif
const TABLE_SIZE = 256u * $(COPIES)u;

var<workgroup> table: array<u32, TABLE_SIZE>;
var<private> copy: u32;  // this invocation's

// Needed before the first look-up; i: this invocation's index among `size`. The integers are taken from
// words in registers: an array that data indexes would lie in memory.
fn fill_table(i: u32, size: u32) {
  let low = vec4<u32>(
    pack4xI8(CODES_0_3), pack4xI8(CODES_4_7), pack4xI8(CODES_8_11), pack4xI8(CODES_12_15));
#if PLANES == 2
  let high = vec4<u32>(above(CODES_0_3), above(CODES_4_7), above(CODES_8_11), above(CODES_12_15));
#endif
  for (var at = i; at < TABLE_SIZE; at += size) {
    let first = (at / $(COPIES)u) & 15u;
    let second = at / $(16 * COPIES)u;
#if PLANES == 2
    table[at] = byte_of(high, first) | (byte_of(high, second) << 8u)
      | (byte_of(low, first) << 16u) | (byte_of(low, second) << 24u);
#else
    table[at] = byte_of(low, first) | (byte_of(low, second) << 8u);
#endif
  }
  copy = i % $(COPIES)u;
  workgroupBarrier();
}

fn byte_of(words: vec4<u32>, i: u32) -> u32 {
  return (words[i / 4u] >> (i % 4u * 8u)) & 255u;
}
#if PLANES == 2

// What remains to be counted 256 times when the lowest bytes are taken as int8.
fn above(integers: vec4<i32>) -> u32 {
  return pack4xI8((integers + 128) >> vec4<u32>(8u));
}
#endif

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
