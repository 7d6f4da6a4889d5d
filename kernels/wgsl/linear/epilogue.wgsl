// What becomes of a sum of products of a projection, for output n of W:
//
//   y = activated(sum + bias[n], up + bias[n + N]) + residual
//   activated(sum, up) = activate(SCALE sum), or gated(sum, up) where GATED, a parameter or #let
//
// Needs `#let EPILOGUE`, the first binding that is free. BIAS and RESIDUAL: there are such; without an
// ACTIVATION activate(x) = x.
#include "activate.wgsl"
// @param N u32                   outputs: rows of this shard of W, or half of them with GATED
// @param SCALE f32
// @param BIAS bool
// @param RESIDUAL bool
#if BIAS
@group(0) @binding($(EPILOGUE)) var<storage, read> bias: array<f32>;
#endif
#if RESIDUAL
@group(0) @binding($(EPILOGUE + BIAS)) var<storage, read> residual: array<f32>;
#endif

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
