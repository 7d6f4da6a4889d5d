// What route.wgsl chose. An expert that is none (of a row without meaning) becomes the last one.
// @param EXPERTS u32
// @param SLOTS u32               experts per row
// @param ROUTING_STRIDE u32
// Needs the binding `routing: array<f32>`.

fn expert_of(row: u32, slot: u32) -> u32 {
  return min(u32(routing[row * ROUTING_STRIDE + slot]), EXPERTS - 1u);
}

fn weight_of(row: u32, slot: u32) -> f32 {
  return routing[row * ROUTING_STRIDE + SLOTS + slot];
}
