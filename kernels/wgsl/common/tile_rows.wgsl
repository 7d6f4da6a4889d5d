// The rows that a tile of a matrix product has: those of the step; or, GROUPED by experts, the pairs of
// row and slot that expert_sort.wgsl gave to it. A pair is a row of y; X_SLOTS pairs share one of x.
// @param GROUPED bool
// @param X_SLOTS u32
// @param FIRST_EXPERT u32        with GROUPED: the experts that this shard of W holds
// @param SHARD_EXPERTS u32
#if GROUPED
// Needs the bindings `tile_experts: array<u32>` and `tile_pairs: array<u32>`.
const NONE = 0xffffffffu;

fn x_row(i: u32) -> u32 {
  let pair = tile_pairs[i];
  return select(pair / X_SLOTS, 0u, pair == NONE);
}

fn y_row(i: u32) -> u32 {
  return tile_pairs[i];
}

fn is_written(row: u32) -> bool {
  return row != NONE;
}

fn in_shard(expert: u32) -> bool {  // NONE is not
  return expert - FIRST_EXPERT < SHARD_EXPERTS;
}
#else
fn x_row(i: u32) -> u32 {
  return i;
}

fn y_row(i: u32) -> u32 {
  return i;
}

fn is_written(row: u32) -> bool {
  return true;
}
#endif
