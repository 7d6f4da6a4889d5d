// Where top-k and top-p cut: a radix selection that takes one digit of the key per dispatch. Every
// workgroup of a dispatch reads the histogram that the one before has filled and finds the same bin.
// @param TILES u32      tiles of a row
// @param SLOT u32       how many dispatches of this step found something before: 0 starts from stats
// @param FIND_K u32     the digit of the top-k key to find now, 1 to 3 (0: none)
// @param FIND_P u32     the digit of the top-p key to find next
#include "sampling.wgsl"
#include "sample_reduce.wgsl"
#include "sample_histograms.wgsl"
// @param VOCAB u32
// @param STRIDE u32     values between two rows: VOCAB rounded up to 8
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> sampling: Samplings;
@group(0) @binding(2) var<storage, read> z: array<vec4<f32>>;                   // [row][STRIDE / 4]
@group(0) @binding(3) var<storage, read> stats: array<vec2<f32>>;               // [row][TILES]
@group(0) @binding(4) var<storage, read_write> histograms: array<atomic<u32>>;  // [row][ROW_BINS]
@group(0) @binding(5) var<storage, read_write> cuts: array<Cut>;                // [row][SLOTS]

const SLOTS: u32 = 6;

struct Cut {
  maximum: f32,
  unit: f32,      // the mass of a token with the maximum: masses are u32, so that sums have no order
  k_key: u32,     // the digits so far of the k-th key
  k_rank: u32,    // which of the tokens with these digits it is, from 1
  ties: u32,      // how many tokens have exactly the key where the cut is
  k_mass: u32,    // the mass of all tokens before these digits
  k_mass_1: u32,  // the same for the first digit alone
  p_key: u32,     // the digits so far of the key where the mass reaches top_p
  p_rest: u32,    // the mass to reach among the tokens with these digits; 0: it is reached at k_key
  below: u32,     // keys below this survive
  tie: u32,       // of the tokens with this key (NOTHING: none has it) only some survive:
  keep: u32,      // so many, those with the lowest ids
}

struct Found {
  bin: u32,
  before: vec2<u32>,  // count and mass before the bin
  inside: vec2<u32>,  // and in it
}

struct Sums {
  before: vec2<u32>,
  total: vec2<u32>,
}

alias Bins = array<vec2<u32>, 8>;  // (count, mass) of bins 8 * li .. 8 * li + 7

var<workgroup> found: Found;
// The values that prefetch reads:
var<private> own_stats: vec2<f32>;
var<private> known: Cut;
var<private> k_bins: Bins;
var<private> p_bins: Bins;

const NO_KEY: u32 = 0xff7fffff;  // of LOWEST: keys from here on are not counted

fn key_of(score: f32) -> u32 { return ~order(score); }

fn score_of(key: u32) -> f32 {
  let o = ~key;
  return bitcast<f32>(select(~o, o & 0x7fffffffu, (o >> 31u) == 1u));
}

fn mass_of(score: f32, cut: Cut) -> u32 {
  return u32(exp(score - cut.maximum) * cut.unit + 0.5);
}

// Scores first .. first + 3 of a row.
fn load_scores(row: u32, first: u32) -> vec4<f32> {
  var scores = vec4<f32>(LOWEST);
  if (first < STRIDE) { scores = z[(row * STRIDE + first) / 4u]; }
  return scores;
}

// Read-only storage alone decides these, so control flow stays uniform.
fn wants_top_k(sequence: u32) -> bool {
  let k = sampling.records[sequence].top_k;
  return k > 0u && k < VOCAB && sampling.records[sequence].temperature > 0.0;
}

fn wants_top_p(sequence: u32) -> bool {
  return sampling.records[sequence].top_p < 1.0 && sampling.records[sequence].temperature > 0.0;
}

// All loads of a row's cut, under way at once and before anything waits for another load.
fn prefetch(li: u32, row: u32) {
#if SLOT == 0
  own_stats = vec2<f32>(LOWEST, 0.0);
  for (var b = li; b < TILES; b += WG_SIZE) {
    own_stats = join_stats(own_stats, stats[row * TILES + b]);
  }
#else
  known = cuts[row * SLOTS + SLOT - 1u];
#endif
#if FIND_K > 0
  k_bins = load_bins(li, row, FIND_K - 1u);
#endif
#if FIND_P > 0
  p_bins = load_bins(li, row, select(FIND_P + 1u, 0u, FIND_P == 1u));
#endif
}

fn load_bins(li: u32, row: u32, level: u32) -> Bins {
  let base = row * ROW_BINS + level * LEVEL_BINS + li;
#for i in 0..8
  let count_$i = atomicLoad(&histograms[base + $iu * WG_SIZE]);
  let mass_$i = atomicLoad(&histograms[base + $iu * WG_SIZE + BINS]);
#endfor
  var bins: Bins;
#for i in 0..8
  bins[$i] = vec2<u32>(count_$i, mass_$i);
#endfor
  return bins;
}

