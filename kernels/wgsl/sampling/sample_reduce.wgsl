// Reductions over a workgroup's invocations: the best candidate, or the statistics of scores.
#include "rolled.wgsl"

// 256 values are combined as 16 groups of 16, with two barriers where a tree needs eight. Every use
// writes pairs, waits, reads pairs and writes groups, waits, and reads groups, so that uses can follow
// each other without a barrier between them.
var<workgroup> pairs: array<vec2<u32>, WG_SIZE>;
var<workgroup> groups: array<vec2<u32>, 16>;

// Returns the better (order of the score, token): that of the larger score; of equal ones, of the lower token.
fn better(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  return select(a, b, b.x > a.x || (b.x == a.x && b.y < a.y));
}

fn best_of_workgroup(li: u32, own: vec2<u32>) -> vec2<u32> {
  pairs[li] = own;
  workgroupBarrier();
  let group = li & ~15u;
  var best = own;
  for (var i = 0u; i < rolled(16u, step.n_rows); i++) {
    best = better(best, pairs[group + i]);
  }
  if (li == group) { groups[group / 16u] = best; }
  workgroupBarrier();
  for (var i = 0u; i < rolled(16u, step.n_rows); i++) {
    best = better(best, groups[i]);
  }
  return best;
}

// (maximum, sum of exp(score - maximum)) of two sets of scores together.
fn join_stats(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> {
  let top = max(a.x, b.x);
  return vec2<f32>(top, a.y * exp(a.x - top) + b.y * exp(b.x - top));
}

fn stats_of_workgroup(li: u32, own: vec2<f32>) -> vec2<f32> {
  pairs[li] = bitcast<vec2<u32>>(own);
  workgroupBarrier();
  let group = li & ~15u;
  var all = vec2<f32>(LOWEST, 0.0);
  for (var i = 0u; i < rolled(16u, step.n_rows); i++) {
    all = join_stats(all, bitcast<vec2<f32>>(pairs[group + i]));
  }
  if (li == group) { groups[group / 16u] = bitcast<vec2<u32>>(all); }
  workgroupBarrier();
  all = vec2<f32>(LOWEST, 0.0);
  for (var i = 0u; i < rolled(16u, step.n_rows); i++) {
    all = join_stats(all, bitcast<vec2<f32>>(groups[i]));
  }
  return all;
}
