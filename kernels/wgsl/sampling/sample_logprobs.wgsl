// logprobs[row] = (token, log probability) of the row's sampled token, then of the BEST most probable ones,
// the best first, of equal ones the lowest id; (NOTHING, ..) where the vocabulary has no more.
// @param TILES u32      tiles of a row
// @param VOCAB u32
// @param STRIDE u32     logits of a row: VOCAB rounded up to 8
// @param BEST u32
#include "sampling.wgsl"
#include "sample_reduce.wgsl"
#include "sample_ranked.wgsl"

@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> logits: array<f32>;                // [row][STRIDE]
@group(0) @binding(2) var<storage, read> tile_bests: array<vec2<u32>>;           // [row][TILES][1 + BEST]
@group(0) @binding(3) var<storage, read> sampled: array<u32>;               // [row]
@group(0) @binding(4) var<storage, read_write> logprobs: array<vec2<u32>>;  // [row][1 + BEST]

// The bits of the log probability of a token. stats: (max, sum of exp(logit - max)) of its row.
fn logprob(row: u32, token: u32, stats: vec2<f32>) -> u32 {
  let x = logits[row * STRIDE + min(token, VOCAB - 1u)];
  let possible = order(x) > order(LOWEST);
  return select(0xff800000u, bitcast<u32>((x - stats.x) - log(stats.y)), possible);  // else -inf
}

@compute @workgroup_size(WG_SIZE)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  if (id.y >= n_sampled_rows()) { return; }
  let row = id.y;
  var stats = vec2<f32>(LOWEST, 0.0);
  for (var tile = li; tile < TILES; tile += WG_SIZE) {
    stats = join_stats(stats, bitcast<vec2<f32>>(tile_bests[(row * TILES + tile) * (1u + BEST)]));
  }
  stats = stats_of_workgroup(li, stats);
  let at = row * (1u + BEST);
  if (li == 0u) { logprobs[at] = vec2<u32>(sampled[row], logprob(row, sampled[row], stats)); }

  var last = BEFORE_ALL;
  for (var i = 1u; i <= rolled(BEST, step.n_rows); i++) {
    var best = AFTER_ALL;
    for (var c = li; c < TILES * BEST; c += WG_SIZE) {
      let tile = row * TILES + c / BEST;
      best = better_after(last, best, tile_bests[tile * (1u + BEST) + 1u + c % BEST]);
    }
    last = best_of_workgroup(li, best);
    if (li == 0u) { logprobs[at + i] = vec2<u32>(last.y, logprob(row, last.y, stats)); }
  }
}
