// The gated delta rule (Yang et al. 2024): for one row after the other, and for each head,
//
//   S = decay * S;  S = S + k^T (beta * (v - k S));  y = q S
//
// where k and q have length 1, q / sqrt(KEY_DIM) is taken for q, beta = sigmoid(b), and
// decay = exp(-exp(a_log) * softplus(a + dt_bias)). S goes on from the state and is left there.
//
// An invocation keeps KEY_DIM / SPLIT values of a column of S in registers through all rows. What q
// and k have to do with a column is summed from S as it was before the row, so that there is one
// sum over the SPLIT invocations of a column, and one barrier, for a row:
//
//   k (decay S) = decay (k S);  q S' = decay (q S) + (q k) delta
#include "step.wgsl"
#include "softplus.wgsl"
// @param KEY_HEADS u32   neighbouring heads share a query and a key
// @param HEADS u32
// @param KEY_DIM u32     a multiple of 4 * SPLIT
// @param VALUE_DIM u32
// @param COLUMNS u32     of a workgroup
// @param SPLIT u32
// @param X_STRIDE u32
// @param GATES_STRIDE u32
// @param Y_STRIDE u32
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;       // [rows][q, k: KEY_HEADS; v: HEADS]
@group(0) @binding(2) var<storage, read> gates: array<f32>;         // [rows][b, a: HEADS]
@group(0) @binding(3) var<storage, read> a_log: array<f32>;
@group(0) @binding(4) var<storage, read> dt_bias: array<f32>;
@group(0) @binding(5) var<storage, read_write> state: array<f32>;   // [HEADS][KEY_DIM][VALUE_DIM]
@group(0) @binding(6) var<storage, read_write> y: array<f32>;       // [rows][HEADS][VALUE_DIM]

const WG = COLUMNS * SPLIT;
const KEYS = KEY_DIM / SPLIT;  // of an invocation
const EPS = 1e-6;

// Those of two rows, so that a row may be written while the one before is still read.
var<workgroup> column_sums: array<vec2<f32>, 2u * WG>;     // k S, q S
var<workgroup> row_sums: array<vec3<f32>, 2u * SPLIT>;     // k k, q q, q k

// grid (VALUE_DIM / COLUMNS, HEADS)
@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  if (step.rows[0].alive == 0u) {
    return;
  }
  let head = id.y;
  let column = id.x * COLUMNS + tid % COLUMNS;
  let inside = column < VALUE_DIM;
  let part = tid / COLUMNS;
  let own = (head * KEY_DIM + part * KEYS) * VALUE_DIM + column;
  let goes_on = inside && step.rows[0].position > 0u;
#for j in 0..KEY_DIM / (4 * SPLIT)
  var s$j = vec4<f32>();
  if (goes_on) {
    s$j = vec4<f32>(
      state[own + $(4 * $j)u * VALUE_DIM],
      state[own + $(4 * $j + 1)u * VALUE_DIM],
      state[own + $(4 * $j + 2)u * VALUE_DIM],
      state[own + $(4 * $j + 3)u * VALUE_DIM],
    );
  }
#endfor
  let rate = exp(a_log[head]);
  for (var row = 0u; row < step.n_rows; row++) {
    let q_at = (row * X_STRIDE + head / (HEADS / KEY_HEADS) * KEY_DIM + part * KEYS) / 4u;
    let k_at = q_at + KEY_HEADS * KEY_DIM / 4u;
    var of_column = vec2<f32>();
    var of_row = vec3<f32>();
#for j in 0..KEY_DIM / (4 * SPLIT)
    let q$j = x[q_at + $ju];
    let k$j = x[k_at + $ju];
    of_column += vec2<f32>(dot(k$j, s$j), dot(q$j, s$j));
    of_row += vec3<f32>(dot(k$j, k$j), dot(q$j, q$j), dot(q$j, k$j));
#endfor
    let half = row % 2u;
    column_sums[half * WG + tid] = of_column;
    if (tid % COLUMNS == 0u) {
      row_sums[half * SPLIT + part] = of_row;
    }
    workgroupBarrier();
    of_column = vec2<f32>();
    of_row = vec3<f32>();
    for (var i = 0u; i < SPLIT; i++) {
      of_column += column_sums[half * WG + i * COLUMNS + tid % COLUMNS];
      of_row += row_sums[half * SPLIT + i];
    }
    let k_scale = inverseSqrt(of_row.x + EPS);
    let q_scale = inverseSqrt((of_row.y + EPS) * f32(KEY_DIM));
    let gate = row * GATES_STRIDE + head;
    let beta = 1.0 / (1.0 + exp(-gates[gate]));
    let decay = exp(-rate * softplus(gates[gate + HEADS] + dt_bias[head]));
    let value_at = row * X_STRIDE + 2u * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column;
    let value = x[value_at / 4u][value_at % 4u];
    let delta = beta * (value - decay * k_scale * of_column.x);
    if (inside && part == 0u) {
      y[row * Y_STRIDE + head * VALUE_DIM + column] =
        q_scale * (decay * of_column.y + k_scale * of_row.z * delta);
    }
#for j in 0..KEY_DIM / (4 * SPLIT)
    s$j = decay * s$j + k_scale * delta * k$j;
#endfor
  }
  if (inside) {
#for j in 0..KEY_DIM / SPLIT
    state[own + $ju * VALUE_DIM] = s$($j / 4)[$($j % 4)];
#endfor
  }
}
