// Attention of a few rows (decode): one split of the context for HEADS query heads that share a KV
// head, so that every key and value is read once for all of them. attention_combine joins the splits
// (Flash-Decoding, Dao et al. 2023).
//
// CLUSTER neighbouring lanes of a subgroup share a position. Each cluster goes through its own
// positions with an online softmax, without a barrier; the clusters are merged at the end.
//
// A lane has eight dimensions (PER_LANE times) of the keys, so of every score a part. For BATCH
// positions and HEADS heads these are SCORES parts, numbered head by head. They are added up and
// dealt out in one go: in each step a lane sends half of them away and gets the other half of the
// sums, until it has KEPT whole scores. So it takes one exponential for each, and what the
// others need of it (the weight of a position, the new scale of a head) they get by a shuffle.
//
// With ROPE, for one row, it does the work of rope_kv_write too: x is the q, k, v projection, of
// which every workgroup norms (NORM) and turns (unless ROTARY_DIM is 0) its own queries. OWN: the
// split that ends with the row's own position takes that one's key and value from there and puts them
// into the cache, where no workgroup may read them yet. The value is normed too (V_NORM), and it may
// be what the key is before that (V_IS_K). ROW_NORM: norms are of all queries and of all keys, with
// weights for each head; every workgroup sums up the squares of both.
//
// JOINED: the context is a single split, and this kernel does what attention_combine would do: SINKS
// and GATED are only for that. LATENT: values are the keys, which are loaded once.
#include "step.wgsl"
#include "kv_read_keys.wgsl"
#include "kv_read_values.wgsl"
#include "attention_range.wgsl"
#include "attention_split.wgsl"
#include "capped.wgsl"
#include "kv_store.wgsl"
#include "quantize_block.wgsl"
#if ROPE
#include "rotate_group.wgsl"
#endif
// @param WG u32
// @param CLUSTER u32             lanes per position: a power of two, at most a subgroup
// @param CLUSTER_BITS u32        its logarithm
// @param PER_LANE u32            groups of eight dimensions per lane
// @param BATCH u32               positions that a cluster loads at once
// @param HEADS u32               query heads per workgroup
// @param GROUP u32               query heads per KV head
// @param SCORES u32              BATCH times HEADS, which is rounded up to a power of two
// @param KEPT u32                scores that a lane ends up with: SCORES / CLUSTER, at least one
// @param FOLDS u32               steps to them: the logarithm of SCORES / KEPT
// @param KEPT_HEADS u32          heads that these belong to
// @param HEAD_BITS u32           the logarithm of the lanes that share a head's scores
// @param SUBGROUPS u32           subgroups of a workgroup, at most
// @param MERGED u32              heads for which workgroup memory has room at once
// @param SCALE f32
// @param X_STRIDE u32
// @param X_OFFSET u32
// @param Y_STRIDE u32
// @param JOINED bool
// @param LATENT bool
// @param SINKS bool
// @param GATED bool
// @param GATE_STRIDE u32
// @param GATE_OFFSET u32
// @param ROPE bool
// @param OWN bool                only with ROPE, as NORM is
// @param NORM bool
// @param ROW_NORM bool           only with NORM; then neither V_NORM nor TURN_FIRST
// @param V_NORM bool
// @param V_IS_K bool
// @param EPS f32
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> pages: array<u32>;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;  // queries, or q, k, v heads
#if OWN
@group(0) @binding(3) var<storage, read_write> keys: array<KvWords>;
@group(0) @binding(4) var<storage, read_write> values: array<KvWords>;
#else
@group(0) @binding(3) var<storage, read> keys: array<KvWords>;
@group(0) @binding(4) var<storage, read> values: array<KvWords>;
#endif
#if QUANTIZE
@group(0) @binding(5) var<storage, read_write> x_int8: array<u32>;
@group(0) @binding(6) var<storage, read_write> x_int8_scales: array<vec2<f32>>;
#elif JOINED
@group(0) @binding(5) var<storage, read_write> y: array<vec4<f32>>;
#else
@group(0) @binding(5) var<storage, read_write> y: array<vec2<f32>>;  // see attention_split.wgsl
#endif
#let TABLE = 6 + QUANTIZE
#let NORMS = TABLE + ROPE * (ROTARY_DIM > 0)
#if ROPE
#if ROTARY_DIM > 0
@group(0) @binding($(TABLE)) var<storage, read> table: array<vec4<f32>>;
#endif
#if NORM
@group(0) @binding($(NORMS)) var<storage, read> q_norm: array<vec4<f32>>;
#if OWN
@group(0) @binding($(NORMS + 1)) var<storage, read> k_norm: array<vec4<f32>>;
#endif
#if V_NORM
@group(0) @binding($(NORMS + 2)) var<storage, read> v_norm: array<vec4<f32>>;
#endif
#endif
#endif
#if SINKS
@group(0) @binding($(NORMS + NORM + NORM * OWN + V_NORM)) var<storage, read> sinks: array<f32>;
#endif
#let GATES = NORMS + NORM + NORM * OWN + V_NORM + SINKS
#if GATED
@group(0) @binding($(GATES)) var<storage, read> gates: array<vec4<f32>>;
#endif

