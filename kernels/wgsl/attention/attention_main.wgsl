// How attention.wgsl and attention_decode.wgsl begin: what an invocation has of a head, and where x lies.
// grid (splits, KV heads * GROUP / HEADS, rows)
@compute @workgroup_size(WG)
fn main(
  @builtin(workgroup_id) id: vec3<u32>,
  @builtin(num_workgroups) size: vec3<u32>,
  @builtin(local_invocation_index) tid: u32,
  @builtin(subgroup_id) subgroup: u32,
  @builtin(subgroup_size) subgroup_size: u32,
  @builtin(subgroup_invocation_id) lane: u32,
) {
  let kv_head = id.y * HEADS / GROUP;
  let first_head = id.y * HEADS;
  let cluster = subgroup * (subgroup_size / CLUSTER) + lane / CLUSTER;
  let part = lane % CLUSTER;
  // The first of the lane's scores, as a number of all.
  let mine = part / COPIES * KEPT;

  // First what does not wait for the row's position.
  let heads = (id.z * X_STRIDE + X_OFFSET) / 4u;
