// The index of a workgroup in a grid that plan.linear_grid laid out.
fn workgroup_index(id: vec3<u32>, size: vec3<u32>) -> u32 {
  return id.x + id.y * size.x;
}
