// How the context of a row is split over workgroups: evenly, in at least MIN_SPLIT and at most
// MAX_SPLIT positions each. AttentionVariant in kernels/ops/attention.py counts them for the host.
// Between the two kernels lie, for each row and head, as vec4<f32>: (max, sum) of two splits each,
// then the outputs of all splits. The maximum is of scores times log2(e).
// @param HEAD_DIM u32
// @param SPLITS u32              splits to aim at
// @param MIN_SPLIT u32
// @param MAX_SPLIT u32
// @param STORED_SPLITS u32       splits that there is room for: an even number
fn split_length(positions: u32) -> u32 {
  return clamp((positions + SPLITS - 1u) / SPLITS, MIN_SPLIT, MAX_SPLIT);
}

// Where a head's (max, sum) begin.
fn stored_head(row: u32, n_heads: u32, head: u32) -> u32 {
  return (row * n_heads + head) * (STORED_SPLITS / 2u + STORED_SPLITS * (HEAD_DIM / 4u));
}

// Where the outputs of a split begin.
fn stored_output(head: u32, split: u32) -> u32 {
  return head + STORED_SPLITS / 2u + split * (HEAD_DIM / 4u);
}
