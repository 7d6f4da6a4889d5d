// Turns a sum of products of a projection into output n of W:
//
//   y = activated(sum + bias[n], up + bias[n + N]) + residual
//   activated(sum, up) = activate(SCALE sum), or gated(sum, up) where GATED, a parameter or #let
//
// BIAS and RESIDUAL: there are such; without an ACTIVATION activate(x) = x.
#include "epilogue_inputs.wgsl"

fn activated(sum: f32, up: f32) -> f32 {
#if GATED
  return gated(sum, up);
#else
  var value = sum;
#if SCALE != 1
  value *= SCALE;
#endif
#if ACTIVATION != none
  value = activate(value);
#endif
  return value;
#endif
}

// out: where y and the residual lie.
fn epilogue(sum: f32, up: f32, n: u32, out: u32) -> f32 {
#if BIAS and GATED
  var value = activated(sum + bias[n], up + bias[n + N]);
#elif BIAS
  var value = activated(sum + bias[n], up);
#else
  var value = activated(sum, up);
#endif
#if RESIDUAL
  value += residual[out];
#endif
  return value;
}
