// The experts of a row: those with the SLOTS largest logits, best first, of equals the first; and
// their weights: softmax over all experts, or over these (NORMALIZE: they add up to one), times
// ROUTE_SCALE. With SIGMOID a logit's score is its sigmoid and not its part of the softmax, and
// ROUTE_EPS is added to the sum of those that are to add up to one. With CORRECTION an expert is
// chosen by its score plus a value of its own, which its weight ignores. With EXPERT_SCALES its weight
// is multiplied by a factor of its own, after all that. With ROUTE_GROUPS above 1 experts are chosen of
// the CHOSEN_GROUPS groups whose best expert (with CORRECTION, whose best two together) have the largest
// score. The weight of the SHARED experts, which are not chosen, is SHARED_SCALE, with SHARED_GATED times
// the sigmoid of one more logit.
// Needs reduce.wgsl, and the bindings `logits: array<f32>`, `routing: array<f32>` to write to, and
// perhaps `correction: array<f32>` and `expert_scales: array<f32>`.
#include "routing.wgsl"
// @param ROUTE bool
// @param NORMALIZE bool
// @param SIGMOID bool
// @param CORRECTION bool
// @param EXPERT_SCALES bool
// @param ROUTE_SCALE f32
// @param ROUTE_EPS f32
// @param ROUTE_GROUPS u32
// @param CHOSEN_GROUPS u32
// @param SHARED_SCALE f32
// @param SHARED_GATED bool
// @param LOGITS_STRIDE u32
// @param LOGITS_OFFSET u32
#if ROUTE
const GROUP = max(32u, (SLOTS + 15u) / 16u * 16u);
const GROUPS_OF_EXPERTS = (EXPERTS + GROUP - 1u) / GROUP;
const PADDED = GROUPS_OF_EXPERTS * GROUP;
const FINALISTS = (GROUPS_OF_EXPERTS * SLOTS + 15u) / 16u * 16u;
var<workgroup> expert_logits: array<f32, EXPERTS>;
// In the order of preference: of the experts, and behind them of the best of each group.
var<workgroup> places: array<u32, PADDED + FINALISTS>;
var<workgroup> finalists: array<u32, FINALISTS>;
var<workgroup> chosen: array<u32, SLOTS>;
#if ROUTE_GROUPS > 1
const GROUP_EXPERTS = EXPERTS / ROUTE_GROUPS;
var<workgroup> group_places: array<u32, ROUTE_GROUPS>;

// Fills `group_places`.
fn place_groups(me: Invocation) {
  for (var g = me.index; g < ROUTE_GROUPS; g += WG) {
    var best = -3.4e38;
    var second = -3.4e38;
    for (var i = 0u; i < GROUP_EXPERTS; i++) {
      let own = preference(g * GROUP_EXPERTS + i);
      second = max(second, min(best, own));
      best = max(best, own);
    }
#if CORRECTION
    best += second;
#endif
    group_places[g] = order(best);
  }
  workgroupBarrier();
}

// Whether an expert's group is among those that experts are chosen of.
fn is_open(e: u32) -> bool {
  let group = e / GROUP_EXPERTS;
  var before = 0u;
  for (var other = 0u; other < ROUTE_GROUPS; other++) {
    before += u32(group_places[other] > group_places[group] - u32(other < group));
  }
  return before < CHOSEN_GROUPS;
}
#endif
#if CORRECTION
var<workgroup> preferences: array<f32, EXPERTS>;

// Fills `preferences`.
fn correct(me: Invocation) {
  var most = 0.0;
  var sum = 1.0;
#if not SIGMOID
  most = -3.4e38;
  for (var e = me.index; e < EXPERTS; e += WG) {
    most = max(most, expert_logits[e]);
  }
  most = workgroup_max(most, me);
  sum = 0.0;
  for (var e = me.index; e < EXPERTS; e += WG) {
    sum += score(expert_logits[e], most);
  }
  sum = workgroup_add(sum, me);
#endif
  for (var e = me.index; e < EXPERTS; e += WG) {
    preferences[e] = score(expert_logits[e], most) / sum + correction[e];
  }
  workgroupBarrier();
}
#endif

// The score of an expert, for softmax times a factor that all of a row share.
fn score(logit: f32, most: f32) -> f32 {
#if SIGMOID
  return 1.0 / (1.0 + exp(-logit));
#else
  return exp(logit - most);
#endif
}

// The value by which an expert is chosen: the larger, the sooner.
fn preference(e: u32) -> f32 {
#if CORRECTION
  return preferences[e];
#else
  return expert_logits[e];
#endif
}

