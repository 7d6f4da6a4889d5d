// Where top-k and top-p cut: a radix selection that takes one digit of the key per dispatch. Every
// workgroup of a dispatch reads the histogram that the one before has filled and finds the same bin.
// @param BLOCKS u32     blocks of a row
// @param SLOT u32       how many dispatches of this step found something before: 0 starts from stats
// @param FIND_K u32     the digit of the top-k key to find now, 1 to 3 (0: none)
// @param FIND_P u32     the digit of the top-p key to find next
#include "sampling.wgsl"
#include "sample_best.wgsl"
#include "sample_histograms.wgsl"

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

var<workgroup> found: Found;
var<workgroup> previous: Cut;

fn key_of(score: f32) -> u32 { return ~order(score); }

fn score_of(key: u32) -> f32 {
  let o = ~key;
  return bitcast<f32>(select(~o, o & 0x7fffffffu, (o >> 31u) == 1u));
}

fn mass_of(score: f32, cut: Cut) -> u32 {
  return u32(exp(score - cut.maximum) * cut.unit + 0.5);
}

// Read-only storage alone decides these, so control flow stays uniform.
fn wants_top_k(sequence: u32) -> bool {
  let k = sampling[sequence].top_k;
  return k > 0u && k < VOCAB && sampling[sequence].temperature > 0.0;
}

fn wants_top_p(sequence: u32) -> bool {
  return sampling[sequence].top_p < 1.0 && sampling[sequence].temperature > 0.0;
}

// The sum over the invocations before this one; then pairs[i] is the sum up to and including i.
fn sum_before(li: u32, own: vec2<u32>) -> vec2<u32> {
  workgroupBarrier();
  pairs[li] = own;
  workgroupBarrier();
  for (var reach = 1u; reach < WG_SIZE; reach *= 2u) {
    var other = vec2<u32>(0u);
    if (li >= reach) { other = pairs[li - reach]; }
    workgroupBarrier();
    pairs[li] += other;
    workgroupBarrier();
  }
  return pairs[li] - own;
}

var<private> values: array<vec2<u32>, 8>;  // (count, mass) of bins 8 * li .. 8 * li + 7
var<private> own_before: vec2<u32>;         // and of all bins before those

// Read a level; returns its total. From bin last on it holds tokens that top-k has removed: they
// have no mass here, and in bin last itself only last_mass is left.
fn read_level(li: u32, row: u32, level: u32, last: u32, last_mass: u32) -> vec2<u32> {
  let base = row * ROW_BINS + level * LEVEL_BINS + li;
  // Unrolled, so that all loads are under way at once.
#for i in 0..8
  let count_$i = atomicLoad(&histograms[base + $iu * WG_SIZE]);
  let mass_$i = atomicLoad(&histograms[base + $iu * WG_SIZE + BINS]);
#endfor
  if (li == 0u) { found = Found(); }
  var own = vec2<u32>(0u);
#for i in 0..8
  {
    let bin = 8u * li + $iu;
    let mass = select(select(mass_$i, last_mass, bin == last), 0u, bin > last);
    values[$i] = vec2<u32>(count_$i, mass);
    own += values[$i];
  }
#endfor
  own_before = sum_before(li, own);
  return workgroupUniformLoad(&pairs[WG_SIZE - 1u]);
}

// The first bin where the running count (by = 0) or mass (by = 1) of the level reaches goal.
fn search(li: u32, by: u32, goal: u32) -> Found {
  var before = own_before;
  if (before[by] < goal && goal <= pairs[li][by]) {
    var i = 0u;
    while (i < 7u && before[by] + values[i][by] < goal) {
      before += values[i];
      i += 1u;
    }
    found = Found(8u * li + i, before, values[i]);
  }
  return workgroupUniformLoad(&found);
}

fn shift_of(digit: u32) -> u32 {
  return select(select(0u, 10u, digit == 2u), 21u, digit == 1u);
}

fn first_cut(li: u32, row: u32, sequence: u32) -> Cut {
  var own = vec2<f32>(LOWEST, 0.0);
  for (var b = li; b < BLOCKS; b += WG_SIZE) { own = join_stats(own, stats[row * BLOCKS + b]); }
  pairs[li] = bitcast<vec2<u32>>(own);
  workgroupBarrier();
  for (var half = WG_SIZE / 2u; half > 0u; half /= 2u) {
    if (li < half) {
      let other = bitcast<vec2<f32>>(pairs[li + half]);
      pairs[li] = bitcast<vec2<u32>>(join_stats(bitcast<vec2<f32>>(pairs[li]), other));
    }
    workgroupBarrier();
  }
  let all = bitcast<vec2<f32>>(workgroupUniformLoad(&pairs[0]));
  // No more than min(sum, k) can survive above the k-th: that much is 2^31, so that nothing that counts
  // overflows and few survivors are weighed as finely as many.
  let k = sampling[sequence].top_k;
  let most = select(all.y, min(all.y, f32(k)), wants_top_k(sequence));
  var cut: Cut;
  cut.maximum = all.x;
  cut.unit = 0x1p31f / most;
  cut.k_rank = k;
  return cut;
}

#if FIND_K > 0
fn find_k(li: u32, row: u32, before: Cut) -> Cut {
  var cut = before;
  read_level(li, row, FIND_K - 1u, NOTHING, 0u);
  let bin = search(li, 0u, cut.k_rank);
  cut.k_key |= bin.bin << shift_of(FIND_K);
  cut.k_rank -= bin.before.x;
  cut.k_mass += bin.before.y;
  cut.ties = bin.inside.x;
  if (FIND_K == 1u) { cut.k_mass_1 = bin.before.y; }
  return cut;
}
#endif

#if FIND_P > 0
fn find_p(li: u32, row: u32, sequence: u32, before: Cut) -> Cut {
  var cut = before;
#if FIND_P == 1
  let top_k = wants_top_k(sequence);
  let last = select(NOTHING, cut.k_key >> 21u, top_k);
  let total = read_level(li, row, 0u, last, cut.k_mass - cut.k_mass_1).y;
  // With top-k the level's total leaves out the tokens tied at the k-th key, which survive too.
  let each = max(f32(mass_of(score_of(cut.k_key), cut)), 1.0);
  let tied = select(0.0, f32(cut.ties) * each, top_k);
  let goal = sampling[sequence].top_p * (f32(total) + tied);
  if (total == 0u || (top_k && goal > f32(total))) {
    cut.keep = max(u32(ceil((goal - f32(total)) / each)), 1u);
  } else {
    cut.p_rest = clamp(u32(ceil(goal)), 1u, total);
  }
#else
  read_level(li, row, FIND_P + 1u, NOTHING, 0u);
#endif
  let bin = search(li, 1u, cut.p_rest);
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

// What this dispatch knows: the row's cut so far, and what the last histogram adds to it.
fn next_cut(li: u32, row: u32, sequence: u32) -> Cut {
#if SLOT == 0
  var cut = first_cut(li, row, sequence);
#else
  if (li == 0u) { previous = cuts[row * SLOTS + SLOT - 1u]; }
  var cut = workgroupUniformLoad(&previous);
#endif
#if FIND_K > 0
  if (wants_top_k(sequence)) { cut = find_k(li, row, cut); }
#endif
#if FIND_P > 0
  if (wants_top_p(sequence)) { cut = find_p(li, row, sequence, cut); }
#endif
  return cut;
}
