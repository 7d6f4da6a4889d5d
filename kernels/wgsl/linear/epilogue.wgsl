// What becomes of a sum of products of a projection, for output n of W:
//
//   y = activate(SCALE (sum + bias[n])) + residual
//   y = gated(sum + bias[n], up + bias[n + N]) + residual   where GATED, a parameter or #let
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

// out: where y and the residual lie.
fn epilogue(sum: f32, up: f32, n: u32, out: u32) -> f32 {
#if GATED
#if BIAS
  var value = gated(sum + bias[n], up + bias[n + N]);
#else
  var value = gated(sum, up);
#endif
#else
  var value = sum;
#if BIAS
  value += bias[n];
#endif
#if SCALE != 1
  value *= SCALE;
#endif
#if ACTIVATION != none
  value = activate(value);
#endif
#endif
#if RESIDUAL
  value += residual[out];
#endif
  return value;
}
