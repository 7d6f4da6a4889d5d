// z = scores of the logits (sample_score.wgsl), and stats[row][tile] = (max z, sum of exp(z - max z)) of a
// tile of tokens: the first kernel of filtered sampling.
// @param TILES u32      tiles of a row
// @param CLEAR bool     the histograms, which later kernels fill
#include "sampling.wgsl"
#include "sample_score.wgsl"
#include "sample_histograms.wgsl"
#include "sample_reduce.wgsl"

@group(0) @binding(5) var<storage, read_write> z: array<vec4<f32>>;       // [row][STRIDE / 4]
@group(0) @binding(6) var<storage, read_write> stats: array<vec2<f32>>;   // [row][TILES]
@group(0) @binding(7) var<storage, read_write> histograms: array<u32>;    // [row][ROW_BINS]

@compute @workgroup_size(WG_SIZE)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  if (id.y >= n_sampled_rows()) { return; }
  let source = step_row(id.y);
  let first = id.x * TILE + 4u * li;
  let score4 = scores(id.y, sequence_of(source), first);  // under way while the row is read
  if (step.rows[source].alive == 0u) { return; }

#if CLEAR
  for (var i = id.x * WG_SIZE + li; i < ROW_BINS; i += TILES * WG_SIZE) {
    histograms[id.y * ROW_BINS + i] = 0u;
  }
#endif
  if (first < STRIDE) { z[(id.y * STRIDE + first) / 4u] = score4; }

  let top = max(max(max(score4.x, score4.y), max(score4.z, score4.w)), LOWEST);
  let own = vec2<f32>(top, dot(exp(score4 - top), vec4<f32>(1.0)));
  let all = stats_of_workgroup(li, own);
  if (li == 0u) { stats[id.y * TILES + id.x] = all; }
}
