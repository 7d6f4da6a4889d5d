// The sums of workgroups that shared a row's columns (SPLITS of matmul.wgsl and matmul_int8.wgsl),
// added up, and what becomes of the sum: BIAS, SCALE, ACTIVATION and RESIDUAL are as there.
#include "activate.wgsl"
// @param N u32                   outputs of this shard of W
// @param START u32               the first of them
// @param Y_STRIDE u32
// @param SPLITS u32
// @param SPLIT_ROWS u32          rows that each split has in `sums`
// @param SUMS_STRIDE u32         of these
// @param SCALE f32
// @param BIAS bool
// @param RESIDUAL bool
@group(0) @binding(0) var<storage, read> sums: array<f32>;  // [split][row][SUMS_STRIDE]
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
#if BIAS
@group(0) @binding(2) var<storage, read> bias: array<f32>;
#endif
#if RESIDUAL
@group(0) @binding($(2 + BIAS)) var<storage, read> residual: array<f32>;
#endif

// grid (N / 64, rows)
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= N) {
    return;
  }
  let n = START + id.x;
  let out = id.y * Y_STRIDE + n;
  var value = 0.0;
#for s in 0..SPLITS
  value += sums[($su * SPLIT_ROWS + id.y) * SUMS_STRIDE + id.x];
#endfor
#if BIAS
  value += bias[n];
#endif
#if SCALE != 1
  value *= SCALE;
#endif
#if ACTIVATION != none
  value = activate(value);
#endif
#if RESIDUAL
  value += residual[out];
#endif
  y[out] = value;
}
