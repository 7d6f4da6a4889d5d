// How the context of a row is split over workgroups: evenly, in at least MIN_SPLIT and at most
// MAX_SPLIT positions each. AttentionSplit in kernels/ops.py says the same on the host.
// @param SPLITS u32              splits to aim at
// @param MIN_SPLIT u32
// @param MAX_SPLIT u32
// @param STORED_SPLITS u32       splits that the buffers between the two kernels have room for
fn split_length(positions: u32) -> u32 {
  return clamp((positions + SPLITS - 1u) / SPLITS, MIN_SPLIT, MAX_SPLIT);
}
