// The tile of outputs that a workgroup of matmul.wgsl or matmul_int8.wgsl has: ROWS rows of x times COLUMNS
// rows of W, of which each invocation keeps M_TILE x N_TILE sums in registers.
//
// GATED: W holds gate rows, then up rows. GROUPED: W holds experts one below the other, of N outputs
// each, and a tile has rows that are routed to the same one; so does BIAS (epilogue.wgsl).
// SPLITS workgroups share the columns of their rows: each writes its sums below those of the one
// before, and matmul_combine.wgsl does the rest.
// Needs `#let EPILOGUE`, the first binding that is free.
#include "epilogue_inputs.wgsl"
#include "tile_rows.wgsl"
// @param START u32               the first output that this shard holds
// @param Y_STRIDE u32
// @param M_SIZE u32              invocations of a workgroup along the rows: a multiple of 4
// @param N_SIZE u32              and along W's rows: a multiple of 8
// @param M_TILE u32              rows per invocation
// @param N_TILE u32              rows of W per invocation, even with GATED
// @param DOUBLE bool             two buffers of workgroup memory: one barrier per tile, not two
// @param SPLITS u32
// @param SPLIT_ROWS u32          rows that each split has in y
// @param GATED bool
#if GROUPED
@group(0) @binding($(EPILOGUE + BIAS + RESIDUAL)) var<storage, read> tile_experts: array<u32>;
@group(0) @binding($(EPILOGUE + BIAS + RESIDUAL + 1)) var<storage, read> tile_pairs: array<u32>;
#endif

const SIZE = M_SIZE * N_SIZE;
const ROWS = M_SIZE * M_TILE;
const COLUMNS = N_SIZE * N_TILE;
const OUTPUTS = COLUMNS / $(1 + GATED)u;
const BUFFERS = $(1 + DOUBLE)u;

// The row of W that is row r of the tile: with GATED, gate rows and then the same up rows.
fn weight_row(first_output: u32, r: u32) -> u32 {
#if GATED
  return min(first_output + r % OUTPUTS, N - 1u) + min(r / OUTPUTS, 1u) * N;
#else
  return min(first_output + r, N - 1u);
#endif
}
