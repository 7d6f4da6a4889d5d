// Blocks of 32 columns in int8: weights that are integers, or codes of some, and activations that
// quantize_block.wgsl wrote, which have one scale each. A dot product of integers is exact, so only
// the scales round.
//
// q8 has two planes in a row, the first and the second half of every block; so have activations.
// q4 and mxfp4 have the first half of a block in the low nibbles and the second in the high ones.
#let COPIES = 1 + 15 * (WG == 1024)  // filling the table costs each invocation so many stores
#include "scales.wgsl"
#include "weight.wgsl"
#include "e2m1.wgsl"
#include "table_int8.wgsl"
// @param K u32                   columns of W
// @param WEIGHT f32|f16|bf16|q8|q4|e4m3|mxfp4|nf4|iq4nl
#if INTEGERS
struct Block {
#if WEIGHT == q8
  low: vec4<u32>,
  high: vec4<u32>,
#else
  nibbles: vec4<u32>,
#endif
  scale: vec2<f32>,  // and offset
#if GROUP_SIZE == 16
  high_scale: vec2<f32>,
#endif
}

struct Activations {
  low: vec4<u32>,
  high: vec4<u32>,
  scale: f32,
  squares: f32,
#if AFFINE
  sums: vec2<f32>,  // of the integers of both halves
#endif
}

const BLOCKS = (K + 31u) / 32u;  // of a row
#if WEIGHT == q4
const UNIT = 0.0625;  // nibbles are multiplied as the upper halves of bytes
#elif WEIGHT == mxfp4
const UNIT = 0.03125;
#else
const UNIT = 1.0;
#endif

fn load_block(row: u32, i: u32) -> Block {
#if GROUP_SIZE == 16
  let scale = scale_of(row, 2u * i);
  let high_scale = scale_of(row, min(2u * i + 1u, GROUPS - 1u));
#else
  let scale = scale_of(row, i / (GROUP_SIZE / 32u));
#endif
#if not WEIGHT == q8 and GROUP_SIZE == 16
  return Block(weight[row * BLOCKS + i], scale, high_scale);
#elif not WEIGHT == q8
  return Block(weight[row * BLOCKS + i], scale);
#elif GROUP_SIZE == 16
  return Block(
    weight[row * 2u * BLOCKS + i], weight[row * 2u * BLOCKS + BLOCKS + i], scale, high_scale);
#else
  return Block(weight[row * 2u * BLOCKS + i], weight[row * 2u * BLOCKS + BLOCKS + i], scale);
#endif
}

fn scale_of(row: u32, group: u32) -> vec2<f32> {
  return widen_scale(load_scale(row, group), group);
}

// Row m of x; not valid: beyond the last block.
fn load_activations(m: u32, i: u32, valid: bool) -> Activations {
  let first = m * 2u * BLOCKS + i;
  let low = x[first];
  let high = x[first + BLOCKS];
  return Activations(
    low,
    high,
    select(0.0, x_scales[first], valid),
    select(0.0, x_scales[first + BLOCKS], valid),
#if AFFINE
    vec2<f32>(f32(dot16(low, ONES)), f32(dot16(high, ONES))),
#endif
  );
}

fn multiply(w: Block, a: Activations) -> f32 {
#if WEIGHT == q8
  let low = dot16(w.low, a.low);
  let high = dot16(w.high, a.high);
#elif WEIGHT == iq4nl
  let low = dot16(low_int8(w.nibbles), a.low);
  let high = dot16(high_int8(w.nibbles), a.high);
#elif WEIGHT == mxfp4
  let more = rest(w.nibbles);
  let low = dot16(low_nibbles(w.nibbles), a.low) + dot16(low_nibbles(more), a.low);
  let high = dot16(high_nibbles(w.nibbles), a.high) + dot16(high_nibbles(more), a.high);
#else
  let low = dot16(low_nibbles(w.nibbles), a.low);
  let high = dot16(high_nibbles(w.nibbles), a.high);
#endif
#if GROUP_SIZE == 16
  var sum = w.scale.x * f32(low) + w.high_scale.x * f32(high);
#if AFFINE
  sum += (w.scale.y * a.sums.x + w.high_scale.y * a.sums.y) / UNIT;
#endif
  return a.scale * sum;
#else
#if AFFINE
  return a.scale * (w.scale.x * f32(low + high) + w.scale.y * (a.sums.x + a.sums.y) / UNIT);
#else
  return w.scale.x * a.scale * f32(low + high);
#endif
#endif
}
#if AFFINE

const ONES = vec4<u32>(0x01010101u);
#endif

fn low_nibbles(w: vec4<u32>) -> vec4<u32> {
  return (w << vec4<u32>(4u)) & vec4<u32>(0xf0f0f0f0u);
}

fn high_nibbles(w: vec4<u32>) -> vec4<u32> {
  return w & vec4<u32>(0xf0f0f0f0u);
}

fn dot16(a: vec4<u32>, b: vec4<u32>) -> i32 {
  return dot4I8Packed(a.x, b.x) + dot4I8Packed(a.y, b.y)
    + dot4I8Packed(a.z, b.z) + dot4I8Packed(a.w, b.w);
}
#endif