struct Group {  // eight dimensions of a head
  low: vec4<f32>,
  high: vec4<f32>,
}

const CLUSTERS = WG / CLUSTER;
const COPIES = CLUSTER * KEPT / SCORES;  // lanes that have the same scores
const GROUPS = HEAD_DIM / 8u;  // groups of eight dimensions in a head
const LOWEST = -3.0e38;
const LOG2_E = 1.44269504;  // the GPU's exponential is of base two
#if SOFTCAP > 0
const Q_SCALE: f32 = SCALE;  // the factor comes after the cap
#else
const Q_SCALE: f32 = SCALE * LOG2_E;
#endif
#if ROW_NORM
const QUERIES = GROUP * KV_HEADS * GROUPS * 2u;  // vectors in all queries of a row
const KEYS = u32(OWN) * KV_HEADS * GROUPS * 2u;  // in all of its keys
#let ROUNDS = ((GROUP + OWN) * KV_HEADS * HEAD_DIM + 4 * WG - 1) / (4 * WG)
#endif

var<workgroup> parts: array<vec2<f32>, HEADS * SUBGROUPS>;  // (max, sum) of each subgroup
var<workgroup> outputs: array<vec4<f32>, MERGED * SUBGROUPS * GROUPS * 2u>;

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
#for h in 0..HEADS
#for e in 0..PER_LANE
  let raw$h_$e = load_query(heads, (first_head + $hu) * GROUPS + part + $eu * CLUSTER);
#endfor
#endfor
#if OWN
  let key_head = (HEADS * size.y + kv_head) * GROUPS;
#if V_IS_K
  let value_head = key_head;
#else
  let value_head = key_head + HEADS * size.y / GROUP * GROUPS;
#endif
#endif
#if ROW_NORM
#for j in 0..ROUNDS
  let row$j = x[heads + min(tid + $ju * WG, QUERIES + KEYS - 1u)];
#endfor
#endif
#if ROPE
#for e in 0..PER_LANE
  let partner$e = partner_of(part + $eu * CLUSTER);
#for h in 0..HEADS
  let raw_partner$h_$e = load_query(heads, (first_head + $hu) * GROUPS + partner$e);
#endfor
#if NORM and not ROW_NORM
  let q_weight$e = q_weight(part + $eu * CLUSTER);
  let q_weight_partner$e = q_weight(partner$e);
#endif
#if OWN
  let raw_key$e = load_own_key(heads, key_head + part + $eu * CLUSTER);
  let raw_key_partner$e = load_own_key(heads, key_head + partner$e);
  let raw_value$e = load_group(heads, value_head + part + $eu * CLUSTER);
#if NORM and not ROW_NORM
  let k_weight$e = k_weight(part + $eu * CLUSTER);
  let k_weight_partner$e = k_weight(partner$e);
#endif
#if V_NORM
  let v_weight$e = v_weight(part + $eu * CLUSTER);
#endif
#endif
#endfor
#endif

  let row = step.rows[id.z];
  let first = first_position(row.position);
  let length = split_length(row.position + 1u - first);
  let start = first + id.x * length;
  if (start > row.position) {
    return;
  }
#if ROPE
#for e in 0..PER_LANE
  let turn$e = turn_of(part + $eu * CLUSTER, row.position);
#endfor
#endif
#if OWN
  let count = min(length, row.position - start);  // positions to read from the cache
  let is_last = row.position - start < length;
#else
  let count = min(length, row.position + 1u - start);
#endif

  // The first keys and values are on their way while the queries are made.
#for b in 0..BATCH
#for e in 0..PER_LANE
  var key$b_$e = Kv8();
  var value$b_$e = Kv8();
