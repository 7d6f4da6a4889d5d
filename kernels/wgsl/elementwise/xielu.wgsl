// y = softplus(alpha_p) x^2 + beta x                                        where x > 0
// y = (beta + softplus(alpha_n)) (exp(min(x, eps)) - 1 - x) + beta x        elsewhere
//
// xIELU (Huang & Schlag 2024), [rows][WIDTH]: a parabola above zero and an integrated exponential below,
// whose bends alpha_p and alpha_n a layer has learned.
#include "softplus.wgsl"
// @param WIDTH u32
// @param X_STRIDE u32
// @param X_OFFSET u32
// @param Y_STRIDE u32
@group(0) @binding(0) var<storage, read> shape: array<f32>;  // alpha_p, alpha_n, beta, eps
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

// grid (WIDTH / 64, rows)
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= WIDTH) {
    return;
  }
  let v = x[id.y * X_STRIDE + X_OFFSET + id.x];
  let beta = shape[2];
  var bend = softplus(shape[0]) * v * v;
  if (v <= 0.0) {
    bend = (beta + softplus(shape[1])) * (exp(min(v, shape[3])) - 1.0 - v);
  }
  y[id.y * Y_STRIDE + id.x] = bend + beta * v;
}
