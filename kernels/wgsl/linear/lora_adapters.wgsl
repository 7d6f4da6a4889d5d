// Rows of a stack of matrices, one for each adapter, [adapters * N][K], of which a shard holds
// [START, START + SHARD_ROWS): those of the adapter of a row of the step.
// @param N u32            outputs: rows of an adapter's matrix
// @param START u32
// @param SHARD_ROWS u32
// @param ROWS u32         rows of x that a workgroup takes
// @param CHOSEN bool      rows of x are those that get logits
// Needs `step`.
#include "step.wgsl"

fn adapter_of(row: u32) -> u32 {
#if CHOSEN
  return step.rows[step.logits_rows[min(row, step.n_logits - 1u)]].adapter;
#else
  return step.rows[min(row, step.n_rows - 1u)].adapter;
#endif
}

// Where output n of an adapter lies in the shard; beyond its end if it does not.
fn stack_row(adapter: u32, n: u32) -> u32 {
  return (adapter - 1u) * N + n - START;
}

// Loads chunk i of output n of an adapter; of any output, where this one is not in the shard.
fn load_stacked(adapter: u32, n: u32, i: u32) -> Chunk {
  return load_chunk(min(stack_row(adapter, n), SHARD_ROWS - 1u), i);
}

// Whether this shard's kernel writes output n of a row; the first also writes those without an adapter.
fn is_own(adapter: u32, n: u32) -> bool {
  return stack_row(adapter, n) < SHARD_ROWS || (START == 0u && adapter == 0u);
}
