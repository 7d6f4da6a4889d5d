// y[row] = the hidden state of the position before the row's, [STRIDE]: the row before it in x, where ROWS and if
// that one is of the same sequence, else what was kept of it; zeros at position 0.
#include "step.wgsl"
// @param STRIDE u32
// @param RECENT u32     positions that are kept of a sequence
// @param ROWS bool
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> kept: array<f32>;  // [sequence][RECENT][STRIDE]
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
#if ROWS
@group(0) @binding(3) var<storage, read> x: array<f32>;
#endif

// grid (STRIDE / 64, rows)
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= STRIDE || id.y >= step.n_rows) {
    return;
  }
  let row = step.rows[id.y];
  var value = 0.0;
  if (row.position > 0u) {
    let at = (row.sequence * RECENT + (row.position - 1u) % RECENT) * STRIDE + id.x;
    value = kept[min(at, arrayLength(&kept) - 1u)];
#if ROWS
    if (id.y > 0u) {
      let before = step.rows[id.y - 1u];
      if (before.sequence == row.sequence && before.position + 1u == row.position) {
        value = x[(id.y - 1u) * STRIDE + id.x];
      }
    }
#endif
  }
  y[id.y * STRIDE + id.x] = value;
}
