// copied = source, a vector of 16 bytes per invocation: what measures a memory's bandwidth.
#include "grid.wgsl"
// @param VECTORS u32   a multiple of 256, what a workgroup copies
@group(0) @binding(0) var<storage, read> source: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> copied: array<vec4<u32>>;

const_assert VECTORS % 256u == 0u;

// grid: linear_grid(VECTORS / 256)
@compute @workgroup_size(256)
fn main(
  @builtin(workgroup_id) id: vec3<u32>,
  @builtin(num_workgroups) size: vec3<u32>,
  @builtin(local_invocation_index) tid: u32,
) {
  let i = 256u * workgroup_index(id, size) + tid;
  if (i < VECTORS) {
    copied[i] = source[i];
  }
}
