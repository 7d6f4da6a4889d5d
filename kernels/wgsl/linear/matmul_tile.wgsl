// The tile of outputs that a workgroup of matmul.wgsl or matmul_int8.wgsl has: ROWS rows of x times COLUMNS
// rows of W, of which each invocation keeps M_TILE x N_TILE sums in registers.
// Needs `#let EPILOGUE`, the first binding that is free.
#include "matmul_outputs.wgsl"
// @param M_SIZE u32              invocations of a workgroup along the rows: a multiple of 4
// @param N_SIZE u32              and along W's rows: a multiple of 8
// @param M_TILE u32              rows per invocation
// @param N_TILE u32              rows of W per invocation, even with GATED
// @param DOUBLE bool             two buffers of workgroup memory: one barrier per tile, not two
const SIZE = M_SIZE * N_SIZE;
const ROWS = M_SIZE * M_TILE;
const COLUMNS = N_SIZE * N_TILE;
const OUTPUTS = COLUMNS / $(1 + GATED)u;
const BUFFERS = $(1 + DOUBLE)u;
