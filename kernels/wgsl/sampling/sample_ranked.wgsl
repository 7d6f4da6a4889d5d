// One candidate after the other, the best first: pairs of (order of a logit, token), as `better` has them.
const BEFORE_ALL = vec2<u32>(NOTHING, 0u);
const AFTER_ALL = vec2<u32>(0u, NOTHING);

// The better of best and candidate, if the candidate is one and comes after `last`; else best.
fn better_after(last: vec2<u32>, best: vec2<u32>, candidate: vec2<u32>) -> vec2<u32> {
  let after = candidate.x < last.x || (candidate.x == last.x && candidate.y > last.y);
  return select(best, better(best, candidate), after && candidate.x != 0u);
}
