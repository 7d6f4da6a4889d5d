// histograms[row][digit of key(z)] += (1, mass of z) over the row's tokens that belong to this level.
// @param LEVEL u32      which, see sample_histograms.wgsl
#include "sample_cut.wgsl"

#if LEVEL == 0
// The counts of this tile: the first digits of scores are few, so that all tiles would meet in memory. The
// counts of places p and p + BINS / 2 share a word: a tile has 1024 tokens.
var<workgroup> tile_counts: array<atomic<u32>, BINS / 2u>;
var<workgroup> tile_masses: array<atomic<u32>, BINS>;
#endif

// Whether a token belongs to this level. Tokens that top-k removes would come last, but overflow the masses. Tokens
// that cannot be chosen belong to none: they may be nearly all of a vocabulary, in one bin.
fn belongs(key: u32, cut: Cut, top_k: bool) -> bool {
  if (key >= NO_KEY) { return false; }
#if LEVEL == 0
  return true;
#elif LEVEL == 1
  return key >> 21u == cut.k_key >> 21u;
#elif LEVEL == 2
  return key >> 10u == cut.k_key >> 10u;
#elif LEVEL == 3
  return key >> 21u == cut.p_key >> 21u && (!top_k || key < cut.k_key);
#else
  return key >> 10u == cut.p_key >> 10u && (!top_k || key < cut.k_key);
#endif
}

fn digit(key: u32) -> u32 {
#if LEVEL == 0
  return key >> 21u;
#elif LEVEL == 1 or LEVEL == 3
  return (key >> 10u) & 2047u;
#else
  return key & 1023u;
#endif
}

@compute @workgroup_size(WG_SIZE)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  prefetch(li, id.y);
  let first = id.x * TILE + 4u * li;
  let score4 = load_scores(id.y, first);
  if (id.y >= n_sampled_rows()) { return; }
  let source = step_row(id.y);
  if (step.rows[source].alive == 0u) { return; }
  let sequence = sequence_of(source);

#if LEVEL == 0
  // WGSL promises zeros, but wgpu-native leaves workgroup memory as it was.
#for i in 0..4
  atomicStore(&tile_counts[li + $iu * WG_SIZE], 0u);
#endfor
#for i in 0..8
  atomicStore(&tile_masses[li + $iu * WG_SIZE], 0u);
#endfor
#endif
  let cut = next_cut(li, sequence);
  if (id.x == 0u && li == 0u) { cuts[id.y * SLOTS + SLOT] = cut; }
  let top_k = wants_top_k(sequence);
#if LEVEL == 0
  if (!top_k && !wants_top_p(sequence)) { return; }
#elif LEVEL < 3
  if (!top_k) { return; }
#else
  if (!wants_top_p(sequence)) { return; }
#endif

  let base = id.y * ROW_BINS + LEVEL * LEVEL_BINS;
#if LEVEL == 0
  workgroupBarrier();
  if (first < STRIDE) {
#for c in 0..4
    {
      let key = key_of(score4[$c]);
      if (belongs(key, cut, top_k)) {
        let place = bin_place(digit(key));
        atomicAdd(&tile_counts[place % (BINS / 2u)], select(1u, 0x10000u, place >= BINS / 2u));
        atomicAdd(&tile_masses[place], mass_of(score4[$c], cut));
      }
    }
#endfor
  }
  workgroupBarrier();
#for i in 0..4
  let counts_$i = atomicLoad(&tile_counts[li + $iu * WG_SIZE]);
  let mass_$i = atomicLoad(&tile_masses[li + $iu * WG_SIZE]);
  let upper_$i = atomicLoad(&tile_masses[li + $iu * WG_SIZE + BINS / 2u]);
#endfor
#for i in 0..4
  add(base + li + $iu * WG_SIZE, counts_$i & 0xffffu, mass_$i);
  add(base + li + $iu * WG_SIZE + BINS / 2u, counts_$i >> 16u, upper_$i);
#endfor
#else
  // Few tokens share the digits so far.
  if (first < STRIDE) {
#for c in 0..4
    {
      let key = key_of(score4[$c]);
      if (belongs(key, cut, top_k)) {
        add(base + bin_place(digit(key)), 1u, mass_of(score4[$c], cut));
      }
    }
#endfor
  }
#endif
}

fn add(place: u32, count: u32, mass: u32) {
  if (count > 0u) {
    atomicAdd(&histograms[place], count);
    atomicAdd(&histograms[place + BINS], mass);
  }
}
