// Projections of a few rows by the experts that each is routed to, built like matmul_vec.wgsl. W
// holds the experts one below the other.
//
//   y[row][slot] = activate(x[row] W_e^T + bias_e)
//   y[row] = sum of weight[row][slot] (x[row][slot] W_e^T + bias_e) over the slots + residual   with COMBINE
//
// where e is the expert of a slot, and W_e [N][K], or, GATED, [2 N][K] with gate rows and then up rows, and
// gated(gate, up) in place of activate. With NORM x is normed as in matmul_vec.wgsl.
// Without COMBINE a workgroup has a row and one of its experts; with it, all: one long dot product.
// With ROUTE every workgroup chooses the experts by itself, and one of them writes what was chosen.
// next_input.wgsl describes the outputs.
// A shard of W holds some of the experts; the others are another dispatch's, here their sums are 0.
#include "team_sums.wgsl"
#let X = 2
#include "chunk_float.wgsl"
#include "chunk_int8.wgsl"
#include "routing.wgsl"
#include "top_experts.wgsl"
#include "activate.wgsl"
// @param N u32                   outputs of an expert
// @param Y_STRIDE u32            of a row, or of one of its slots
// @param OUTPUTS u32             outputs per team
// @param UNROLL u32              chunks of columns in flight per row of W
// @param EPS f32
// @param FIRST_EXPERT u32        of this shard of W
// @param SHARD_EXPERTS u32
// @param COMBINE bool
// @param GATED bool              not with COMBINE
// @param BIAS bool
// @param RESIDUAL bool
// @param KEEP bool
// @param QUANTIZE bool           TEAMS * OUTPUTS a multiple of 16
// @param NEXT_NORM bool
@group(0) @binding(0) var<storage, read> weight: array<vec4<u32>>;
#if ROUTE
@group(0) @binding(1) var<storage, read> logits: array<f32>;
#else
@group(0) @binding(1) var<storage, read> routing: array<f32>;
#endif
#if BIAS
@group(0) @binding($(AFTER_X)) var<storage, read> bias: array<f32>;  // of all experts
#endif
#if RESIDUAL
@group(0) @binding($(AFTER_X + BIAS)) var<storage, read> residual: array<f32>;
#endif
#let OUTPUT = AFTER_X + BIAS + RESIDUAL
#include "next_input.wgsl"
#let ROUTED = OUTPUT + KEEP + 2 * QUANTIZE
#if ROUTE
@group(0) @binding($(ROUTED)) var<storage, read_write> routing: array<f32>;
#if CORRECTION
@group(0) @binding($(ROUTED + 1)) var<storage, read> correction: array<f32>;
#endif
#endif

#let W_ROWS = OUTPUTS * (1 + GATED)
#let ROWS_OF_X = 1 + COMBINE * (SLOTS + SHARED - 1)
const VALUES = $(W_ROWS + NORM)u;      // sums per team
const STEPS = CHUNKS * $(ROWS_OF_X)u;

#if QUANTIZE
const FOURS = TEAMS * OUTPUTS / 4u;
#endif

fn in_shard(expert: u32) -> bool {
  return expert - FIRST_EXPERT < SHARD_EXPERTS;
}

// The first row of W that an expert has; of one that is not in this shard, any.
fn row_of(expert: u32) -> u32 {
  return select(0u, expert - FIRST_EXPERT, in_shard(expert)) * N * $(1 + GATED)u;
}

