// y = x / sqrt(mean(x^2) + EPS) * weight over each part of WIDTH values of a row.
// One part: the norm of a layer. Several: the norm of each head. With GATED, y * silu(gate).
#include "reduce.wgsl"
// @param WIDTH u32
// @param EPS f32
// @param X_STRIDE u32
// @param X_OFFSET u32
// @param Y_STRIDE u32
// @param GATED bool
// @param GATE_STRIDE u32
// @param GATE_OFFSET u32
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> weight: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
#if GATED
@group(0) @binding(3) var<storage, read> gate: array<f32>;
#endif

// grid (parts, rows)
@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) id: vec3<u32>, me: Invocation) {
  let x_row = id.y * X_STRIDE + X_OFFSET + id.x * WIDTH;
  let y_row = id.y * Y_STRIDE + id.x * WIDTH;
  var squares = 0.0;
  for (var i = me.index; i < WIDTH; i += WG) {
    squares += x[x_row + i] * x[x_row + i];
  }
  let scale = inverseSqrt(workgroup_add(squares, me) / f32(WIDTH) + EPS);
  for (var i = me.index; i < WIDTH; i += WG) {
    var value = x[x_row + i] * scale * weight[i];
#if GATED
    let z = gate[id.y * GATE_STRIDE + GATE_OFFSET + id.x * WIDTH + i];
    value *= z / (1.0 + exp(-z));
#endif
    y[y_row + i] = value;
  }
}
