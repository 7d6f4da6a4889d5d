// y = epilogue(sum of what workgroups that shared a row's columns have each summed up): see SPLITS of
// matmul_tile.wgsl.
#let GATED = 0
#let EPILOGUE = 2
#include "epilogue.wgsl"
// @param START u32               the first output that this shard of W holds
// @param Y_STRIDE u32
// @param SPLITS u32
// @param SPLIT_ROWS u32          rows that each split has in `sums`
// @param SUMS_STRIDE u32         of these
@group(0) @binding(0) var<storage, read> sums: array<f32>;  // [split][row][SUMS_STRIDE]
@group(0) @binding(1) var<storage, read_write> y: array<f32>;

// grid (N / 64, rows)
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= N) {
    return;
  }
  let n = START + id.x;
  let out = id.y * Y_STRIDE + n;
  var sum = 0.0;
#for s in 0..SPLITS
  sum += sums[($su * SPLIT_ROWS + id.y) * SUMS_STRIDE + id.x];
#endfor
  y[out] = epilogue(sum, sum, n, out);
}
