// Blocks of eight columns in f32: weights that are floats, activations as they are.
//
// NORM: activations are multiplied by the norm's weights, and their squares are passed on. SCALED:
// the kernel that made x has multiplied it already, because weights of a norm that come from far
// away in memory would keep all invocations waiting.
#include "weight.wgsl"
#include "scales.wgsl"
// @param K u32                   columns of W
// @param NORM bool
// @param SCALED bool
#if not (WEIGHT == q8 or WEIGHT == q4)
#if CODES
struct Block {
  codes: Packed8,
  scale: f32,
}
#else
alias Block = Packed8;
#endif

struct Activations {
  low: vec4<f32>,
  high: vec4<f32>,
  squares: f32,
}

const BLOCKS = (K + 7u) / 8u;  // of a row
const UNIT = 1.0;              // what multiply's results are multiples of

fn load_block(row: u32, i: u32) -> Block {
#if CODES
  let group = i / (GROUP / 8u);
  return Block(load8(row * BLOCKS + i), widen_scale(load_scale(row, group), group).x);
#else
  return load8(row * BLOCKS + i);
#endif
}

// Row m of x; not valid: beyond the last block.
fn load_activations(m: u32, i: u32, valid: bool) -> Activations {
  let at = m * 2u * BLOCKS + 2u * i;
  let low = masked(x[at], 8u * i, valid);
  let high = masked(x[at + 1u], 8u * i + 4u, valid);
#if NORM
  let squares = dot(low, low) + dot(high, high);
#if SCALED
  return Activations(
    masked(scaled_x[at], 8u * i, valid), masked(scaled_x[at + 1u], 8u * i + 4u, valid), squares);
#else
  return Activations(low * norm_weight[2u * i], high * norm_weight[2u * i + 1u], squares);
#endif
#else
  return Activations(low, high, 0.0);
#endif
}

// Columns beyond K are padding: zero in W, anything in x.
fn masked(value: vec4<f32>, column: u32, valid: bool) -> vec4<f32> {
#if K % 8 != 0
  let inside = column + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(K);
  return select(vec4<f32>(), value, inside & vec4<bool>(valid));
#else
  return select(vec4<f32>(), value, valid);
#endif
}

fn multiply(w: Block, a: Activations) -> f32 {
#if CODES
  return w.scale * (dot(low4(w.codes), a.low) + dot(high4(w.codes), a.high));
#else
  return dot(low4(w), a.low) + dot(high4(w), a.high);
#endif
}
#endif
