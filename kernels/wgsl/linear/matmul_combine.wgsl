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

#let OWN = 4  // outputs of an invocation: of fewer there would be too many workgroups

// grid (N / 256, rows)
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
#for o in 0..OWN
  let output$o = id.x * $(64 * OWN)u + $ou * 64u + tid;
  var sum$o = 0.0;
#for s in 0..SPLITS
  sum$o += sums[($su * SPLIT_ROWS + id.y) * SUMS_STRIDE + min(output$o, N - 1u)];
#endfor
#endfor
#for o in 0..OWN
  if (output$o < N) {
    let n = START + output$o;
    let out = id.y * Y_STRIDE + n;
    y[out] = epilogue(sum$o, sum$o, n, out);
  }
#endfor
}