#endfor
#endfor
  if (count > 0u) {
#for b in 0..BATCH
    let place$b = min($bu * CLUSTERS + cluster, count - 1u);
    let kv$b = kv_index(kv_head, kv_slot(row.sequence, start + place$b)) + part;
#for e in 0..PER_LANE
    key$b_$e = load_key(kv$b + $eu * CLUSTER);
#endfor
#endfor
#for b in 0..BATCH
#for e in 0..PER_LANE
#if LATENT
    value$b_$e = key$b_$e;
#else
    value$b_$e = load_value(kv$b + $eu * CLUSTER);
#endif
#endfor
#endfor
  }

#if ROW_NORM
  var squares_of_row = vec2<f32>();  // queries, keys
#for j in 0..ROUNDS
  squares_of_row += squares_at(tid + $ju * WG, row$j);
#endfor
  squares_of_row = subgroupAdd(squares_of_row);
  if (lane == 0u) {
    parts[subgroup] = squares_of_row;
  }
  workgroupBarrier();
  squares_of_row = parts[0];
#for g in 1..SUBGROUPS
  squares_of_row += select(vec2<f32>(), parts[$g], $gu * subgroup_size < WG);
#endfor
  workgroupBarrier();  // parts are written again
#endif
#for h in 0..HEADS
  var scale$h = Q_SCALE;
#if ROW_NORM
  scale$h *= inverseSqrt(squares_of_row.x / f32(4u * QUERIES) + EPS);
#elif ROPE and NORM
  var squares$h = 0.0;
#for e in 0..PER_LANE
  squares$h += squared(raw$h_$e);
#endfor
#for k in 0..CLUSTER_BITS
  squares$h += subgroupShuffleXor(squares$h, $(1 << $k)u);
#endfor
  scale$h *= inverseSqrt(squares$h / f32(HEAD_DIM) + EPS);
#endif
#endfor
#for e in 0..PER_LANE
#if ROPE and NORM and not ROW_NORM
  let q_turn$e = weighted(turn$e, q_weight$e, q_weight_partner$e);
#elif ROPE
  let q_turn$e = turn$e;
#endif
#for h in 0..HEADS
#if ROPE
  let turned$h_$e = turned(raw$h_$e, raw_partner$h_$e, q_turn$e);
  let q$h_$e_low = scale$h * turned$h_$e.low;
  let q$h_$e_high = scale$h * turned$h_$e.high;
#else
  let q$h_$e_low = scale$h * raw$h_$e.low;
  let q$h_$e_high = scale$h * raw$h_$e.high;
#endif
  var o$h_$e_low = vec4<f32>();
  var o$h_$e_high = vec4<f32>();
#endfor
#endfor
  // Of the heads that the lane has scores of: the same maximum in all such lanes, and the sum of
  // its own weights.
#for m in 0..KEPT_HEADS
  var most$m = LOWEST;
  var sum$m = 0.0;
