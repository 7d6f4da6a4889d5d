// Chunks of columns, which an invocation multiplies at once, in int8: blocks of 32 columns of weights that
// are integers, or codes of some, and of activations that quantize_block.wgsl wrote, with a scale for each
// half. A dot product of integers is exact, so only the scales round.
//
// q8 has two planes in a row, the first and the second half of every block; so have activations.
// q4 and mxfp4 have the first half of a block in the low nibbles and the second in the high ones.
#let COPIES = TABLE_COPIES
#include "integers.wgsl"
// @param K u32                   columns of W
// @param TABLE_COPIES u32        of what codes are looked up in, where there is such a table
// @param WEIGHT f32|f16|bf16|q8|q6|q5|q4|e4m3|mxfp4|nf4|iq4nl
// Needs `#let X`, the first of their bindings; AFTER_X is the one behind them.
#if INTEGERS
#let AFTER_X = X + 3
@group(0) @binding($(X)) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding($(X + 1)) var<storage, read> scales: array<u32>;
@group(0) @binding($(X + 2)) var<storage, read> x_scales: array<vec2<f32>>;

const CHUNKS = BLOCKS;  // of a row

struct Chunk {
  integers: Integers,
  scale: vec2<f32>,  // and offset
#if GROUP_SIZE == 16
  high_scale: vec2<f32>,
#endif
}

struct Activations {
  low: vec4<u32>,
  high: vec4<u32>,
  scale: vec2<f32>,  // of both halves
  squares: f32,
#if AFFINE
  sums: vec2<f32>,  // of the values of both
#endif
}

#if WEIGHT == mxfp4
const UNIT = 0.0625 * INT8_UNIT;
#else
const UNIT: f32 = INT8_UNIT;
#endif

fn load_chunk(row: u32, i: u32) -> Chunk {
#if GROUP_SIZE == 16
  let scale = scale_of(row, 2u * i);
  let high_scale = scale_of(row, min(2u * i + 1u, GROUPS - 1u));
  return Chunk(load_integers(row, i), scale, high_scale);
#else
#if WEIGHT == mxfp4  // whose codes have the longer way; in the other order q8 is 4 % slower, this 2 %
  let integers = load_integers(row, i);
  let scale = scale_of(row, i / (GROUP_SIZE / 32u));
#else
  let scale = scale_of(row, i / (GROUP_SIZE / 32u));
  let integers = load_integers(row, i);
#endif
  return Chunk(integers, scale);
#endif
}

fn scale_of(row: u32, group: u32) -> vec2<f32> {
  return widen_scale(load_scale(row, group), group);
}

// Row m of x; not valid: beyond the last chunk.
fn load_activations(m: u32, i: u32, valid: bool) -> Activations {
  let first = m * 2u * BLOCKS + i;
  let low = x[first];
  let high = x[first + BLOCKS];
  let of_low = x_scales[first];
  let of_high = x_scales[first + BLOCKS];
  let scale = select(vec2<f32>(), vec2<f32>(of_low.x, of_high.x), valid);
  return Activations(
    low,
    high,
    scale,
    select(0.0, of_low.y + of_high.y, valid),
#if AFFINE
    scale * vec2<f32>(f32(dot16(low, ONES)), f32(dot16(high, ONES))),
#endif
  );
}

fn multiply(w: Chunk, a: Activations) -> f32 {
#if WEIGHT == mxfp4
  let more = rest(w.integers);
  let low = dot16(low_nibbles(w.integers), a.low) + dot16(low_nibbles(more), a.low);
  let high = dot16(high_nibbles(w.integers), a.high) + dot16(high_nibbles(more), a.high);
#elif PLANES == 2
  let first = low_int8(w.integers);
  let second = high_int8(w.integers);
  let low = dot16(first[0], a.low) + 256 * dot16(first[1], a.low);
  let high = dot16(second[0], a.high) + 256 * dot16(second[1], a.high);
#else
  let low = dot16(low_int8(w.integers), a.low);
  let high = dot16(high_int8(w.integers), a.high);
#endif
  let sums = a.scale * vec2<f32>(f32(low), f32(high));
#if GROUP_SIZE == 16
  let product = w.scale.x * sums.x + w.high_scale.x * sums.y;
#if AFFINE
  return product + (w.scale.y * a.sums.x + w.high_scale.y * a.sums.y) / UNIT;
#else
  return product;
#endif
#else
  let product = w.scale.x * (sums.x + sums.y);
#if AFFINE
  return product + w.scale.y * (a.sums.x + a.sums.y) / UNIT;
#else
  return product;
#endif
#endif
}
#include "dot_int8.wgsl"
#endif
