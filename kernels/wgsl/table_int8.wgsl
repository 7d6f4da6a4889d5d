// iq4nl as int8: each byte of codes finds its two integers in a table in workgroup memory, of which there
// are COPIES (#let): invocations that look up different bytes at a time then seldom want the same bank.
// @param WEIGHT f32|f16|bf16|q8|q6|q5|q4|e4m3|mxfp4|nf4|iq4nl
#if WEIGHT == iq4nl
// llama.cpp, ggml-common.h
const INTEGERS_OF_CODES: array<i32, 16> = array<i32, 16>(
  -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113);
const TABLE_SIZE = 256u * $(COPIES)u;

var<workgroup> table: array<u32, TABLE_SIZE>;
var<private> copy: u32;  // this invocation's

// Needed before the first look-up; i: this invocation's index among `size`.
fn fill_table(i: u32, size: u32) {
  var values = INTEGERS_OF_CODES;
  for (var at = i; at < TABLE_SIZE; at += size) {
    let byte = at / $(COPIES)u;
    let low = u32(values[byte & 15u]) & 255u;
    let high = u32(values[byte >> 4u]) & 255u;
    table[at] = low | (high << 8u);
  }
  copy = i % $(COPIES)u;
  workgroupBarrier();
}

// The first and the second half of a block.
fn low_int8(codes: vec4<u32>) -> vec4<u32> {
  return vec4<u32>(eight_int8(codes.x), eight_int8(codes.y));
}

fn high_int8(codes: vec4<u32>) -> vec4<u32> {
  return vec4<u32>(eight_int8(codes.z), eight_int8(codes.w));
}

fn eight_int8(w: u32) -> vec2<u32> {
  let pair0 = table[(w & 255u) * $(COPIES)u + copy];
  let pair1 = table[((w >> 8u) & 255u) * $(COPIES)u + copy];
  let pair2 = table[((w >> 16u) & 255u) * $(COPIES)u + copy];
  let pair3 = table[(w >> 24u) * $(COPIES)u + copy];
  return vec2<u32>(pair0 | (pair1 << 16u), pair2 | (pair3 << 16u));
}
#endif
