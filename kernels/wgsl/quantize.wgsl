// Activations as int8 in blocks of 32 columns (quantize_block.wgsl): eight invocations share a block.
// NORM: what is quantised is x * norm_weight; the squares are those of x.
#include "quantize_block.wgsl"
// @param K u32
// @param X_STRIDE u32
// @param NORM bool
// @param ORDER bool              column i is column order[i] of x
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> x_int8: array<u32>;
@group(0) @binding(2) var<storage, read_write> x_int8_scales: array<f32>;
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
  let block = id.x * 8u + tid / 8u;
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
  var block_most = 0u;
  var block_squares = 0.0;
  for (var i = 0u; i < 8u; i++) {
    block_most = max(block_most, most[tid / 8u * 8u + i]);
    block_squares += squares[tid / 8u * 8u + i];
  }
  if (block < BLOCKS) {
    store_int8(id.y, BLOCKS, block, tid % 8u, value, block_most);
    if (tid % 8u == 0u) {
      store_scale(id.y, BLOCKS, block, block_most, block_squares);
    }
  }
}