fn sum_of(bins: Bins) -> vec2<u32> {
  return bins[0] + bins[1] + bins[2] + bins[3] + bins[4] + bins[5] + bins[6] + bins[7];
}

// The sum over the invocations before this one, and over all.
fn sum_before(li: u32, own: vec2<u32>) -> Sums {
  pairs[li] = own;
  workgroupBarrier();
  let group = li & ~15u;
  var sums = Sums();
  for (var i = 0u; i < rolled(15u, step.n_rows); i++) {
    sums.before += select(vec2<u32>(0u), pairs[group + i], group + i < li);
  }
  if (li == group + 15u) { groups[group / 16u] = sums.before + own; }
  workgroupBarrier();
  for (var i = 0u; i < rolled(16u, step.n_rows); i++) {
    sums.before += select(vec2<u32>(0u), groups[i], 16u * i < group);
    sums.total += groups[i];
  }
  return sums;
}

// The first bin where the running count (by = 0) or mass (by = 1) reaches goal.
fn search(li: u32, bins: Bins, before_own: vec2<u32>, by: u32, goal: u32) -> Found {
  var before = before_own;
#for i in 0..8
  if (before[by] < goal && goal <= before[by] + bins[$i][by]) {
    found = Found(8u * li + $iu, before, bins[$i]);
  }
  before += bins[$i];
#endfor
  return workgroupUniformLoad(&found);
}

fn shift_of(digit: u32) -> u32 {
  return select(select(0u, 10u, digit == 2u), 21u, digit == 1u);
}

#if SLOT == 0
fn first_cut(li: u32, sequence: u32) -> Cut {
  let all = stats_of_workgroup(li, own_stats);
  // No more than min(sum, k) can lie above the k-th: that much is 2^31, so that nothing that counts
  // overflows and few survivors are weighed as finely as many.
  let k = sampling.records[sequence].top_k;
  let most = select(all.y, min(all.y, f32(k)), wants_top_k(sequence));
  var cut: Cut;
  cut.maximum = all.x;
  cut.unit = 0x1p31f / most;
  cut.k_rank = k;
  return cut;
}
#endif

#if FIND_K > 0
fn find_k(li: u32, before: Cut) -> Cut {
  var cut = before;
  let sums = sum_before(li, sum_of(k_bins));
  cut.k_rank = min(cut.k_rank, sums.total.x);  // there may be no k that can be chosen
  let bin = search(li, k_bins, sums.before, 0u, cut.k_rank);
  cut.k_key |= bin.bin << shift_of(FIND_K);
  cut.k_rank -= bin.before.x;
  cut.k_mass += bin.before.y;
  cut.ties = bin.inside.x;
  if (FIND_K == 1u) { cut.k_mass_1 = bin.before.y; }
  return cut;
}
#endif

#if FIND_P > 0
fn find_p(li: u32, sequence: u32, before: Cut) -> Cut {
  var cut = before;
#if FIND_P == 1
  // This level holds what top-k has removed since: it has no mass any more.
  let top_k = wants_top_k(sequence);
  let last = select(NOTHING, cut.k_key >> 21u, top_k);
#for i in 0..8
  if (8u * li + $iu == last) { p_bins[$i].y = cut.k_mass - cut.k_mass_1; }
  if (8u * li + $iu > last) { p_bins[$i].y = 0u; }
#endfor
#endif
  let sums = sum_before(li, sum_of(p_bins));
#if FIND_P == 1
  // With top-k the total leaves out the tokens tied at the k-th key, which survive too.
  let total = sums.total.y;
  let each = max(f32(mass_of(score_of(cut.k_key), cut)), 1.0);
  let tied = select(0.0, f32(cut.ties) * each, top_k);
  let goal = sampling.records[sequence].top_p * (f32(total) + tied);
  if (total == 0u || (top_k && goal > f32(total))) {
    cut.keep = max(u32(ceil((goal - f32(total)) / each)), 1u);
  } else {
    cut.p_rest = clamp(u32(ceil(goal)), 1u, total);
  }
#endif
  let bin = search(li, p_bins, sums.before, 1u, cut.p_rest);
  if (cut.p_rest > 0u) {
    cut.p_key |= bin.bin << shift_of(FIND_P);
    cut.p_rest -= bin.before.y;
#if FIND_P == 3
    let each = max(bin.inside.y / max(bin.inside.x, 1u), 1u);  // equal keys have equal masses
    cut.ties = bin.inside.x;
    cut.keep = (cut.p_rest + each - 1u) / each;
#endif
  }
  return cut;
}
#endif

// After prefetch: the row's cut so far, and what the last histogram adds to it.
fn next_cut(li: u32, sequence: u32) -> Cut {
  if (li == 0u) { found = Found(); }
#if SLOT == 0
  var cut = first_cut(li, sequence);
#else
  var cut = known;
#endif
#if FIND_K > 0
  if (wants_top_k(sequence)) { cut = find_k(li, cut); }
#endif
#if FIND_P > 0
  if (wants_top_p(sequence)) { cut = find_p(li, sequence, cut); }
#endif
  return cut;
}
