// Where the keys and values of a position lie: [slot][kv head][dimension], in f32, f16 or as int8: a
// short context takes few pages of memory, whose addresses the GPU finds faster. After all int8, a
// scale for each block of 32 dimensions (of 16 or 8 where a head is no multiple): q8. How many slots there
// are follows from the buffer's size, as a cache may grow.
// The page table maps a sequence's positions to slots; a page holds PAGE of them. Not PAGED: all pages
// lie in their order, and nothing has to wait for the table to come from memory.
// @param KV f32|f16|q8
// @param HEAD_DIM u32
// @param KV_HEADS u32
// @param PAGE u32
// @param PAGES_PER_SEQUENCE u32
// @param PAGED bool
fn kv_slot(sequence: u32, position: u32) -> u32 {
#if not PAGED
  return sequence * (PAGES_PER_SEQUENCE * PAGE) + position;
#else
  return pages[sequence * PAGES_PER_SEQUENCE + position / PAGE] * PAGE + position % PAGE;
#endif
}

// The index of a head's first group of eight dimensions at a slot.
fn kv_index(kv_head: u32, slot: u32) -> u32 {
  return (slot * KV_HEADS + kv_head) * (HEAD_DIM / 8u);
}
#if KV == q8

#if HEAD_DIM % 32 == 0
const KV_BLOCK = 32u;
#elif HEAD_DIM % 16 == 0
const KV_BLOCK = 16u;
#else
const KV_BLOCK = 8u;
#endif

const SLOT_WORDS = KV_HEADS * (HEAD_DIM / 4u + HEAD_DIM / KV_BLOCK);

// Where the scale of a group of eight dimensions lies in a buffer of so many words, in words.
fn kv_scale_index(group: u32, words: u32) -> u32 {
  return words / SLOT_WORDS * KV_HEADS * (HEAD_DIM / 4u) + group / (KV_BLOCK / 8u);
}
#endif
