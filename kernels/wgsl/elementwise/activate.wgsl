// The activation functions of MLPs, and gated(gate, up) of gated ones.
// @param ACTIVATION none|silu|gelu|gelu_tanh|relu|relu2|clamped_swiglu
#if ACTIVATION == silu

// Sigmoid linear unit (Elfwing et al. 2018).
fn activate(x: f32) -> f32 {
  return x / (1.0 + exp(-x));
}
#elif ACTIVATION == gelu

// Gaussian error linear unit (Hendrycks & Gimpel 2016): x times the normal distribution up to x, the
// smaller tail of which is erfc(|x| / sqrt(2)) / 2 (Abramowitz & Stegun 7.1.26).
fn activate(x: f32) -> f32 {
  let z = min(0.70710678 * abs(x), 9.3);  // beyond that there is no tail
  let t = 1.0 / (1.0 + 0.3275911 * z);
  let series = t * (0.254829592 + t * (-0.284496736
    + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
  let tail = 0.5 * x * series * exp(-z * z);
  return select(tail, x - tail, x > 0.0);
}
#elif ACTIVATION == gelu_tanh

// GELU by its approximation x (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)), where u = sqrt(2 / pi) (x + 0.044715 x^3).
fn activate(x: f32) -> f32 {
  let c = clamp(x, -10.0, 10.0);  // beyond that nothing changes but the exponential, which overflows
  return x / (1.0 + exp(-1.59576912 * c * (1.0 + 0.044715 * c * c)));
}
#elif ACTIVATION == relu

fn activate(x: f32) -> f32 {
  return max(x, 0.0);
}
#elif ACTIVATION == relu2

// Squared rectifier (So et al. 2021).
fn activate(x: f32) -> f32 {
  let positive = max(x, 0.0);
  return positive * positive;
}
#endif
#if ACTIVATION == clamped_swiglu

// That of gpt-oss: a sigmoid steeper than silu's, both inputs limited, and one more than up.
fn gated(gate: f32, up: f32) -> f32 {
  let x = min(gate, 7.0);
  return x / (1.0 + exp(-1.702 * x)) * (clamp(up, -7.0, 7.0) + 1.0);
}
#elif ACTIVATION != none

// Gated linear unit (Shazeer 2020).
fn gated(gate: f32, up: f32) -> f32 {
  return activate(gate) * up;
}
#endif
