// y = x A^T, [rows][N], where each row has the A of its adapter, and is 0 without one: the first half of
// LoRA (Hu et al. 2021). A workgroup has OUTPUTS outputs of ROWS rows, and loads weights where a row has
// another adapter than the one before.
//
// NORM: x norm_weight / sqrt(mean(x^2) + EPS) is taken for x, as in matmul_vec.wgsl.
#include "team_sums.wgsl"
#let X = 1
#include "chunk_float.wgsl"
#include "lora_adapters.wgsl"
// @param OUTPUTS u32
// @param Y_STRIDE u32
// @param EPS f32
@group(0) @binding(0) var<storage, read> weight: array<vec4<u32>>;
@group(0) @binding($(AFTER_X)) var<storage, read> step: Step;
@group(0) @binding($(AFTER_X + 1)) var<storage, read_write> y: array<f32>;

const VALUES = ROWS * (OUTPUTS + $(0 + NORM)u);

// grid (N / OUTPUTS, rows / ROWS)
@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) id: vec3<u32>, me: Invocation) {
  let first = id.x * OUTPUTS;
  let first_row = id.y * ROWS;
  let team = team_of(me);
  var changed = 0u;
#for m in 0..ROWS
  let adapter$m = adapter_of(first_row + $mu);
  changed |= adapter$m;
#endfor
#for r in 0..OUTPUTS
  let n$r = min(first + $ru, N - 1u);
#for m in 0..ROWS
  var sum$m_$r = 0.0;
#endfor
#endfor
#if NORM
#for m in 0..ROWS
  var squares$m = 0.0;
#endfor
#endif

  for (var i = team.lane; i < select(0u, CHUNKS, changed != 0u); i += TEAM) {
#for r in 0..OUTPUTS
    var w$r = load_stacked(adapter0, n$r, i);
#endfor
#for m in 0..ROWS
#if $m > 0
    if (adapter$m != adapter$($m - 1)) {
#for r in 0..OUTPUTS
      w$r = load_stacked(adapter$m, n$r, i);
#endfor
    }
#endif
    let x$m = load_activations(first_row + $mu, i, true);
#if NORM
    squares$m += x$m.squares;
#endif
#for r in 0..OUTPUTS
    sum$m_$r += multiply(w$r, x$m);
#endfor
#endfor
  }

#for m in 0..ROWS
#for r in 0..OUTPUTS
  keep(team, $mu * OUTPUTS + $ru, sum$m_$r, me);
#endfor
#if NORM
  keep(team, ROWS * OUTPUTS + $mu, squares$m, me);
#endif
#endfor
  workgroupBarrier();

  let out = me.index / OUTPUTS;
  let n = first + me.index % OUTPUTS;
  if (out < ROWS && n < N) {
    let row = first_row + out;
    let adapter = adapter_of(row);
    if (is_own(adapter, n)) {
      var value = total(0u, me.index, team.parts);
#if NORM
      value *= inverseSqrt(total(0u, ROWS * OUTPUTS + out, team.parts) / f32(K) + EPS);
#endif
      y[row * Y_STRIDE + n] = select(value, 0.0, adapter == 0u);
    }
  }
}
