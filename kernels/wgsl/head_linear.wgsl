// y = W_h x_h for each head h, where x_h is the last K of its X_HEAD values. KEPT of those before them go
// in front of the result as they are or, with ROPE, turned. For a few rows; matmul.wgsl does many.
//
// A workgroup has OUTPUTS outputs of a head, for ROWS rows, so that weights are read once for all of
// these; TEAM invocations share an output.
#include "step.wgsl"
#include "weight_group.wgsl"
#if ROPE
#include "turn.wgsl"
#endif
// @param ROPE bool
// @param N u32                   outputs of a head
// @param KEPT u32                all values before the last K, or 0
// @param X_HEAD u32
// @param X_STRIDE u32
// @param X_OFFSET u32
// @param Y_STRIDE u32
// @param FIRST_HEAD u32          of the shard
// @param ROWS u32
// @param TEAM u32
// @param OUTPUTS u32
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> weight: array<vec4<u32>>;
#if SCALES_BOUND
@group(0) @binding(2) var<storage, read> scales: array<u32>;
#endif
@group(0) @binding($(2 + SCALES_BOUND)) var<storage, read> x: array<f32>;
@group(0) @binding($(3 + SCALES_BOUND)) var<storage, read_write> y: array<f32>;
#if ROPE
@group(0) @binding($(4 + SCALES_BOUND)) var<storage, read> table: array<vec2<f32>>;
#endif

const WG = TEAM * OUTPUTS;
const EIGHTS = (K + 7u) / 8u;  // groups of eight columns

var<workgroup> inputs: array<vec4<f32>, ROWS * EIGHTS * 2u>;
var<workgroup> partial: array<f32, ROWS * WG>;

// grid (N / OUTPUTS, rows / ROWS, heads of the shard)
@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  fill_tables(tid, WG);
  let first_row = id.y * ROWS;
  let head = FIRST_HEAD + id.z;
  let x_head = X_OFFSET + head * X_HEAD;
  let y_head = head * (KEPT + N);
  for (var i = tid; i < ROWS * EIGHTS * 8u; i += WG) {
    let row = min(first_row + i / (EIGHTS * 8u), step.n_rows - 1u);
    let k = i % (EIGHTS * 8u);
    let at = row * X_STRIDE + x_head + X_HEAD - K + min(k, K - 1u);
    inputs[i / 4u][i % 4u] = select(0.0, x[at], k < K);
  }
#if KEPT > 0
  for (var i = tid; id.x == 0u && i < ROWS * KEPT; i += WG) {
    let row = first_row + i / KEPT;
    let d = i % KEPT;
    if (row < step.n_rows) {
      let first = row * X_STRIDE + x_head;
#if ROPE
      let value = turned(d, x[first + d], x[first + partner(d)], step.rows[row].position);
#else
      let value = x[first + d];
#endif
      y[row * Y_STRIDE + y_head + d] = value;
    }
  }
#endif
  workgroupBarrier();
  let w_row = id.z * N + min(id.x * OUTPUTS + tid / TEAM, N - 1u);
#for r in 0..ROWS
  var sum$r = 0.0;
#endfor
  for (var i = tid % TEAM; i < EIGHTS; i += TEAM) {
    let w = load_group(w_row, i);
#for r in 0..ROWS
    sum$r += dot(w[0], inputs[2u * ($ru * EIGHTS + i)]);
    sum$r += dot(w[1], inputs[2u * ($ru * EIGHTS + i) + 1u]);
#endfor
  }
#for r in 0..ROWS
  partial[$ru * WG + tid] = sum$r;
#endfor
  workgroupBarrier();
  for (var i = tid; i < ROWS * OUTPUTS; i += WG) {
    let row = first_row + i / OUTPUTS;
    let n = id.x * OUTPUTS + i % OUTPUTS;
    var sum = 0.0;
    for (var j = 0u; j < TEAM; j++) {
      sum += partial[i * TEAM + j];
    }
    if (row < step.n_rows && n < N) {
      y[row * Y_STRIDE + y_head + KEPT + n] = sum;
    }
  }
}
