// The experts of a row: those with the SLOTS largest logits, best first, of equals the first; and
// their weights: softmax over all experts, or over these (NORMALIZE: they add up to one).
// Needs reduce.wgsl, and the bindings `logits: array<f32>` and `routing: array<f32>` to write to.
// @param ROUTE bool
// @param EXPERTS u32
// @param SLOTS u32               experts per row
// @param ROUTING_STRIDE u32
// @param NORMALIZE bool
// @param LOGITS_STRIDE u32
// @param LOGITS_OFFSET u32
#if ROUTE
const RANKERS = max(1u, WG / EXPERTS);  // invocations that share an expert

var<workgroup> expert_logits: array<f32, EXPERTS>;
var<workgroup> ranks: array<atomic<u32>, EXPERTS>;
var<workgroup> chosen: array<u32, SLOTS>;

// Fills `chosen`.
fn choose_experts(row: u32, me: Invocation) {
  for (var e = me.index; e < EXPERTS; e += WG) {
    expert_logits[e] = logits[row * LOGITS_STRIDE + LOGITS_OFFSET + e];
    atomicStore(&ranks[e], 0u);
  }
  for (var slot = me.index; slot < SLOTS; slot += WG) {
    chosen[slot] = 0u;  // of a row of NaN
  }
  workgroupBarrier();
  for (var i = me.index; i < EXPERTS * RANKERS; i += WG) {
    let e = i % EXPERTS;
    let logit = expert_logits[e];
    var better = 0u;
    for (var other = i / EXPERTS; other < EXPERTS; other += RANKERS) {
      let rival = expert_logits[other];
      better += u32(rival > logit || (rival == logit && other < e));
    }
    atomicAdd(&ranks[e], better);
  }
  workgroupBarrier();
  for (var e = me.index; e < EXPERTS; e += WG) {
    let rank = atomicLoad(&ranks[e]);
    if (rank < SLOTS) {
      chosen[rank] = e;
    }
  }
  workgroupBarrier();
}

// Writes the ids and weights of slots [first, end).
fn write_routing(row: u32, first: u32, end: u32, me: Invocation) {
  let most = expert_logits[chosen[0]];
  var sum = 0.0;
#if NORMALIZE
  for (var slot = 0u; slot < SLOTS; slot++) {
    sum += exp(expert_logits[chosen[slot]] - most);
  }
#else
  for (var e = me.index; e < EXPERTS; e += WG) {
    sum += exp(expert_logits[e] - most);
  }
  sum = workgroup_add(sum, me);
#endif
  for (var slot = first + me.index; slot < end; slot += WG) {
    let e = chosen[slot];
    routing[row * ROUTING_STRIDE + slot] = f32(e);
    routing[row * ROUTING_STRIDE + SLOTS + slot] = exp(expert_logits[e] - most) / sum;
  }
}
#endif
