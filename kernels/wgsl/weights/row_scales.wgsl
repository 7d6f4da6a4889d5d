// For each row of a weight a power of two: divided by it, the row's largest value is from 2^14 to 2^15, close to the
// largest f16. flags[params.index] becomes 1 if f16 does not hold a row as it is, because its largest value is above
// 65,504, or below 2^-14, where f16 has fewer bits.
#include "grid.wgsl"
#include "half_scale.wgsl"
#include "weight_group.wgsl"
struct Place {
  rows: u32,   // of this shard
  index: u32,
}

@group(0) @binding(0) var<storage, read> weight: array<vec4<u32>>;
#if SCALES_BOUND
@group(0) @binding(1) var<storage, read> scales: array<u32>;
#endif
@group(0) @binding($(1 + SCALES_BOUND)) var<storage, read> params: Place;
@group(0) @binding($(2 + SCALES_BOUND)) var<storage, read_write> row_scales: array<f32>;
@group(0) @binding($(3 + SCALES_BOUND)) var<storage, read_write> flags: array<atomic<u32>>;

var<workgroup> most: atomic<u32>;

// grid: a workgroup for each row
@compute @workgroup_size(64)
fn main(
  @builtin(workgroup_id) id: vec3<u32>,
  @builtin(num_workgroups) grid: vec3<u32>,
  @builtin(local_invocation_index) tid: u32,
) {
  fill_tables(tid, 64u);
  if (tid == 0u) {
    atomicStore(&most, 0u);
  }
  workgroupBarrier();
  let row = min(workgroup_index(id, grid), params.rows - 1u);
  var largest = vec4<f32>();
  for (var group = tid; group < (K + 7u) / 8u; group += 64u) {
    let values = load_group(row, group);
    largest = max(largest, max(abs(values[0]), abs(values[1])));
  }
  let two = max(largest.xy, largest.zw);
  atomicMax(&most, bitcast<u32>(max(two.x, two.y)));
  workgroupBarrier();
  if (tid == 0u) {
    let value = bitcast<f32>(atomicLoad(&most));
    row_scales[row] = half_scale(value).inverse;
    if (value > 65504.0 || (value > 0.0 && value < 0x1p-14)) {
      atomicStore(&flags[params.index], 1u);
    }
  }
}
