// y = x / sqrt(mean(x^2) + EPS) * weight over each part of WIDTH values of a row of x
// [rows][parts][WIDTH]. One part: the norm of a layer. Several: the norm of each head, or of each of
// GROUPS, which have weights of their own.
//
// GATED: y is multiplied by silu(gate). RESIDUAL is added to y, and FACTOR, one number, multiplies
// the sum. What the next projection wants to read goes out too: y times the weights of its norm
// (NEXT_NORM); or that, or y, as int8, of which a part is whole halves of blocks, and subgroups have as
// many lanes as share a scale (QUANTIZE); or y in f16, as half_rows.wgsl makes it, of one part of whole 64 columns
// (HALVES, not with the other two). KEEP: y itself is needed.
#include "reduce.wgsl"
#include "quantize_block.wgsl"
#include "crossed_halves.wgsl"
#include "half_scale.wgsl"
// @param WIDTH u32
// @param GROUPS u32
// @param EPS f32
// @param LANES u32               of a vector: 4, or 1 where something is not a multiple of 4
// @param X_STRIDE u32
// @param X_OFFSET u32
// @param Y_STRIDE u32
// @param GATED bool
// @param GATE_STRIDE u32
// @param GATE_OFFSET u32
// @param RESIDUAL bool
// @param FACTOR bool
// @param X_SCALES halves|blocks|rows
// @param SCALE_ROWS u32
// @param KEEP bool
// @param NEXT_NORM bool
// @param HALVES bool             LANES are 4
#if LANES == 4
alias Vector = vec4<f32>;

fn sum(v: Vector) -> f32 {
  return dot(v, vec4<f32>(1.0));
}
#else
alias Vector = f32;

fn sum(v: Vector) -> f32 {
  return v;
}
#endif
@group(0) @binding(0) var<storage, read> x: array<Vector>;
@group(0) @binding(1) var<storage, read> weight: array<Vector>;
#if GATED
@group(0) @binding(2) var<storage, read> gate: array<Vector>;
#endif
#if RESIDUAL
@group(0) @binding($(2 + GATED)) var<storage, read> residual: array<Vector>;
#endif
#if FACTOR
@group(0) @binding($(2 + GATED + RESIDUAL)) var<storage, read> factor: array<f32>;
#endif
#let OUT = 2 + GATED + RESIDUAL + FACTOR
#if KEEP
@group(0) @binding($(OUT)) var<storage, read_write> y: array<Vector>;
#endif
#if QUANTIZE
@group(0) @binding($(OUT + KEEP)) var<storage, read_write> x_int8: array<u32>;
@group(0) @binding($(OUT + KEEP + 1)) var<storage, read_write> x_int8_scales: array<Int8Scale>;
#elif HALVES
@group(0) @binding($(OUT + KEEP)) var<storage, read_write> x_halves: array<vec2<u32>>;
@group(0) @binding($(OUT + KEEP + 1)) var<storage, read_write> x_scales: array<f32>;
#elif NEXT_NORM
@group(0) @binding($(OUT + KEEP)) var<storage, read_write> next_x: array<Vector>;
#endif
#if NEXT_NORM
@group(0) @binding($(OUT + KEEP + 1 + QUANTIZE)) var<storage, read> next_norm: array<Vector>;
#endif

const VECTORS = WIDTH / LANES;  // of a part
#let ROUNDS = (WIDTH + LANES * WG - 1) / (LANES * WG)

// grid (parts, rows)
@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) id: vec3<u32>, me: Invocation) {
  let x_row = (id.y * X_STRIDE + X_OFFSET) / LANES + id.x * VECTORS;
  let y_row = id.y * Y_STRIDE / LANES + id.x * VECTORS;
  // All that is read is under way before the sum is known.
  var sums = Vector();
#if SUBGROUPS
  let first = me.subgroup * (WG / me.n_subgroups) + me.lane;  // lanes are neighbours
#else
  let first = me.index;
#endif
#for j in 0..ROUNDS
  let i$j = first + $ju * WG;
  var value$j = Vector();
  var weight$j = Vector();
#if GATED
  var gate$j = Vector();
#endif
#if RESIDUAL
  var residual$j = Vector();
#endif
#if NEXT_NORM
  var next_norm$j = Vector();
#endif
  if (i$j < VECTORS) {
    value$j = x[x_row + i$j];
    weight$j = weight[id.x % GROUPS * VECTORS + i$j];
#if GATED
    gate$j = gate[(id.y * GATE_STRIDE + GATE_OFFSET) / LANES + id.x * VECTORS + i$j];
#endif
#if RESIDUAL
    residual$j = residual[y_row + i$j];
#endif
#if NEXT_NORM
    next_norm$j = next_norm[id.x * VECTORS + i$j];
#endif
  }
  sums += value$j * value$j;
#endfor
  let scale = inverseSqrt(workgroup_add(sum(sums), me) / f32(WIDTH) + EPS);
#for j in 0..ROUNDS
  if (i$j < VECTORS) {
    value$j *= scale * weight$j;
#if GATED
    value$j *= gate$j / (1.0 + exp(-gate$j));
#endif
#if RESIDUAL
    value$j += residual$j;
#endif
#if FACTOR
    value$j *= factor[0];
#endif
#if KEEP
    y[y_row + i$j] = value$j;
#endif
#if NEXT_NORM and not QUANTIZE
    next_x[y_row + i$j] = value$j * next_norm$j;
#endif
  }
#if QUANTIZE
  var squares$j = dot(value$j, value$j);
#if NEXT_NORM
  value$j *= next_norm$j;
#endif
  var most$j = magnitude(value$j);
#for k in 0..log2(SHARERS)
  most$j = max(most$j, subgroupShuffleXor(most$j, $(1 << $k)u));
#endfor
#for k in 0..2
  squares$j += subgroupShuffleXor(squares$j, $(1 << $k)u);
#endfor
  if (i$j < VECTORS) {
    let half = id.x * (WIDTH / 16u) + i$j / 4u;
    store_int8(id.y, Y_STRIDE / 32u, half, i$j % 4u, value$j, most$j, squares$j);
  }
#endif
#endfor
#if HALVES
  var most = 0.0;
#for j in 0..ROUNDS
  let large$j = max(abs(value$j.xy), abs(value$j.zw));
  most = max(most, max(large$j.x, large$j.y));
#endfor
  let of_row = half_scale(workgroup_max(most, me));
  if (me.index == 0u) {
    x_scales[id.y] = of_row.inverse;
  }
#for j in 0..ROUNDS
  if (i$j < VECTORS) {
    x_halves[id.y * VECTORS + i$j] = crossed_four(of_row.factor * value$j);
  }
#endfor
#endif
}
