// logprobs[row] = (token, log probability) of the row's sampled token, then of the BEST most probable ones,
// the best first, of equal ones the lowest id; (NOTHING, ..) where the vocabulary has no more.
// @param BEST u32
#include "sampling.wgsl"
#include "sample_ranked.wgsl"

@group(0) @binding(2) var<storage, read_write> tile_bests: array<TileBest>;  // [row][TILES]
@group(0) @binding(3) var<storage, read> sampled: array<u32>;                // [row]
@group(0) @binding(4) var<storage, read_write> logprobs: array<vec2<u32>>;   // [row][1 + BEST]

// The bits of the log probability of a token. stats: those of its row.
fn logprob(row: u32, token: u32, stats: vec2<f32>) -> u32 {
  let i = row * STRIDE + min(token, VOCAB - 1u);
  let x = logits[i / 4u][i % 4u];
  let possible = order(x) > order(LOWEST);
  return select(0xff800000u, bitcast<u32>((x - stats.x) - log(stats.y)), possible);  // else -inf
}

@compute @workgroup_size(WG_SIZE)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  if (id.y >= n_sampled_rows()) { return; }
  let row = id.y;
  var stats = vec2<f32>(LOWEST, 0.0);
  for (var tile = li; tile < TILES; tile += WG_SIZE) {
    stats = join_stats(stats, tile_bests[row * TILES + tile].stats);
  }
  stats = stats_of_workgroup(li, stats);
  let at = row * (1u + BEST);
  if (li == 0u) { logprobs[at] = vec2<u32>(sampled[row], logprob(row, sampled[row], stats)); }

  for (var i = 1u; i <= rolled(BEST, step.n_rows); i++) {
    var best = vec2<u32>(0u, NOTHING);
    for (var tile = li; tile < TILES; tile += WG_SIZE) {
      best = better(best, tile_bests[row * TILES + tile].next);
    }
    best = best_of_workgroup(li, best);
    if (li == 0u) { logprobs[at + i] = vec2<u32>(best.y, logprob(row, best.y, stats)); }
    // Only this invocation reads and writes what is known of its tiles.
    let tile = best.y / TILE;
    let first = tile * TILE + 4u * li;
    let next = best_after(li, best, logits_from(row, first), first);
    if (tile < TILES && tile % WG_SIZE == li) { tile_bests[row * TILES + tile].next = next; }
  }
}
