// tile_bests[row][tile] = the statistics of a tile of logits, and its best: the first kernel of log probabilities.
#include "sampling.wgsl"
#include "sample_ranked.wgsl"

@group(0) @binding(2) var<storage, read_write> tile_bests: array<TileBest>;  // [row][TILES]

@compute @workgroup_size(WG_SIZE)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  if (id.y >= n_sampled_rows()) { return; }
  let first = id.x * TILE + 4u * li;
  let x = logits_from(id.y, first);
  let top = max(max(x.x, x.y), max(x.z, x.w));
  let stats = stats_of_workgroup(li, vec2<f32>(top, dot(exp(x - top), vec4<f32>(1.0))));
  let best = best_after(li, vec2<u32>(NOTHING, 0u), x, first);
  if (li == 0u) { tile_bests[id.y * TILES + id.x] = TileBest(stats, best); }
}
