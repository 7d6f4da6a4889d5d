// The logits of a row as the model gave them, one after the other, the best first.
// @param TILES u32      tiles of a row
// @param VOCAB u32
// @param STRIDE u32     logits of a row: VOCAB rounded up to 8
#include "sample_reduce.wgsl"

@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> logits: array<vec4<f32>>;  // [row][STRIDE / 4]

struct TileBest {
  stats: vec2<f32>,  // (max logit, sum of exp(logit - max))
  next: vec2<u32>,   // (order of a logit, token): the best that has not been taken
}

// Tokens first .. first + 3, and LOWEST for what is beyond the vocabulary, or below.
fn logits_from(row: u32, first: u32) -> vec4<f32> {
  var result = vec4<f32>(LOWEST);
  if (first >= VOCAB) { return result; }
  let x = logits[(row * STRIDE + first) / 4u];
#for c in 0..4
  if (first + $cu < VOCAB) { result[$c] = max(x[$c], LOWEST); }
#endfor
  return result;
}

// The best of a workgroup's tokens that comes after `last`; (0, NOTHING) if there is none.
fn best_after(li: u32, last: vec2<u32>, x: vec4<f32>, first: u32) -> vec2<u32> {
  var best = vec2<u32>(0u, NOTHING);
#for c in 0..4
  {
    let own = vec2<u32>(order(x[$c]), first + $cu);
    let after = own.x < last.x || (own.x == last.x && own.y > last.y);
    best = select(best, better(best, own), after && own.y < VOCAB);
  }
#endfor
  return best_of_workgroup(li, best);
}
