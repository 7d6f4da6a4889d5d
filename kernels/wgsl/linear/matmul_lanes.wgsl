// y = activated(x W^T + bias) factor + residual, as matmul_vec.wgsl, for CPUs, where a load takes a lane after
// the other, a product all lanes at once, and passing a lane's value on to all of them next to nothing.
//
// So lanes lie along the rows of W: each has N_TILE of them by M_TILE rows of x, and goes through all
// columns. Of x the subgroup, which is a workgroup, loads every value once, spread over its lanes. Without
// barriers and sums over lanes it compiles in a tenth of the time that others take; and what order a sum is
// made in depends on nothing but K.
//
// Weights of integers, and x in int8 (quantize_block.wgsl, X_SCALES halves), become floats on the way, in which
// their products are exact: a product of bytes takes such a CPU longer than four of floats.
//
// NORM, SCALED: as in chunk_float.wgsl, and chunk_int8.wgsl. The factor is as in matmul_vec.wgsl.
#include "grid.wgsl"
#include "weight.wgsl"
#include "scales.wgsl"
#let COPIES = 1
#include "integers.wgsl"
#include "step.wgsl"
#include "rolled.wgsl"
// @param START u32               the first output that this shard of W holds
// @param Y_STRIDE u32
// @param LANES u32               of a subgroup
// @param M_TILE u32              rows of x of a workgroup
// @param N_TILE u32              rows of W of a lane, even with GATED
// @param X_VECTOR u32            1, 2 or 4: neighbours in a row of x, or words of four, that a lane loads at once
// @param NORM bool
// @param SCALED bool
// @param EPS f32
// @param STOPS bool              rows of x are those of the step: one that has stopped writes nothing
// @param GATED bool
// @param FACTORS bool
// @param SIGMOID_GATE bool       not with FACTORS; their gates and factors are:
// @param GATE_STRIDE u32
// @param GATE_OFFSET u32
// @param KEEP bool
// @param NEXT_NORM bool
#if INTEGERS
#let X_TYPE = u32
#else
#let X_TYPE = f32
#endif
#if X_VECTOR == 1
alias Vector = $(X_TYPE);
#else
alias Vector = vec$(X_VECTOR)<$(X_TYPE)>;
#endif
@group(0) @binding(0) var<storage, read> weight: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> x: array<Vector>;
#let SCALES_OF_W = INTEGERS or CODES
#if SCALES_OF_W
@group(0) @binding(2) var<storage, read> scales: array<u32>;
#endif
#if INTEGERS
@group(0) @binding(3) var<storage, read> x_scales: array<f32>;  // and sums of squares
#elif SCALED
@group(0) @binding($(2 + CODES)) var<storage, read> scaled_x: array<Vector>;
#elif NORM
@group(0) @binding($(2 + CODES)) var<storage, read> norm_weight: array<Vector>;
#endif
#let AFTER_X = 2 + SCALES_OF_W + (INTEGERS or NORM)
#let EPILOGUE = AFTER_X + STOPS
#if STOPS
@group(0) @binding($(AFTER_X)) var<storage, read> step: Step;
#endif
#include "epilogue.wgsl"
#let GATES = SIGMOID_GATE or FACTORS
#if GATES
@group(0) @binding($(EPILOGUE + BIAS + RESIDUAL)) var<storage, read> gates: array<f32>;
#endif
#let OUTPUT = EPILOGUE + BIAS + RESIDUAL + GATES
#include "next_input.wgsl"

#if INTEGERS
const CHUNKS = BLOCKS;  // of a row, of which a lane multiplies one at a time
const UNIT: f32 = INT8_UNIT;  // what sums are multiples of
#else
#let EIGHTS = 1 + CODES  // groups of eight columns of a chunk
const CHUNKS = (K + $(8 * EIGHTS - 1)u) / $(8 * EIGHTS)u;
const ROW_EIGHTS = (K + 7u) / 8u;  // of x
#if CODES
const UNIT = CODE;
#else
const UNIT = 1.0;
#endif
#endif
#let SHARERS = 8 / X_VECTOR      // lanes that load eight columns, or words, of a row of x,
#let ROWS = LANES / SHARERS      // of so many rows at once,
#let LOADS = (M_TILE + ROWS - 1) / ROWS  // in so many loads
#let VALUES = M_TILE * N_TILE
const LANE_OUTPUTS = N_TILE / $(1 + GATED)u;
const OUTPUTS = LANES * LANE_OUTPUTS;
#if INTEGERS

fn widened_scale(row: u32, group: u32) -> vec2<f32> {
  return widen_scale(load_scale(row, group), group);
}

// The signed bytes of a word.
fn bytes(word: u32) -> vec4<f32> {
  return vec4<f32>(vec4<i32>(vec4<u32>(word) << vec4<u32>(24u, 16u, 8u, 0u)) >> vec4<u32>(24u));
}
#else

