// The histograms of filtered sampling: where they lie.
// A score's key falls as the score rises. Its digits have 11, 11 and 10 bits. A row has five levels:
// 0-2 the digits of keys for top-k (0 for top-p too), 3-4 the second and third for top-p. Each is a
// count and a mass for 2048 bins. Bin b lies at bin_place(b): neighbours read what lies side by side.
const BINS: u32 = 2048;
const LEVEL_BINS: u32 = 4096;
const ROW_BINS: u32 = 20480;

fn bin_place(bin: u32) -> u32 {
  return ((bin & 7u) << 8u) | (bin >> 3u);
}
