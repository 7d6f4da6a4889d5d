// The experts of a row: those with the SLOTS largest logits, best first, of equals the first; and
// their weights: softmax over all experts, or over these (NORMALIZE: they add up to one), times
// ROUTE_SCALE. With SIGMOID a logit's score is its sigmoid and not its part of the softmax. With
// CORRECTION an expert is chosen by its score plus a value of its own, which its weight ignores.
// Needs reduce.wgsl, and the bindings `logits: array<f32>`, `routing: array<f32>` to write to, and
// perhaps `correction: array<f32>`.
// @param ROUTE bool
// @param EXPERTS u32
// @param SLOTS u32               experts per row
// @param ROUTING_STRIDE u32
// @param NORMALIZE bool
// @param SIGMOID bool
// @param CORRECTION bool
// @param ROUTE_SCALE f32
// @param LOGITS_STRIDE u32
// @param LOGITS_OFFSET u32
#if ROUTE
#let RANKED = EXPERTS <= 128 or not SUBGROUPS
var<workgroup> expert_logits: array<f32, EXPERTS>;
var<workgroup> chosen: array<u32, SLOTS>;
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

// What the experts are chosen by.
fn preference(e: u32) -> f32 {
#if CORRECTION
  return preferences[e];
#else
  return expert_logits[e];
#endif
}

// Fills `chosen`.
fn choose_experts(row: u32, me: Invocation) {
  for (var e = me.index; e < EXPERTS; e += WG) {
    expert_logits[e] = logits[row * LOGITS_STRIDE + LOGITS_OFFSET + e];
  }
#if RANKED
  clear_ranks(me);
#endif
  workgroupBarrier();
#if CORRECTION
  correct(me);
#endif
#if RANKED
  rank(me);
#else
  if (me.subgroup == 0u) {
    take_best(me);
  }
#endif
  workgroupBarrier();
}
#if not RANKED

// Of many, which would take long to rank: one after the other, by the first subgroup, each time the best
// of those that come after the last.
fn take_best(me: Invocation) {
  var last = vec2<u32>(0xffffffffu, 0u);  // its place in the order, and itself
  for (var slot = 0u; slot < SLOTS; slot++) {
    var best = vec2<u32>(0u, EXPERTS);
    for (var e = me.lane; e < EXPERTS; e += WG / me.n_subgroups) {
      let place = order(preference(e));
      let left = place < last.x || (place == last.x && e > last.y) || slot == 0u;
      if (left && (place > best.x || best.y == EXPERTS)) {
        best = vec2<u32>(place, e);
      }
    }
    last.x = subgroupMax(best.x);
    last.y = subgroupMin(select(EXPERTS, best.y, best.x == last.x));
    if (me.lane == 0u) {
      chosen[slot] = last.y;
    }
  }
}

// An integer that is larger for a larger number.
fn order(x: f32) -> u32 {
  let bits = select(bitcast<u32>(x), 0u, x == 0.0);  // of -0 as of 0
  return bits ^ select(0x80000000u, 0xffffffffu, bits >> 31u == 1u);
}
#else

const RANKERS = max(1u, WG / EXPERTS);  // invocations that share an expert
var<workgroup> ranks: array<atomic<u32>, EXPERTS>;

fn clear_ranks(me: Invocation) {
  for (var e = me.index; e < EXPERTS; e += WG) {
    atomicStore(&ranks[e], 0u);
  }
  for (var slot = me.index; slot < SLOTS; slot += WG) {
    chosen[slot] = 0u;  // of a row of NaN
  }
}

// All at once: how many are better than each.
fn rank(me: Invocation) {
  for (var i = me.index; i < EXPERTS * RANKERS; i += WG) {
    let e = i % EXPERTS;
    let own = preference(e);
    var better = 0u;
    for (var other = i / EXPERTS; other < EXPERTS; other += RANKERS) {
      let rival = preference(other);
      better += u32(rival > own || (rival == own && other < e));
    }
    atomicAdd(&ranks[e], better);
  }
  workgroupBarrier();
  for (var e = me.index; e < EXPERTS; e += WG) {
    let place = atomicLoad(&ranks[e]);
    if (place < SLOTS) {
      chosen[place] = e;
    }
  }
}
#endif

// Writes the ids and weights of slots [first, end).
fn write_routing(row: u32, first: u32, end: u32, me: Invocation) {
  var most = expert_logits[chosen[0]];
#if CORRECTION
  for (var slot = 1u; slot < SLOTS; slot++) {
    most = max(most, expert_logits[chosen[slot]]);
  }
#endif
  var sum = 0.0;
#if NORMALIZE
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
  for (var slot = first + me.index; slot < end; slot += WG) {
    let e = chosen[slot];
    routing[row * ROUTING_STRIDE + slot] = f32(e);
    let weight = score(expert_logits[e], most) / sum;
    routing[row * ROUTING_STRIDE + SLOTS + slot] = ROUTE_SCALE * weight;
  }
}
#endif