fn squared(v: Vector) -> f32 {
#if X_VECTOR == 1
  return v * v;
#else
  return dot(v, v);
#endif
}

// Vector i of a row of x; beyond K is padding: zero in W, anything in x.
fn masked(value: Vector, i: u32) -> Vector {
#if K % (8 * EIGHTS) == 0
  return value;
#elif X_VECTOR == 1
  return select(0.0, value, i < K);
#elif X_VECTOR == 2
  return select(Vector(), value, 2u * i + vec2<u32>(0u, 1u) < vec2<u32>(K));
#else
  return select(Vector(), value, 4u * i + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(K));
#endif
}
#endif

// grid: linear_grid(N / OUTPUTS); its depth is the rows of x / M_TILE
@compute @workgroup_size(LANES)
fn main(
  @builtin(workgroup_id) id: vec3<u32>,
  @builtin(num_workgroups) size: vec3<u32>,
  @builtin(subgroup_invocation_id) lane: u32,
) {
  let first = workgroup_index(id, size) * OUTPUTS + lane;
  let first_row = id.z * M_TILE;
#for r in 0..N_TILE
#if GATED
  let row$r = min(first + $($r / 2)u * LANES, N - 1u) + $($r % 2)u * N;
#else
  let row$r = min(first + $ru * LANES, N - 1u);
#endif
#endfor
  let x_vector = lane % $(SHARERS)u;
#if INTEGERS
  let x_half = x_vector * X_VECTOR / 4u;
  let x_words = x_vector % (4u / X_VECTOR);  // of the half
#endif
#for l in 0..LOADS
  let x_row$l = first_row + min(lane / $(SHARERS)u + $($l * ROWS)u, M_TILE - 1u);
#if NORM
  var squares$l = 0.0;
#endif
#endfor
#for m in 0..M_TILE
#for r in 0..N_TILE
  var sum$m_$r = 0.0;
#endfor
#endfor

  for (var i = 0u; i < rolled(CHUNKS, id.z); i++) {
#if INTEGERS
#for r in 0..N_TILE
    let w$r = load_integers(row$r, i);
#if GROUP_SIZE == 16
    let group$r = 2u * i;
    let high_scale$r = widened_scale(row$r, min(group$r + 1u, GROUPS - 1u));
#else
    let group$r = i / (GROUP_SIZE / 32u);
#endif
    let scale$r = widened_scale(row$r, group$r);
    let low$r = low_int8(w$r);
    let high$r = high_int8(w$r);
#endfor
#for l in 0..LOADS
    let at$l = (2u * x_row$l + x_half) * BLOCKS + i;
    let words$l = x[at$l * (4u / X_VECTOR) + x_words];
    let x_scale$l = x_scales[2u * at$l];
#if NORM
    squares$l += select(0.0, x_scales[2u * at$l + 1u], x_words == 0u);
#endif
#if X_VECTOR == 1
    let x$l_0 = x_scale$l * bytes(words$l);
#else
#for v in 0..X_VECTOR
    let x$l_$v = x_scale$l * bytes(words$l[$v]);
#endfor
#endif
#if AFFINE
    var own$l = dot(x$l_0, vec4<f32>(1.0));
#for v in 1..X_VECTOR
    own$l += dot(x$l_$v, vec4<f32>(1.0));
#endfor
#endif
#endfor
#for m in 0..M_TILE
#for r in 0..N_TILE
    var part$m_$r = 0.0;
#endfor
#endfor
#for c in 0..8
#if GROUP_SIZE == 16 and $c == 4
#for m in 0..M_TILE
#for r in 0..N_TILE
    sum$m_$r = fma(part$m_$r, scale$r.x, sum$m_$r);
    part$m_$r = 0.0;
#endfor
#endfor
#endif
#for r in 0..N_TILE
#if $c < 4
    let w$r_$c = bytes(low$r[$c]);
#else
    let w$r_$c = bytes(high$r[$($c - 4)]);
#endif
#endfor
#for m in 0..M_TILE
#for b in 0..4
    let value$m_$c_$b = subgroupBroadcast(
      x$($m / ROWS)_$($c % X_VECTOR)[$b], $($m % ROWS * SHARERS + $c / X_VECTOR)u);
#for r in 0..N_TILE
    part$m_$r = fma(w$r_$c[$b], value$m_$c_$b, part$m_$r);
#endfor
#endfor
#endfor
#endfor
#for m in 0..M_TILE
#if AFFINE
    var low_sum$m = 0.0;
    var high_sum$m = 0.0;
#for s in 0..SHARERS / 2
    low_sum$m += subgroupBroadcast(own$($m / ROWS), $($m % ROWS * SHARERS + $s)u) / UNIT;
    high_sum$m += subgroupBroadcast(own$($m / ROWS), $($m % ROWS * SHARERS + SHARERS / 2 + $s)u) / UNIT;
#endfor
#endif
#for r in 0..N_TILE
#if GROUP_SIZE == 16
    sum$m_$r = fma(part$m_$r, high_scale$r.x, sum$m_$r);
#if AFFINE
    sum$m_$r = fma(low_sum$m, scale$r.y, fma(high_sum$m, high_scale$r.y, sum$m_$r));
#endif
#else
    sum$m_$r = fma(part$m_$r, scale$r.x, sum$m_$r);
#if AFFINE
    sum$m_$r = fma(low_sum$m + high_sum$m, scale$r.y, sum$m_$r);
#endif
#endif
#endfor
#endfor
#else
#for r in 0..N_TILE
#if CODES
    let codes$r = weight[row$r * CHUNKS + i];
    let raw$r = load_scale(row$r, i * 16u / GROUP_SIZE);
#else
    let w$r = load8(row$r * CHUNKS + i);
#endif
#endfor
#for e in 0..EIGHTS
    let vector$e = ($(EIGHTS)u * i + $eu) * $(SHARERS)u + x_vector;
#if EIGHTS > 1
    let at$e = min(vector$e, ROW_EIGHTS * $(SHARERS)u - 1u);
#else
    let at$e = vector$e;
#endif
#if NORM and not SCALED
    let norm$e = norm_weight[at$e];
#endif
#for l in 0..LOADS
    let place$e_$l = x_row$l * (ROW_EIGHTS * $(SHARERS)u) + at$e;
#if NORM
    let own$e_$l = masked(x[place$e_$l], vector$e);
    squares$l += squared(own$e_$l);
#if SCALED
    let x$e_$l = masked(scaled_x[place$e_$l], vector$e);
#else
    let x$e_$l = own$e_$l * norm$e;
#endif
#else
    let x$e_$l = masked(x[place$e_$l], vector$e);
#endif
#endfor
#for r in 0..N_TILE
#if CODES
    let scale$e_$r = widen_scale(raw$r, i * 16u / GROUP_SIZE).x;
    let pair$e_$r = vec2<u32>(codes$r[$(2 * $e)], codes$r[$(2 * $e + 1)]);
    let low$e_$r = scale$e_$r * low4(pair$e_$r);
    let high$e_$r = scale$e_$r * high4(pair$e_$r);
#else
    let low$e_$r = low4(w$r);
    let high$e_$r = high4(w$r);
#endif
#endfor
#for m in 0..M_TILE
#for c in 0..8
#if X_VECTOR == 1
    let value$e_$m_$c = subgroupBroadcast(x$e_$($m / ROWS), $($m % ROWS * SHARERS + $c)u);
#else
    let value$e_$m_$c = subgroupBroadcast(
      x$e_$($m / ROWS)[$($c % X_VECTOR)], $($m % ROWS * SHARERS + $c / X_VECTOR)u);
#endif
#for r in 0..N_TILE
#if $c < 4
    sum$m_$r = fma(low$e_$r[$c], value$e_$m_$c, sum$m_$r);
#else
    sum$m_$r = fma(high$e_$r[$($c - 4)], value$e_$m_$c, sum$m_$r);
#endif
#endfor
#endfor
#endfor
#endfor
#endif
  }

  var sums: array<f32, $(VALUES)>;
#for m in 0..M_TILE
#if NORM
  let mean$m = subgroupAdd(select(0.0, squares$($m / ROWS), lane / $(SHARERS)u == $($m % ROWS)u)) / f32(K);
  let unit$m = UNIT * inverseSqrt(mean$m + EPS);
#else
  let unit$m = UNIT;
#endif
#for r in 0..N_TILE
  sums[$($m * N_TILE + $r)] = unit$m * sum$m_$r;
#endfor
#endfor

  for (var i = 0u; i < rolled(M_TILE * LANE_OUTPUTS, id.z); i++) {
    let row = first_row + i / LANE_OUTPUTS;
    let n = first + i % LANE_OUTPUTS * LANES;
    var writes = n < N;
#if STOPS
    writes = writes && row < step.n_rows && step.rows[row].alive != 0u;
#endif
    if (writes) {
#if GATED
      var gate = sums[2u * i];
      var up = sums[2u * i + 1u];
#if BIAS
      gate += bias[START + n];
      up += bias[START + N + n];
#endif
      var value = activated(gate, up);
#else
      var sum = sums[i];
#if BIAS
      sum += bias[START + n];
#endif
      var value = activated(sum, sum);
#endif
      let at = row * Y_STRIDE + START + n;
#if SIGMOID_GATE
      value /= 1.0 + exp(-gates[row * GATE_STRIDE + GATE_OFFSET]);
#elif FACTORS
      value *= gates[row * GATE_STRIDE + GATE_OFFSET + START + n];
#endif
#if RESIDUAL
      value += residual[at];
#endif
#if NEXT_NORM
      store_output(i, at, value, next_norm[START + n]);
#else
      store_output(i, at, value, 0.0);
#endif
    }
  }
}