#endfor
#if OWN
  if (is_last) {
    // The row's own position, through the type of the cache.
    var key_scale = 1.0;
#if ROW_NORM
    key_scale = inverseSqrt(squares_of_row.y / f32(4u * KEYS) + EPS);
#elif NORM
    var squares = 0.0;
#for e in 0..PER_LANE
    squares += squared(raw_key$e);
#endfor
#for k in 0..CLUSTER_BITS
    squares += subgroupShuffleXor(squares, $(1 << $k)u);
#endfor
    key_scale = inverseSqrt(squares / f32(HEAD_DIM) + EPS);
#endif
#if V_NORM
    var value_squares = 0.0;
#for e in 0..PER_LANE
    value_squares += squared(raw_value$e);
#endfor
#for k in 0..CLUSTER_BITS
    value_squares += subgroupShuffleXor(value_squares, $(1 << $k)u);
#endfor
    let value_scale = inverseSqrt(value_squares / f32(HEAD_DIM) + EPS);
#endif
#for e in 0..PER_LANE
#if NORM and not ROW_NORM
    let k_turn$e = weighted(turn$e, k_weight$e, k_weight_partner$e);
#else
    let k_turn$e = turn$e;
#endif
    let turned_key$e = turned(raw_key$e, raw_key_partner$e, k_turn$e);
    let own_key$e = to_kv(key_scale * turned_key$e.low, key_scale * turned_key$e.high);
#if V_NORM
    let value_low$e = value_scale * raw_value$e.low * v_weight$e.low;
    let value_high$e = value_scale * raw_value$e.high * v_weight$e.high;
    let own_value$e = to_kv(value_low$e, value_high$e);
#else
    let own_value$e = to_kv(raw_value$e.low, raw_value$e.high);
#endif
#if KV == q8
    let key_scales$e = two_scales(own_key$e);
    let value_scales$e = two_scales(own_value$e);
#endif
#endfor
#for h in 0..HEADS
    var own$h = 0.0;
#for e in 0..PER_LANE
    own$h += dot(kv_low(own_key$e), q$h_$e_low) + dot(kv_high(own_key$e), q$h_$e_high);
#endfor
#for k in 0..CLUSTER_BITS
    own$h += subgroupShuffleXor(own$h, $(1 << $k)u);
#endfor
#if SOFTCAP > 0
    own$h = LOG2_E * capped(own$h);
#endif
#endfor
    if (cluster == 0u) {  // the others begin with nothing
#for m in 0..KEPT_HEADS
#for h in 0..HEADS
      most$m = select(most$m, own$h, mine / BATCH + $mu == $hu);
#endfor
      sum$m = select(0.0, 1.0, mine % BATCH == 0u);
#endfor
#for h in 0..HEADS
#for e in 0..PER_LANE
      o$h_$e_low = kv_low(own_value$e);
      o$h_$e_high = kv_high(own_value$e);
#endfor
#endfor
      // Of the workgroups that share a KV head, one writes.
      if (first_head % GROUP == 0u && row.alive != 0u && id.z < step.n_rows) {
        let own = kv_index(kv_head, kv_slot(row.sequence, row.position)) + part;
#for e in 0..PER_LANE
        store_key(own + $eu * CLUSTER, own_key$e);
        store_value(own + $eu * CLUSTER, own_value$e);
#if KV == q8
        if (part % 8u == 0u) {
          let scales = kv_scale_index(own + $eu * CLUSTER) / 2u;
          keys[scales] = key_scales$e;
          values[scales] = value_scales$e;
        }
#endif
#endfor
      }
    }
  }
#endif
  for (var base = 0u; base < count; base += CLUSTERS * BATCH) {
    // The next keys and values are on their way while these are used.
    let next = base + CLUSTERS * BATCH;
#for b in 0..BATCH
#for e in 0..PER_LANE
    var next_key$b_$e = Kv8();
    var next_value$b_$e = Kv8();
#endfor
#endfor
    if (next < count) {
#for b in 0..BATCH
      let next_place$b = min(next + $bu * CLUSTERS + cluster, count - 1u);
      let next_kv$b = kv_index(kv_head, kv_slot(row.sequence, start + next_place$b)) + part;
#for e in 0..PER_LANE
      next_key$b_$e = load_key(next_kv$b + $eu * CLUSTER);
#if LATENT
      next_value$b_$e = next_key$b_$e;
#else
      next_value$b_$e = load_value(next_kv$b + $eu * CLUSTER);
#endif
#endfor
#endfor
    }
#for h in 0..HEADS
#for b in 0..BATCH
    var score$($h * BATCH + $b) = 0.0;
#for e in 0..PER_LANE
    score$($h * BATCH + $b) += dot(kv_low(key$b_$e), q$h_$e_low);
    score$($h * BATCH + $b) += dot(kv_high(key$b_$e), q$h_$e_high);
#endfor
#endfor
#endfor
#for i in HEADS * BATCH..SCORES
    var score$i = 0.0;
#endfor
#for k in 0..FOLDS
    let upper$k = (part & CLUSTER / $(2 << $k)u) != 0u;
#for i in 0..SCORES / (2 << $k)
#for j in $i + SCORES / (2 << $k)..$i + SCORES / (2 << $k) + 1
    score$i = select(score$i, score$j, upper$k)
      + subgroupShuffleXor(select(score$j, score$i, upper$k), CLUSTER / $(2 << $k)u);
#endfor
#endfor
#endfor
#for k in FOLDS..CLUSTER_BITS
    score0 += subgroupShuffleXor(score0, CLUSTER / $(2 << $k)u);
#endfor
#for m in 0..KEPT_HEADS
    let before$m = most$m;
#for i in $m * KEPT / KEPT_HEADS..($m + 1) * KEPT / KEPT_HEADS
    let place_of$i = base + (mine + $iu) % BATCH * CLUSTERS + cluster;
#if SOFTCAP > 0
    score$i = LOG2_E * capped(score$i);
#endif
    score$i = select(LOWEST, score$i, place_of$i < count);
    most$m = max(most$m, score$i);
#endfor
#for k in 0..HEAD_BITS
    most$m = max(most$m, subgroupShuffleXor(most$m, COPIES * $(1 << $k)u));
#endfor
    let rescale$m = exp2(before$m - most$m);
    sum$m *= rescale$m;
#for i in $m * KEPT / KEPT_HEADS..($m + 1) * KEPT / KEPT_HEADS
    let weight$i = exp2(score$i - most$m);
    sum$m += weight$i;
#endfor
#endfor
#for h in 0..HEADS
#for m in $h * BATCH % KEPT / BATCH..$h * BATCH % KEPT / BATCH + 1
    let rescale_of$h = subgroupShuffle(rescale$m, lane - part + $($h * BATCH / KEPT)u * COPIES);
#endfor
#for e in 0..PER_LANE
    o$h_$e_low *= rescale_of$h;
    o$h_$e_high *= rescale_of$h;
#endfor
#for b in 0..BATCH
#for n in $h * BATCH + $b..$h * BATCH + $b + 1
#for i in $n % KEPT..$n % KEPT + 1
    let weight_of$n = subgroupShuffle(weight$i, lane - part + $($n / KEPT)u * COPIES);
#endfor
#for e in 0..PER_LANE
    o$h_$e_low += weight_of$n * kv_low(value$b_$e);
    o$h_$e_high += weight_of$n * kv_high(value$b_$e);
#endfor
#endfor
#endfor
#endfor
#for b in 0..BATCH
#for e in 0..PER_LANE
    key$b_$e = next_key$b_$e;
    value$b_$e = next_value$b_$e;
#endfor
#endfor
  }

  // Merge the clusters of a subgroup. One without a position has the maximum LOWEST: no weight.
