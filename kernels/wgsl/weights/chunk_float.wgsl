// Chunks of columns, which an invocation multiplies at once, in f32: eight columns of weights that are
// floats, or 16 of codes of floats; activations as they are.
//
// NORM: activations are multiplied by the norm's weights, and their squares are passed on. SCALED:
// the kernel that made x has multiplied it already, because weights of a norm that come from far
// away in memory would keep all invocations waiting.
#include "scales.wgsl"
// @param K u32                   columns of W
// @param NORM bool
// @param SCALED bool
// Needs `#let X`, the first of their bindings; AFTER_X is the one behind them.
#if not INTEGERS
#include "weight.wgsl"
#let AFTER_X = X + 1 + CODES + NORM
@group(0) @binding($(X)) var<storage, read> x: array<vec4<f32>>;
#if CODES
@group(0) @binding($(X + 1)) var<storage, read> scales: array<u32>;
#endif
#if SCALED
@group(0) @binding($(X + 1 + CODES)) var<storage, read> scaled_x: array<vec4<f32>>;
#elif NORM
@group(0) @binding($(X + 1 + CODES)) var<storage, read> norm_weight: array<vec4<f32>>;
#endif

#let EIGHTS = 1 + CODES  // of a chunk
#if CODES
struct Chunk {
  codes: vec4<u32>,
  scale: f32,
}
#else
alias Chunk = Packed8;
#endif

struct Activations {
#for e in 0..EIGHTS
  low$e: vec4<f32>,
  high$e: vec4<f32>,
#endfor
  squares: f32,
}

const CHUNKS = (K + $(8 * EIGHTS - 1)u) / $(8 * EIGHTS)u;  // of a row
#if CODES
const UNIT = CODE;  // what multiply's results are multiples of
#else
const UNIT = 1.0;
#endif

fn load_chunk(row: u32, i: u32) -> Chunk {
#if CODES
  let group = i * 16u / GROUP_SIZE;
  let scale = load_scale(row, group);  // asked for first: the other order is 4 % slower
  return Chunk(weight[row * CHUNKS + i], widen_scale(scale, group).x);
#else
  return load8(row * CHUNKS + i);
#endif
}

// Row m of x; not valid: beyond the last chunk.
fn load_activations(m: u32, i: u32, valid: bool) -> Activations {
#for e in 0..EIGHTS
  let eight$e = $(EIGHTS)u * i + $eu;
  let column$e = 8u * eight$e;
#if EIGHTS > 1
  let at$e = (m * ROW_EIGHTS + min(eight$e, ROW_EIGHTS - 1u)) * 2u;
#else
  let at$e = (m * ROW_EIGHTS + eight$e) * 2u;
#endif
  let low$e = masked(x[at$e], column$e, valid);
  let high$e = masked(x[at$e + 1u], column$e + 4u, valid);
#endfor
#if NORM
  var squares = 0.0;
#for e in 0..EIGHTS
  squares += dot(low$e, low$e) + dot(high$e, high$e);
#endfor
#endif
  return Activations(
#for e in 0..EIGHTS
#if SCALED
    masked(scaled_x[at$e], column$e, valid),
    masked(scaled_x[at$e + 1u], column$e + 4u, valid),
#elif NORM
    low$e * norm_weight[min(2u * eight$e, 2u * ROW_EIGHTS - 2u)],
    high$e * norm_weight[min(2u * eight$e, 2u * ROW_EIGHTS - 2u) + 1u],
#else
    low$e,
    high$e,
#endif
#endfor
#if NORM
    squares,
#else
    0.0,
#endif
  );
}

const ROW_EIGHTS = (K + 7u) / 8u;

// Columns beyond K are padding: zero in W, anything in x.
fn masked(value: vec4<f32>, column: u32, valid: bool) -> vec4<f32> {
#if K % (8 * EIGHTS) != 0
  let inside = column + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(K);
  return select(vec4<f32>(), value, inside & vec4<bool>(valid));
#else
  return select(vec4<f32>(), value, valid);
#endif
}

fn multiply(w: Chunk, a: Activations) -> f32 {
#if not CODES
  return dot(low4(w), a.low0) + dot(high4(w), a.high0);
#else
  let w0 = w.codes.xy;
  let w1 = w.codes.zw;
#for e in 0..EIGHTS
  let sum$e = dot(low4(w$e), a.low$e) + dot(high4(w$e), a.high$e);
#endfor
  return w.scale * (sum0 + sum1);
#endif
}
#endif
