// copied = source, in vectors of 16 bytes: what measures an adapter's memory bandwidth.
//
// @param VECTORS u32   a multiple of 1024, what a workgroup copies

#include "grid.wgsl"

@group(0) @binding(0) var<storage, read> source: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> copied: array<vec4<u32>>;

const_assert VECTORS % 1024u == 0u;

// linear grid of VECTORS / 1024
@compute @workgroup_size(256)
fn main(
  @builtin(workgroup_id) id: vec3<u32>,
  @builtin(num_workgroups) size: vec3<u32>,
  @builtin(local_invocation_index) lane: u32,
) {
  let first = 1024u * workgroup_index(id, size) + lane;
  if (first < VECTORS) {
#for i in 0..4
    let v$i = source[first + $($i * 256)u];
#endfor
#for i in 0..4
    copied[first + $($i * 256)u] = v$i;
#endfor
  }
}
