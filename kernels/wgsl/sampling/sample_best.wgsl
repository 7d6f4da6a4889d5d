// tile_bests[row][tile] = (max logit, sum of exp(logit - max)) of a tile of tokens, then its BEST largest logits,
// as (order, token): what sample_logprobs.wgsl joins. The logits are the model's, before bias and penalties.
// @param TILES u32      tiles of a row
// @param VOCAB u32
// @param STRIDE u32     logits of a row: VOCAB rounded up to 8
// @param BEST u32
#include "sampling.wgsl"
#include "sample_reduce.wgsl"
#include "sample_ranked.wgsl"

@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> logits: array<vec4<f32>>;       // [row][STRIDE / 4]
@group(0) @binding(2) var<storage, read_write> tile_bests: array<vec2<u32>>;  // [row][TILES][1 + BEST]

@compute @workgroup_size(WG_SIZE)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  if (id.y >= n_sampled_rows()) { return; }
  let first = id.x * TILE + 4u * li;
  var own4 = vec4<f32>(LOWEST);
  var keys = vec4<u32>(0u);  // below that of any logit
  if (first < VOCAB) {
    let x = logits[(id.y * STRIDE + first) / 4u];
#for c in 0..4
    if (first + $cu < VOCAB) {
      own4[$c] = max(x[$c], LOWEST);
      keys[$c] = order(x[$c]);
    }
#endfor
  }
  let top = max(max(own4.x, own4.y), max(own4.z, own4.w));
  let own = vec2<f32>(top, dot(exp(own4 - top), vec4<f32>(1.0)));
  let all = stats_of_workgroup(li, own);
  let at = (id.y * TILES + id.x) * (1u + BEST);
  if (li == 0u) { tile_bests[at] = bitcast<vec2<u32>>(all); }

  var last = BEFORE_ALL;
  for (var i = 1u; i <= rolled(BEST, step.n_rows); i++) {
    var best = AFTER_ALL;
#for c in 0..4
    best = better_after(last, best, vec2<u32>(keys[$c], first + $cu));
#endfor
    last = best_of_workgroup(li, best);
    if (li == 0u) { tile_bests[at + i] = last; }
  }
}
