// The bindings of the epilogue of a projection (epilogue.wgsl).
// Needs `#let EPILOGUE`, the first binding that is free.
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
