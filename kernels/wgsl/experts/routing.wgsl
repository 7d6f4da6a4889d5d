// Reads the experts that route.wgsl chose. An id that is no expert's (of a row without meaning) becomes the last.
// @param EXPERTS u32             to choose from
// @param SLOTS u32               experts that are chosen per row
// @param SHARED u32              experts behind the others, which all rows have in their last slots
// @param ROUTING_STRIDE u32
// Needs the binding `routing: array<f32>`, [row][ALL_SLOTS ids, ALL_SLOTS weights].
const ALL_EXPERTS = EXPERTS + SHARED;
const ALL_SLOTS = SLOTS + SHARED;

fn expert_of(row: u32, slot: u32) -> u32 {
  return min(u32(routing[row * ROUTING_STRIDE + slot]), ALL_EXPERTS - 1u);
}

fn weight_of(row: u32, slot: u32) -> f32 {
  return routing[row * ROUTING_STRIDE + ALL_SLOTS + slot];
}
