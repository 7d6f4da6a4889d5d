// y = activated(x W^T + bias) factor + residual for a few rows of x [rows][K], where W is [N][K], or, GATED,
// [2 N][K] with gate rows and then up rows (epilogue.wgsl). Each weight is loaded once: a workgroup consists
// of teams of TEAM invocations; a team has OUTPUTS rows of W and spreads their columns over its invocations.
//
// NORM: x norm_weight / sqrt(mean(x^2) + EPS) is taken for x; the sum of squares is gathered on the way, so
// the norm costs no kernel of its own. The factor is another activation for each output (FACTORS), the
// sigmoid of the row's gate (SIGMOID_GATE), or 1. What goes out is said in next_input.wgsl.
#include "team_sums.wgsl"
#include "grid.wgsl"
#let X = 1
#include "chunk_float.wgsl"
#include "chunk_int8.wgsl"
#include "step.wgsl"
// @param START u32               the first output that this shard of W holds
// @param Y_STRIDE u32
// @param ROWS u32                rows of x that a workgroup takes
// @param ROW_EACH bool           ROWS is one, and each row of x has workgroups of its own
// @param OUTPUTS u32             outputs per team
// @param UNROLL u32              chunks of columns in flight per row of W
// @param EPS f32
// @param STOPS bool              rows of x are those of the step: one that has stopped writes nothing
// @param GATED bool
// @param FACTORS bool
// @param SIGMOID_GATE bool       not with FACTORS; their gates and factors are:
// @param GATE_STRIDE u32
// @param GATE_OFFSET u32
// @param KEEP bool
// @param QUANTIZE bool           where ROWS is one, and TEAMS * OUTPUTS a multiple of 16
// @param NEXT_NORM bool
@group(0) @binding(0) var<storage, read> weight: array<vec4<u32>>;
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

const W_ROWS = OUTPUTS * $(1 + GATED)u;           // rows of W per team
const VALUES = ROWS * (W_ROWS + $(0 + NORM)u);    // sums per team

#if QUANTIZE
const FOURS = TEAMS * OUTPUTS / 4u;
#endif

// grid: linear_grid(N / (TEAMS * OUTPUTS)); with ROW_EACH its depth is the rows
@compute @workgroup_size(WG)
fn main(
  @builtin(workgroup_id) id: vec3<u32>,
  @builtin(num_workgroups) size: vec3<u32>,
  me: Invocation,
) {
  let first = workgroup_index(id, size) * (TEAMS * OUTPUTS);
#if ROW_EACH
  let first_row = id.z;
#else
  let first_row = 0u;
#endif
  if (first >= N) {
    return;
  }
#if TABLE
  fill_table(me.index, WG);
#endif
  let team = team_of(me);

  // One output for each of the first invocations: what is added to it is under way from the start.
  let out = me.index / (TEAMS * OUTPUTS);
  let out_row = first_row + out;
  let n = first + me.index % (TEAMS * OUTPUTS);
  var writes = out < ROWS && n < N;
#if STOPS
  writes = writes && step.rows[first_row + min(out, ROWS - 1u)].alive != 0u;
#endif
#if BIAS
  var own_bias = 0.0;
#if GATED
  var up_bias = 0.0;
#endif
#endif
#if RESIDUAL
  var own_residual = 0.0;
#endif
#if GATES
  var own_gate = 0.0;
#endif
  var own_norm = 0.0;
  if (writes) {
#if BIAS
    own_bias = bias[START + n];
#if GATED
    up_bias = bias[START + N + n];
#endif
#endif
#if RESIDUAL
    own_residual = residual[out_row * Y_STRIDE + START + n];
#endif
#if SIGMOID_GATE
    own_gate = 1.0 / (1.0 + exp(-gates[out_row * GATE_STRIDE + GATE_OFFSET]));
#elif FACTORS
    own_gate = gates[out_row * GATE_STRIDE + GATE_OFFSET + START + n];
#endif
#if NEXT_NORM
    own_norm = next_norm[START + n];
#endif
  }

#for o in 0..OUTPUTS
  let output$o = min(first + team.index * OUTPUTS + $ou, N - 1u);
#if GATED
  let row$(2 * $o) = output$o;
  let row$(2 * $o + 1) = output$o + N;
#else
  let row$o = output$o;
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

  for (var base = team.lane; base < CHUNKS; base += TEAM * UNROLL) {
#for u in 0..UNROLL
    let i$u = min(base + $uu * TEAM, CHUNKS - 1u);
#for r in 0..OUTPUTS * (1 + GATED)
    let w$r_$u = load_chunk(row$r, i$u);
#endfor
#endfor
#for u in 0..UNROLL
#for m in 0..ROWS
    let x$u_$m = load_activations(first_row + $mu, i$u, base + $uu * TEAM < CHUNKS);
#endfor
#endfor
#for u in 0..UNROLL
#for m in 0..ROWS
#if NORM
    squares$m += x$u_$m.squares;
#endif
#for r in 0..OUTPUTS * (1 + GATED)
    sum$m_$r += multiply(w$r_$u, x$u_$m);
#endfor
#endfor
#endfor
  }

#for m in 0..ROWS
#for r in 0..OUTPUTS * (1 + GATED)
  keep(team, $mu * W_ROWS + $ru, sum$m_$r, me);
#endfor
#if NORM
#if SUBGROUPS
  if (team.index == 0u)  // else there is one team, and its sums have barriers
#endif
  {
    keep(team, ROWS * W_ROWS + $mu, squares$m, me);
  }
#endif
#endfor
  workgroupBarrier();

  if (writes) {
    let owner = me.index / OUTPUTS % TEAMS;  // the team that has this output
    let place = me.index % OUTPUTS;
#if NORM
    let mean = total(0u, ROWS * W_ROWS + out, team.parts) / f32(K);
    let scale = UNIT * inverseSqrt(mean + EPS);
#else
    let scale = UNIT;
#endif
#if GATED
    var gate = scale * total(owner, out * W_ROWS + 2u * place, team.parts);
    var up = scale * total(owner, out * W_ROWS + 2u * place + 1u, team.parts);
#if BIAS
    gate += own_bias;
    up += up_bias;
#endif
    var value = activated(gate, up);
#else
    var sum = scale * total(owner, out * W_ROWS + place, team.parts);
#if BIAS
    sum += own_bias;
#endif
    var value = activated(sum, sum);
#endif
#if GATES
    value *= own_gate;
#endif
#if RESIDUAL
    value += own_residual;
#endif
    store_output(me.index, out_row * Y_STRIDE + START + n, value, own_norm);
  }
#if QUANTIZE

  workgroupBarrier();
  if (me.index < FOURS) {
    quantize_outputs(me.index, first_row, Y_STRIDE / 32u, (START + first) / 16u);
  }
#endif
}
