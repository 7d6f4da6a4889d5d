// The integers of a block of 32 columns, as kernels/gpu/tensor.py has them, made int8, or two int8 each: what
// they mean is INT8_UNIT times that. Needs the binding `weight: array<vec4<u32>>`.
#include "scales.wgsl"
#include "e2m1.wgsl"
#include "table_int8.wgsl"
// @param K u32                   columns of W
// @param WEIGHT f32|f16|bf16|q8|q6|q5|q4|e4m3|mxfp4|nf4|iq4nl
#if INTEGERS
const BLOCKS = (K + 31u) / 32u;  // of a row
#if WEIGHT == q8
const INT8_UNIT = 1.0;

struct Integers {
  low: vec4<u32>,
  high: vec4<u32>,
}

fn load_integers(row: u32, i: u32) -> Integers {
  return Integers(weight[row * 2u * BLOCKS + i], weight[row * 2u * BLOCKS + BLOCKS + i]);
}

// The first and the second half of the block.
fn low_int8(w: Integers) -> vec4<u32> {
  return w.low;
}

fn high_int8(w: Integers) -> vec4<u32> {
  return w.high;
}
#elif WEIGHT == q6
const INT8_UNIT = 0.25;

struct Integers {
  nibbles: vec4<u32>,
  above: vec2<u32>,  // two bits of each, of one half and of the other
}

fn load_integers(row: u32, i: u32) -> Integers {
  let first = row * (BLOCKS + (BLOCKS + 1u) / 2u);
  let above = weight[first + BLOCKS + i / 2u];
  return Integers(weight[first + i], select(above.xy, above.zw, i % 2u == 1u));
}

fn low_int8(w: Integers) -> vec4<u32> {
  let above = vec4<u32>(w.above.x) << vec4<u32>(6u, 4u, 2u, 0u);
  return ((w.nibbles << vec4<u32>(2u)) & vec4<u32>(0x3c3c3c3cu)) | (above & vec4<u32>(0xc0c0c0c0u));
}

fn high_int8(w: Integers) -> vec4<u32> {
  let above = vec4<u32>(w.above.y) << vec4<u32>(6u, 4u, 2u, 0u);
  return ((w.nibbles >> vec4<u32>(2u)) & vec4<u32>(0x3c3c3c3cu)) | (above & vec4<u32>(0xc0c0c0c0u));
}
#elif WEIGHT == q5
const INT8_UNIT = 0.125;

struct Integers {
  nibbles: vec4<u32>,
  above: u32,  // a bit of each
}

fn load_integers(row: u32, i: u32) -> Integers {
  let first = row * (BLOCKS + (BLOCKS + 3u) / 4u);
  return Integers(weight[first + i], weight[first + BLOCKS + i / 4u][i % 4u]);
}

fn low_int8(w: Integers) -> vec4<u32> {
  let above = vec4<u32>(w.above) << vec4<u32>(7u, 6u, 5u, 4u);
  return ((w.nibbles << vec4<u32>(3u)) & vec4<u32>(0x78787878u)) | (above & vec4<u32>(0x80808080u));
}

fn high_int8(w: Integers) -> vec4<u32> {
  let above = vec4<u32>(w.above) << vec4<u32>(3u, 2u, 1u, 0u);
  return ((w.nibbles >> vec4<u32>(1u)) & vec4<u32>(0x78787878u)) | (above & vec4<u32>(0x80808080u));
}
#else
#if WEIGHT == q4
const INT8_UNIT = 0.0625;  // as the upper halves of bytes
#elif WEIGHT == mxfp4
const INT8_UNIT = 0.5;
#elif WEIGHT == nf4
const INT8_UNIT = 1.0 / 31908.0;
#else
const INT8_UNIT = 1.0;
#endif

alias Integers = vec4<u32>;

fn load_integers(row: u32, i: u32) -> Integers {
  return weight[row * BLOCKS + i];
}
#endif
#if WEIGHT == q4 or WEIGHT == mxfp4

// Values i and values 16 + i of the block, as the upper halves of bytes.
fn low_nibbles(w: vec4<u32>) -> vec4<u32> {
  return (w << vec4<u32>(4u)) & vec4<u32>(0xf0f0f0f0u);
}

fn high_nibbles(w: vec4<u32>) -> vec4<u32> {
  return w & vec4<u32>(0xf0f0f0f0u);
}
#endif
#if WEIGHT == q4

fn low_int8(w: Integers) -> vec4<u32> {
  return low_nibbles(w);
}

fn high_int8(w: Integers) -> vec4<u32> {
  return high_nibbles(w);
}
#endif
#endif