#for m in 0..KEPT_HEADS
#for k in 0..HEAD_BITS
  sum$m += subgroupShuffleXor(sum$m, COPIES * $(1 << $k)u);
#endfor
  var joint$m = most$m;
  for (var other = CLUSTER; other < subgroup_size; other *= 2u) {
    joint$m = max(joint$m, subgroupShuffleXor(joint$m, other));
  }
  let share$m = exp2(most$m - joint$m);
  sum$m *= share$m;
  for (var other = CLUSTER; other < subgroup_size; other *= 2u) {
    sum$m += subgroupShuffleXor(sum$m, other);
  }
  if (lane < CLUSTER && part % COPIES == 0u && mine % BATCH == 0u && mine / BATCH + $mu < HEADS) {
    parts[(mine / BATCH + $mu) * SUBGROUPS + subgroup] = vec2<f32>(joint$m, sum$m);
  }
#endfor
#for h in 0..HEADS
#for m in $h * BATCH % KEPT / BATCH..$h * BATCH % KEPT / BATCH + 1
  let share_of$h = subgroupShuffle(share$m, lane - part + $($h * BATCH / KEPT)u * COPIES);
#endfor
#for e in 0..PER_LANE
  o$h_$e_low *= share_of$h;
  o$h_$e_high *= share_of$h;
#endfor
#endfor
  for (var other = CLUSTER; other < subgroup_size; other *= 2u) {
#for h in 0..HEADS
#for e in 0..PER_LANE
    o$h_$e_low += subgroupShuffleXor(o$h_$e_low, other);
    o$h_$e_high += subgroupShuffleXor(o$h_$e_high, other);
#endfor
#endfor
  }

  // Merge the subgroups of the workgroup.
  let n_subgroups = max(1u, WG / subgroup_size);
#for r in 0..HEADS / MERGED
#if $r > 0
  workgroupBarrier();
