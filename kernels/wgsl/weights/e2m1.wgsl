// mxfp4 as integers: a code t, 4 bits in two's complement, stands for t + rest(t), which is twice an
// E2M1. 0, 1, 2, 3, 4 and 6 are themselves, 5 stands for 8 and 7 for 12, and so with a minus. All nibbles
// of a word are done at once; of E2M1's own bits it would take twice the operations, and a table in
// workgroup memory even longer.
// @param WEIGHT f32|f16|bf16|q8|q6|q5|q4|e4m3|mxfp4|nf4|iq4nl
#if WEIGHT == mxfp4
fn rest(t: vec4<u32>) -> vec4<u32> {
  let large = ((t >> vec4<u32>(3u)) ^ (t >> vec4<u32>(2u))) & t & vec4<u32>(0x11111111u);  // 5, 7
  return large * 3u + ((large * 10u) & t);
}

// Values i and values 16 + i of a block as int8.
fn low_int8(t: vec4<u32>) -> vec4<u32> {
  return sum_int8(t & vec4<u32>(0x0f0f0f0fu), rest(t) & vec4<u32>(0x0f0f0f0fu));
}

fn high_int8(t: vec4<u32>) -> vec4<u32> {
  let mask = vec4<u32>(0x0f0f0f0fu);
  return sum_int8((t >> vec4<u32>(4u)) & mask, (rest(t) >> vec4<u32>(4u)) & mask);
}

// The sums, in int8, of nibbles in two's complement, each in a byte: 8 is added to both, then 16 taken away, without
// a borrow from the next byte.
fn sum_int8(a: vec4<u32>, b: vec4<u32>) -> vec4<u32> {
  let eights = vec4<u32>(0x08080808u);
  return ((a ^ eights) + (b ^ eights) + vec4<u32>(0x70707070u)) ^ vec4<u32>(0x80808080u);
}
#endif
