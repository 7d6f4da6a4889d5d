// x_int8 = round(127 x / max|x|) for x [rows][K], in halves of blocks of 32 columns (quantize_block.wgsl), each
// of which four invocations have.
// NORM: what is quantised is x * norm_weight; the squares are those of x.
#include "quantize_block.wgsl"
// @param K u32
// @param X_STRIDE u32
// @param X_SCALES halves|blocks|rows
// @param SCALE_ROWS u32
// @param NORM bool
// @param ORDER bool              column i is column order[i] of x
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> x_int8: array<u32>;
@group(0) @binding(2) var<storage, read_write> x_int8_scales: array<Int8Scale>;
#if NORM
@group(0) @binding(3) var<storage, read> norm_weight: array<f32>;
#endif
#if ORDER
@group(0) @binding($(3 + NORM)) var<storage, read> order: array<u32>;
#endif

const BLOCKS = (K + 31u) / 32u;

var<workgroup> most: array<u32, 64>;
var<workgroup> squares: array<f32, 64>;

// grid (blocks / 8, rows)
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let half = id.x * 16u + tid / 4u;
  let column = id.x * 256u + tid * 4u;
  var value = vec4<f32>();
#if NORM
  var norm = vec4<f32>();
#endif
#for i in 0..4
  if (column + $iu < K) {
#if ORDER
    let from$i = order[column + $iu];
#else
    let from$i = column + $iu;
#endif
    value[$i] = x[id.y * X_STRIDE + from$i];
#if NORM
    norm[$i] = norm_weight[from$i];
#endif
  }
#endfor
  squares[tid] = dot(value, value);
#if NORM
  value *= norm;
#endif
  most[tid] = magnitude(value);
  workgroupBarrier();
  var half_most = 0u;
  for (var i = 0u; i < $(SHARERS)u; i++) {
    half_most = max(half_most, most[tid / $(SHARERS)u * $(SHARERS)u + i]);
  }
  var half_squares = 0.0;
  for (var i = 0u; i < 4u; i++) {
    half_squares += squares[tid / 4u * 4u + i];
  }
  if (half < 2u * BLOCKS) {
    store_int8(id.y, BLOCKS, half, tid % 4u, value, half_most, half_squares);
  }
}