// grid (N / (TEAMS * OUTPUTS), rows * ALL_SLOTS); COMBINE: rows
@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) id: vec3<u32>, me: Invocation) {
#if TABLE
  fill_table(me.index, WG);
#endif
  let first = id.x * (TEAMS * OUTPUTS);
  let team = team_of(me);

  // One output for each of the first invocations: what is added to it is under way from the start.
  let n = first + me.index;
  let own_output = me.index < TEAMS * OUTPUTS && n < N;
#if RESIDUAL
  var own_residual = 0.0;
#endif
  var own_norm = 0.0;
  if (own_output) {
#if RESIDUAL
    own_residual = residual[id.y * Y_STRIDE + n];
#endif
#if NEXT_NORM
    own_norm = next_norm[n];
#endif
  }

#if ROUTE
  let expert = choose_expert(id.y / ALL_SLOTS, id.y % ALL_SLOTS, me);
#elif not COMBINE
  let expert = expert_of(id.y / ALL_SLOTS, id.y % ALL_SLOTS);
#endif
#if COMBINE
  let writes = own_output;
#if BIAS
#for s in 0..SLOTS + SHARED
  var own_bias$s = 0.0;
  if (writes) {
    own_bias$s = bias[expert_of(id.y, $su) * N + n];
  }
#endfor
#endif
#else
  let writes = own_output && in_shard(expert);
#if BIAS
#for p in 0..1 + GATED
  var own_bias$p = 0.0;
  if (writes) {
    own_bias$p = bias[($(1 + GATED)u * expert + $pu) * N + n];
  }
#endfor
#endif
  let expert_row = row_of(expert);
#endif
#for o in 0..OUTPUTS
  let output$o = min(first + team.index * OUTPUTS + $ou, N - 1u);
#if GATED
  let row$(2 * $o) = expert_row + output$o;
  let row$(2 * $o + 1) = expert_row + output$o + N;
#elif not COMBINE
  let row$o = expert_row + output$o;
#endif
#endfor
#for r in 0..W_ROWS
  var sum$r = 0.0;
#endfor
#if NORM
  var squares = 0.0;
#endif

  for (var base = team.lane; base < STEPS; base += TEAM * UNROLL) {
#for u in 0..UNROLL
#if COMBINE
    let at$u = min(base + $uu * TEAM, STEPS - 1u);
    let slot$u = at$u / CHUNKS;
    let i$u = at$u % CHUNKS;
    let expert$u = expert_of(id.y, slot$u);
    let expert_row$u = row_of(expert$u);
#for o in 0..OUTPUTS
    let w$o_$u = load_chunk(expert_row$u + output$o, i$u);
#endfor
#else
    let i$u = min(base + $uu * TEAM, CHUNKS - 1u);
#for r in 0..W_ROWS
    let w$r_$u = load_chunk(row$r, i$u);
#endfor
#endif
#endfor
#for u in 0..UNROLL
#if COMBINE
    let x$u = load_activations(id.y * ALL_SLOTS + slot$u, i$u, base + $uu * TEAM < STEPS);
#else
    let x$u = load_activations(id.y / ALL_SLOTS, i$u, base + $uu * TEAM < STEPS);
#endif
#endfor
#for u in 0..UNROLL
#if COMBINE
    let weight$u = select(0.0, weight_of(id.y, slot$u), in_shard(expert$u));
#for o in 0..OUTPUTS
    sum$o += weight$u * multiply(w$o_$u, x$u);
#endfor
#else
#if NORM
    squares += x$u.squares;
#endif
#for r in 0..W_ROWS
    sum$r += multiply(w$r_$u, x$u);
#endfor
#endif
#endfor
  }

#for r in 0..W_ROWS
  keep(team, $ru, sum$r, me);
#endfor
#if NORM
#if SUBGROUPS
  if (team.index == 0u)  // else there is one team, and its sums have barriers
#endif
  {
    keep(team, $(W_ROWS)u, squares, me);
  }
#endif
  workgroupBarrier();

  if (writes) {
    let owner = me.index / OUTPUTS;  // the team that has this output
    let place = me.index % OUTPUTS;
#if NORM
    let mean = total(0u, $(W_ROWS)u, team.parts) / f32(K);
    let scale = UNIT * inverseSqrt(mean + EPS);
#else
    let scale = UNIT;
#endif
#if COMBINE
    var value = scale * total(owner, place, team.parts);
#if BIAS
#for s in 0..SLOTS + SHARED
    value += select(0.0, weight_of(id.y, $su), in_shard(expert_of(id.y, $su))) * own_bias$s;
#endfor
#endif
#elif GATED
    var gate = scale * total(owner, 2u * place, team.parts);
    var up = scale * total(owner, 2u * place + 1u, team.parts);
#if BIAS
    gate += own_bias0;
    up += own_bias1;
#endif
    var value = gated(gate, up);
#else
    var value = scale * total(owner, place, team.parts);
#if BIAS
    value += own_bias0;
#endif
    value = activate(value);
#endif
#if RESIDUAL
    value += own_residual;
#endif
    store_output(me.index, id.y * Y_STRIDE + n, value, own_norm);
  }
#if QUANTIZE

  workgroupBarrier();
#if COMBINE
  if (me.index < FOURS) {
#else
  if (me.index < FOURS && in_shard(expert)) {
#endif
    quantize_outputs(me.index, id.y, N / 32u, first / 16u);
  }
#endif
#if ROUTE
  if (id.x == 0u) {
    write_routing(id.y / ALL_SLOTS, id.y % ALL_SLOTS, id.y % ALL_SLOTS + 1u, me);
  }
#endif
}
