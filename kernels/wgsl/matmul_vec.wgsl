// y = x W^T for a few rows of x: each weight is loaded once, by a workgroup that has OUTPUTS rows of
// W and spreads their columns over its invocations.
//
// NORM: x is first normed, y = (x * norm_weight) W^T / sqrt(mean(x^2) + EPS); the sum of squares is
// gathered on the way, so the norm costs no kernel of its own. GATED: W holds gate rows, then up
// rows, and y = silu(gate) * up. BIAS and RESIDUAL are added to y.
#include "reduce.wgsl"
#include "grid.wgsl"
#include "weight.wgsl"
// @param K u32                   columns of W
// @param N u32                   outputs: rows of W, or half of them with GATED
// @param START u32               the first output that this shard of W holds
// @param Y_STRIDE u32
// @param ROWS u32                rows of x
// @param OUTPUTS u32             outputs per workgroup
// @param UNROLL u32              loads in flight per row of W
// @param NORM bool
// @param EPS f32
// @param GATED bool
// @param BIAS bool
// @param RESIDUAL bool
@group(0) @binding(0) var<storage, read> weight: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
#if NORM
@group(0) @binding(3) var<storage, read> norm_weight: array<vec4<f32>>;
#endif
#if BIAS
@group(0) @binding($(3 + NORM)) var<storage, read> bias: array<f32>;
#endif
#if RESIDUAL
@group(0) @binding($(3 + NORM + BIAS)) var<storage, read> residual: array<f32>;
#endif

const GROUPS = (K + 7u) / 8u;
const W_ROWS = OUTPUTS * $(1 + GATED)u;           // rows of W per workgroup
const VALUES = ROWS * (W_ROWS + $(0 + NORM)u);    // sums per workgroup
#if SUBGROUPS
const PARTS = WG / 4u;
#else
const PARTS = 1u;
#endif

var<workgroup> partial: array<array<f32, PARTS>, VALUES>;

fn total(value: u32, parts: u32) -> f32 {
  var sum = 0.0;
  for (var i = 0u; i < parts; i++) {
    sum += partial[value][i];
  }
  return sum;
}
#if K % 8 != 0

// Columns beyond K are padding: zero in W, anything in x.
fn masked(value: vec4<f32>, column: u32) -> vec4<f32> {
  return select(vec4<f32>(), value, column + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(K));
}
#endif

// grid: linear_grid(N / OUTPUTS)
@compute @workgroup_size(WG)
fn main(
  @builtin(workgroup_id) id: vec3<u32>,
  @builtin(num_workgroups) size: vec3<u32>,
  me: Invocation,
) {
  let first = workgroup_index(id, size) * OUTPUTS;
  if (first >= N) {
    return;
  }
#for o in 0..OUTPUTS
  let output$o = min(first + $ou, N - 1u);
#if GATED
  let row$(2 * $o) = output$o * GROUPS;
  let row$(2 * $o + 1) = (output$o + N) * GROUPS;
#else
  let row$o = output$o * GROUPS;
#endif
#endfor
#for m in 0..ROWS
#for r in 0..OUTPUTS * (1 + GATED)
  var sum$m_$r = 0.0;
#endfor
#if NORM
  var squares$m = 0.0;
#endif
#endfor

  for (var base = me.index; base < GROUPS; base += WG * UNROLL) {
#for u in 0..UNROLL
    let i$u = min(base + $uu * WG, GROUPS - 1u);
#for r in 0..OUTPUTS * (1 + GATED)
    let w$r_$u = load8(row$r + i$u);
#endfor
#endfor
#for u in 0..UNROLL
#if NORM
    let norm_low$u = norm_weight[2u * i$u];
    let norm_high$u = norm_weight[2u * i$u + 1u];
#endif
#for m in 0..ROWS
    var low$u_$m = x[$mu * 2u * GROUPS + 2u * i$u];
    var high$u_$m = x[$mu * 2u * GROUPS + 2u * i$u + 1u];
#if K % 8 != 0
    low$u_$m = masked(low$u_$m, 8u * i$u);
    high$u_$m = masked(high$u_$m, 8u * i$u + 4u);
#endif
#if (K + 7) / 8 % (WG * UNROLL) != 0
    low$u_$m = select(vec4<f32>(), low$u_$m, base + $uu * WG < GROUPS);
    high$u_$m = select(vec4<f32>(), high$u_$m, base + $uu * WG < GROUPS);
#endif
#if NORM
    squares$m += dot(low$u_$m, low$u_$m) + dot(high$u_$m, high$u_$m);
    low$u_$m *= norm_low$u;
    high$u_$m *= norm_high$u;
#endif
#for r in 0..OUTPUTS * (1 + GATED)
    sum$m_$r += dot(low4(w$r_$u), low$u_$m) + dot(high4(w$r_$u), high$u_$m);
#endfor
#endfor
#endfor
  }

#for m in 0..ROWS
#for r in 0..OUTPUTS * (1 + GATED)
  keep($mu * W_ROWS + $ru, sum$m_$r, me);
#endfor
#if NORM
  keep(ROWS * W_ROWS + $mu, squares$m, me);
#endif
#endfor
  workgroupBarrier();

  for (var i = me.index; i < ROWS * OUTPUTS; i += WG) {
    let m = i / OUTPUTS;
    let n = first + i % OUTPUTS;
    if (n < N) {
#if SUBGROUPS
      let parts = me.n_subgroups;
#else
      let parts = 1u;
#endif
#if NORM
      let scale = inverseSqrt(total(ROWS * W_ROWS + m, parts) / f32(K) + EPS);
#else
      let scale = 1.0;
#endif
#if GATED
      var gate = scale * total(m * W_ROWS + 2u * (i % OUTPUTS), parts);
      var up = scale * total(m * W_ROWS + 2u * (i % OUTPUTS) + 1u, parts);
#if BIAS
      gate += bias[START + n];
      up += bias[START + N + n];
#endif
      var value = gate / (1.0 + exp(-gate)) * up;
#else
      var value = scale * total(m * W_ROWS + i % OUTPUTS, parts);
#if BIAS
      value += bias[START + n];
#endif
#endif
#if RESIDUAL
      value += residual[m * Y_STRIDE + START + n];
#endif
      y[m * Y_STRIDE + START + n] = value;
    }
  }
}

// Sum a value over the workgroup, as far as it goes without waiting for the other subgroups.
fn keep(value: u32, sum: f32, me: Invocation) {
#if SUBGROUPS
  let part = subgroupAdd(sum);
  if (me.lane == 0u) {
    partial[value][me.subgroup] = part;
  }
#else
  let part = workgroup_add(sum, me);
  if (me.index == 0u) {
    partial[value][0] = part;
  }
#endif
}
