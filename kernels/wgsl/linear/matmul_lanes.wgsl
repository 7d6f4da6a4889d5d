// y = activated(x W^T + bias) factor + residual, as matmul_vec.wgsl, for CPUs, where a load takes a lane after
// the other, a product all lanes at once, and passing a lane's value on to all of them next to nothing.
//
// So lanes lie along the rows of W: each has N_TILE of them by M_TILE rows of x, and goes through all
// columns. Of x the subgroup, which is a workgroup, loads every value once, spread over its lanes. Without
// barriers and sums over lanes it compiles in a tenth of the time that others take; and what order a sum is
// made in depends on nothing but K.
//
// NORM, SCALED: as in chunk_float.wgsl. The factor is as in matmul_vec.wgsl.
#include "grid.wgsl"
#include "weight.wgsl"
#include "scales.wgsl"
#include "step.wgsl"
#include "rolled.wgsl"
// @param START u32               the first output that this shard of W holds
// @param Y_STRIDE u32
// @param LANES u32               of a subgroup
// @param M_TILE u32              rows of x of a workgroup
// @param N_TILE u32              rows of W of a lane, even with GATED
// @param X_VECTOR u32            1, 2 or 4: neighbours in a row of x that a lane loads at once
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
#if X_VECTOR == 1
alias Vector = f32;

fn squared(v: Vector) -> f32 {
  return v * v;
}
#else
alias Vector = vec$(X_VECTOR)<f32>;

fn squared(v: Vector) -> f32 {
  return dot(v, v);
}
#endif
@group(0) @binding(0) var<storage, read> weight: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> x: array<Vector>;
#if CODES
@group(0) @binding(2) var<storage, read> scales: array<u32>;
#endif
#if SCALED
@group(0) @binding($(2 + CODES)) var<storage, read> scaled_x: array<Vector>;
#elif NORM
@group(0) @binding($(2 + CODES)) var<storage, read> norm_weight: array<Vector>;
#endif
#let AFTER_X = 2 + CODES + NORM
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

#let EIGHTS = 1 + CODES  // groups of eight columns of a chunk, which a lane loads of a row of W at once
const CHUNKS = (K + $(8 * EIGHTS - 1)u) / $(8 * EIGHTS)u;  // of a row
const ROW_EIGHTS = (K + 7u) / 8u;  // of x
#let SHARERS = 8 / X_VECTOR      // lanes that load eight columns of a row of x,
#let ROWS = LANES / SHARERS      // of so many rows at once,
#let LOADS = (M_TILE + ROWS - 1) / ROWS  // in so many loads
#let VALUES = M_TILE * N_TILE
const LANE_OUTPUTS = N_TILE / $(1 + GATED)u;
const OUTPUTS = LANES * LANE_OUTPUTS;
#if CODES
const UNIT = CODE;  // what sums are multiples of
#else
const UNIT = 1.0;
#endif

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
#for l in 0..LOADS
  let x_row$l = (first_row + min(lane / $(SHARERS)u + $($l * ROWS)u, M_TILE - 1u)) * (ROW_EIGHTS * $(SHARERS)u);
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
#if NORM
    let own$e_$l = masked(x[x_row$l + at$e], vector$e);
    squares$l += squared(own$e_$l);
#if SCALED
    let x$e_$l = masked(scaled_x[x_row$l + at$e], vector$e);
#else
    let x$e_$l = own$e_$l * norm$e;
#endif
#else
    let x$e_$l = masked(x[x_row$l + at$e], vector$e);
#endif
#endfor
#for r in 0..N_TILE
#if CODES
    let scale$e_$r = widen_scale(raw$r, i * 16u / GROUP_SIZE).x;
    let low$e_$r = scale$e_$r * low4(vec2<u32>(codes$r[$(2 * $e)], codes$r[$(2 * $e + 1)]));
    let high$e_$r = scale$e_$r * high4(vec2<u32>(codes$r[$(2 * $e)], codes$r[$(2 * $e + 1)]));
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