// How many of the `count` places from `first` on come before the one at `own`: larger ones, and of equals
// those in front of it. Sixteen loads are under way at a time: a chain of single ones took longest of all.
fn before(first: u32, count: u32, own: u32) -> u32 {
  let place = places[own];
  var larger = 0u;
  for (var i = first; i < first + count; i += 16u) {
#for j in 0..16
    let other$j = places[i + $ju];
#endfor
#for j in 0..16
    larger += u32(other$j > place - u32(i + $ju < own));
#endfor
  }
  return larger;
}

// Fills `chosen`, in two rounds: the best SLOTS of each group of experts, then the best of these.
fn choose_experts(row: u32, me: Invocation) {
  for (var e = me.index; e < EXPERTS; e += WG) {
    expert_logits[e] = logits[row * LOGITS_STRIDE + LOGITS_OFFSET + e];
  }
#if CORRECTION
  workgroupBarrier();
  correct(me);
#endif
#if ROUTE_GROUPS > 1
  workgroupBarrier();
  place_groups(me);
#endif
  for (var e = me.index; e < PADDED + FINALISTS; e += WG) {
    var place = u32(e < PADDED);  // padding: the last
#if ROUTE_GROUPS > 1
    if (e < EXPERTS && is_open(min(e, EXPERTS - 1u))) {
#else
    if (e < EXPERTS) {
#endif
      place = order(preference(e));
    }
    places[e] = place;
  }
  workgroupBarrier();
  for (var e = me.index; e < PADDED; e += WG) {
    let group = e / GROUP;
    let rank = before(group * GROUP, GROUP, e);
    if (rank < SLOTS) {
#if EXPERTS <= 32
      chosen[rank] = e;
#else
      let f = group * SLOTS + rank;
      finalists[f] = e;
      places[PADDED + f] = places[e];
#endif
    }
  }
  workgroupBarrier();
#if EXPERTS > 32
  for (var f = me.index; f < GROUPS_OF_EXPERTS * SLOTS; f += WG) {
    let rank = before(PADDED, FINALISTS, PADDED + f);
    if (rank < SLOTS) {
      chosen[rank] = finalists[f];
    }
  }
  workgroupBarrier();
#endif
}

// An integer above 1 that is larger for a larger number.
fn order(x: f32) -> u32 {
  let bits = select(bitcast<u32>(x), 0u, x == 0.0);  // of -0 as of 0
  return max(2u, bits ^ select(0x80000000u, 0xffffffffu, bits >> 31u == 1u));
}

// The expert of a slot.
fn choose_expert(row: u32, slot: u32, me: Invocation) -> u32 {
#if SHARED > 0
  if (slot >= SLOTS) {
    return EXPERTS + slot - SLOTS;
  }
#endif
  choose_experts(row, me);
  return chosen[slot];
}

// Writes the ids and weights of slots [first, end).
fn write_routing(row: u32, first: u32, end: u32, me: Invocation) {
#if SHARED > 0
  for (var slot = max(first, SLOTS) + me.index; slot < end; slot += WG) {
    routing[row * ROUTING_STRIDE + slot] = f32(EXPERTS + slot - SLOTS);
    var weight = SHARED_SCALE;
#if SHARED_GATED
    weight /= 1.0 + exp(-logits[row * LOGITS_STRIDE + LOGITS_OFFSET + EXPERTS]);
#endif
    routing[row * ROUTING_STRIDE + ALL_SLOTS + slot] = weight;
  }
  if (first >= SLOTS) {
    return;
  }
#endif
  var most = expert_logits[chosen[0]];
#if CORRECTION
  for (var slot = 1u; slot < SLOTS; slot++) {
    most = max(most, expert_logits[chosen[slot]]);
  }
#endif
  var sum = 0.0;
#if NORMALIZE
  sum = ROUTE_EPS;
  for (var slot = 0u; slot < SLOTS; slot++) {
    sum += score(expert_logits[chosen[slot]], most);
  }
#elif SIGMOID
  sum = 1.0;
#else
  for (var e = me.index; e < EXPERTS; e += WG) {
    sum += score(expert_logits[e], most);
  }
  sum = workgroup_add(sum, me);
#endif
  for (var slot = first + me.index; slot < min(end, SLOTS); slot += WG) {
    let e = chosen[slot];
    routing[row * ROUTING_STRIDE + slot] = f32(e);
    var weight = score(expert_logits[e], most) / sum;
#if EXPERT_SCALES
    weight *= expert_scales[e];
#endif
    routing[row * ROUTING_STRIDE + ALL_SLOTS + slot] = ROUTE_SCALE * weight;
  }
}
#endif
