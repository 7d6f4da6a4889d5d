// The outputs that a tile of a matrix product has, and the rows of W that these take.
//
// GATED: W holds gate rows, then up rows. GROUPED: W holds experts one below the other, of N outputs
// each, and a tile has rows that are routed to the same one; so does BIAS (epilogue.wgsl).
// SPLITS workgroups share the columns of their rows: each writes its sums below those of the one
// before, and matmul_combine.wgsl does the rest.
// Needs `#let EPILOGUE`, the first binding that is free, and the const OUTPUTS, those of a tile.
#include "epilogue_inputs.wgsl"
#include "tile_rows.wgsl"
// @param START u32               the first output that this shard holds
// @param Y_STRIDE u32
// @param SPLITS u32
// @param SPLIT_ROWS u32          rows that each split has in y
// @param GATED bool
#if GROUPED
@group(0) @binding($(EPILOGUE + BIAS + RESIDUAL)) var<storage, read> tile_experts: array<u32>;
@group(0) @binding($(EPILOGUE + BIAS + RESIDUAL + 1)) var<storage, read> tile_pairs: array<u32>;
#endif

// The row of W that is row r of the tile: with GATED, gate rows and then the same up rows.
fn weight_row(first_output: u32, r: u32) -> u32 {
#if GATED
  return min(first_output + r % OUTPUTS, N - 1u) + min(r / OUTPUTS, 1u) * N;
#else
  return min(first_output + r, N - 1u);
#endif
}
