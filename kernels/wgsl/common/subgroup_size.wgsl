// How many lanes a subgroup has.
@group(0) @binding(0) var<storage, read_write> lanes: array<u32>;

@compute @workgroup_size(128)
fn main(
  @builtin(local_invocation_index) tid: u32,
  @builtin(subgroup_size) subgroup_size: u32,
) {
  if (tid == 0u) {
    lanes[0] = subgroup_size;
  }
}
