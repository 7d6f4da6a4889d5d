// y = softplus(alpha_p) x^2 + beta x                                        where x > 0
// y = (beta + softplus(alpha_n)) (exp(min(x, eps)) - 1 - x) + beta x        elsewhere
//
// xIELU (Huang & Schlag 2024): a parabola above zero and an integrated exponential below, whose bends alpha_p
// and alpha_n a layer has learned.
#include "softplus.wgsl"
#let X = 1
#include "each.wgsl"
@group(0) @binding(0) var<storage, read> shape: array<f32>;  // alpha_p, alpha_n, beta, eps

fn result(x: f32, row: u32) -> f32 {
  let beta = shape[2];
  var bend = softplus(shape[0]) * x * x;
  if (x <= 0.0) {
    bend = (beta + softplus(shape[1])) * (exp(min(x, shape[3])) - 1.0 - x);
  }
  return bend + beta * x;
}
