// Where the keys and values of a position lie: [kv head][slot][dimension], in f32 or f16.
// The page table maps a sequence's positions to slots; a page holds PAGE of them.
// @param KV f32|f16
// @param HEAD_DIM u32
// @param KV_SLOTS u32            slots of the cache in all
// @param PAGE u32
// @param PAGES_PER_SEQUENCE u32
fn kv_slot(sequence: u32, position: u32) -> u32 {
  return pages[sequence * PAGES_PER_SEQUENCE + position / PAGE] * PAGE + position % PAGE;
}

// The index of a head's first group of eight dimensions at a slot.
fn kv_index(kv_head: u32, slot: u32) -> u32 {
  return (kv_head * KV_SLOTS + slot) * (HEAD_DIM / 8u);
}