#endif
  if (lane < CLUSTER) {
#for h in $r * MERGED..($r + 1) * MERGED
#for e in 0..PER_LANE
    {
      let out = ($($h % MERGED)u * SUBGROUPS + subgroup) * GROUPS + part + $eu * CLUSTER;
      outputs[2u * out] = o$h_$e_low;
      outputs[2u * out + 1u] = o$h_$e_high;
    }
#endfor
#endfor
  }
  workgroupBarrier();
  for (var base = 0u; base < MERGED * GROUPS * 2u; base += WG) {
    let writes = base + tid < MERGED * GROUPS * 2u;
    let i = min(base + tid, MERGED * GROUPS * 2u - 1u);
    let d = i % (GROUPS * 2u);
    let h = i / (GROUPS * 2u);
#if SINKS
    let sink = LOG2_E * sinks[first_head + $ru * MERGED + h];
    var most = sink;
#else
    var most = LOWEST;
#endif
#for g in 0..SUBGROUPS
    let part$g = parts[($ru * MERGED + h) * SUBGROUPS + $gu];
    let most$g = select(LOWEST, part$g.x, $gu < n_subgroups);
    most = max(most, most$g);
#endfor
#if SINKS
    var sum = exp2(sink - most);
#else
    var sum = 0.0;
#endif
    var out = vec4<f32>();
#for g in 0..SUBGROUPS
    let factor$g = exp2(most$g - most);
    sum += factor$g * part$g.y;
    out += factor$g * outputs[(h * SUBGROUPS + $gu) * GROUPS * 2u + d];
#endfor
#if JOINED
    let at = (first_head + $ru * MERGED + h) * (GROUPS * 2u) + d;
#if GATED
    let gate = gates[(id.z * GATE_STRIDE + GATE_OFFSET) / 4u + at];
    let value = out / sum / (1.0 + exp(-gate));
#else
    let value = out / sum;
#endif
#if QUANTIZE
    var half_most = magnitude(value);
    half_most = max(half_most, subgroupShuffleXor(half_most, 1u));
    half_most = max(half_most, subgroupShuffleXor(half_most, 2u));
    if (writes) {
      let half = half_at(id.z, HEADS * size.y * GROUPS / 4u, at / 4u);
      store_int8(half, at % 4u, value, half_most);
      if (at % 4u == 0u) {
        store_scale(half, half_most, 0.0);
      }
    }
#else
    if (writes) {
      y[id.z * (Y_STRIDE / 4u) + at] = value;
    }
#endif
#else
    if (writes) {
      let stored = stored_head(id.z, HEADS * size.y, first_head + $ru * MERGED + h);
      let at = stored_output(stored, id.x) + d;
      y[2u * at] = out.xy;
      y[2u * at + 1u] = out.zw;
      if (d == 0u) {
        y[2u * stored + id.x] = vec2<f32>(most, sum);
      }
    }
#endif
  }
#endfor
}

fn load_group(heads: u32, group: u32) -> Group {
  return Group(x[heads + 2u * group], x[heads + 2u * group + 1u]);
}

// A group of a query, times the weights of a norm of rows: those of heads go into the turn.
fn load_query(heads: u32, group: u32) -> Group {
  let query = load_group(heads, group);
#if ROW_NORM
  let weight = q_weight(group);
  return Group(query.low * weight.low, query.high * weight.high);
#else
  return query;
#endif
}
#if OWN

// The same of a key.
fn load_own_key(heads: u32, group: u32) -> Group {
  let key = load_group(heads, group);
#if ROW_NORM
  let weight = k_weight(group - QUERIES / 2u);
  return Group(key.low * weight.low, key.high * weight.high);
#else
  return key;
#endif
}

fn store_key(i: u32, key: Kv8) {
#if KV == f32
  keys[2u * i] = key.low;
  keys[2u * i + 1u] = key.high;
#elif KV == q8
  keys[i] = vec2<u32>(key.low, key.high);
#else
  keys[i] = key;
#endif
}

fn store_value(i: u32, value: Kv8) {
#if KV == f32
  values[2u * i] = value.low;
  values[2u * i + 1u] = value.high;
#elif KV == q8
  values[i] = vec2<u32>(value.low, value.high);
#else
  values[i] = value;
#endif
}
#endif
#if ROW_NORM

// What vector i of a row adds to the squares of the queries and of the keys.
fn squares_at(i: u32, vector: vec4<f32>) -> vec2<f32> {
  let is_query = i < QUERIES;
  let is_key = i < QUERIES + KEYS && !is_query;
  return select(vec2<f32>(), vec2<f32>(dot(vector, vector)), vec2<bool>(is_query, is_key));
}
#endif
#if NORM

fn squared(group: Group) -> f32 {
  return dot(group.low, group.low) + dot(group.high, group.high);
}

fn q_weight(i: u32) -> Group {
  return Group(q_norm[2u * i], q_norm[2u * i + 1u]);
}

#if OWN

fn k_weight(i: u32) -> Group {
  return Group(k_norm[2u * i], k_norm[2u * i + 1u]);
}
#endif
#if V_NORM

fn v_weight(i: u32) -> Group {
  return Group(v_norm[2u * i], v_norm[2u * i + 1u]);
}
#endif
#endif
