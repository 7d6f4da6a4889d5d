// The state space model of Mamba 2 (Dao & Gu 2024): for one row after the other, and for each head,
//
//   S = exp(-dt exp(a_log)) S + B^T (dt x);  y = (C S + D x) silu(z)
//
// where softplus(dt + dt_bias), from DT_MIN to DT_MAX, is taken for dt. S goes on from the state and
// is left there. An invocation keeps STATE_DIM / SPLIT values of a column of S in registers through
// all rows.
#include "step.wgsl"
#include "softplus.wgsl"
// @param GROUPS u32      neighbouring heads share B and C
// @param HEADS u32
// @param STATE_DIM u32   a multiple of 4 * SPLIT
// @param HEAD_DIM u32    HEADS * HEAD_DIM is a multiple of 4
// @param DT_MIN f32
// @param DT_MAX f32
// @param COLUMNS u32     of a workgroup
// @param SPLIT u32
// @param X_STRIDE u32
// @param Z_STRIDE u32
// @param Z_OFFSET u32
// @param DT_STRIDE u32
// @param DT_OFFSET u32
// @param Y_STRIDE u32
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;       // [rows][x: HEADS; B, C: GROUPS]
@group(0) @binding(2) var<storage, read> z: array<f32>;             // [rows][HEADS][HEAD_DIM]
@group(0) @binding(3) var<storage, read> dt: array<f32>;            // [rows][HEADS]
@group(0) @binding(4) var<storage, read> heads: array<f32>;         // [a_log, dt_bias, D][HEADS]
@group(0) @binding(5) var<storage, read_write> state: array<f32>;   // [HEADS][STATE_DIM][HEAD_DIM]
@group(0) @binding(6) var<storage, read_write> y: array<f32>;       // [rows][HEADS][HEAD_DIM]

const WG = COLUMNS * SPLIT;
const OWN = STATE_DIM / SPLIT;  // of an invocation

// Those of two rows, so that a row may be written while the one before is still read.
var<workgroup> sums: array<f32, 2u * WG>;

// grid (HEAD_DIM / COLUMNS, HEADS)
@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  if (step.rows[0].alive == 0u) {
    return;
  }
  let head = id.y;
  let inside = id.x * COLUMNS + tid % COLUMNS < HEAD_DIM;
  let column = min(id.x * COLUMNS + tid % COLUMNS, HEAD_DIM - 1u);
  let part = tid / COLUMNS;
  let own = (head * STATE_DIM + part * OWN) * HEAD_DIM + column;
  let goes_on = step.rows[0].position > 0u;
#for j in 0..STATE_DIM / (4 * SPLIT)
  var s$j = vec4<f32>();
  if (goes_on) {
    s$j = vec4<f32>(
      state[own + $(4 * $j)u * HEAD_DIM],
      state[own + $(4 * $j + 1)u * HEAD_DIM],
      state[own + $(4 * $j + 2)u * HEAD_DIM],
      state[own + $(4 * $j + 3)u * HEAD_DIM],
    );
  }
#endfor
  let rate = exp(heads[head]);
  let bias = heads[HEADS + head];
  let skip = heads[2u * HEADS + head];
  for (var row = 0u; row < step.n_rows; row++) {
    let x_at = row * X_STRIDE + head * HEAD_DIM + column;
    let value = x[x_at / 4u][x_at % 4u];
    let group = head / (HEADS / GROUPS);
    let b_at = (row * X_STRIDE + HEADS * HEAD_DIM + group * STATE_DIM + part * OWN) / 4u;
    let c_at = b_at + GROUPS * STATE_DIM / 4u;
    let delta = clamp(softplus(dt[row * DT_STRIDE + DT_OFFSET + head] + bias), DT_MIN, DT_MAX);
    let decay = exp(-delta * rate);
    var sum = 0.0;
#for j in 0..STATE_DIM / (4 * SPLIT)
    s$j = decay * s$j + delta * value * x[b_at + $ju];
    sum += dot(x[c_at + $ju], s$j);
#endfor
    let half = row % 2u;
    sums[half * WG + tid] = sum;
    workgroupBarrier();
    if (inside && part == 0u) {
      for (var i = 1u; i < SPLIT; i++) {
        sum += sums[half * WG + i * COLUMNS + tid];
      }
      let gate = z[row * Z_STRIDE + Z_OFFSET + head * HEAD_DIM + column];
      y[row * Y_STRIDE + head * HEAD_DIM + column] =
        (sum + skip * value) * gate / (1.0 + exp(-gate));
    }
  }
  if (inside) {
#for j in 0..STATE_DIM / SPLIT
    state[own + $ju * HEAD_DIM] = s$($j / 4)[$($j % 4)];
#endfor
  }
}
