// kept[sequence of a row][its position % RECENT] = x[row], [STRIDE], of the last RECENT rows of each sequence.
#include "step.wgsl"
// @param STRIDE u32
// @param RECENT u32     positions that are kept of a sequence
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> kept: array<f32>;  // [sequence][RECENT][STRIDE]

// grid (STRIDE / 64, rows)
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= STRIDE || id.y >= step.n_rows) {
    return;
  }
  let row = step.rows[id.y];
  let later = id.y + RECENT;  // the row of the same sequence that would take its place
  if (row.alive == 0u || (later < step.n_rows && step.rows[later].sequence == row.sequence)) {
    return;
  }
  let at = (row.sequence * RECENT + row.position % RECENT) * STRIDE + id.x;
  if (at < arrayLength(&kept)) {
    kept[at] = x[id.y * STRIDE + id.x];
  }
}
