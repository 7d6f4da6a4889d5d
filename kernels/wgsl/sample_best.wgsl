// The best of a workgroup's candidates (order of the score, token).
var<workgroup> pairs: array<vec2<u32>, WG_SIZE>;

// The larger score; of equal ones the lower token.
fn better(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  return select(a, b, b.x > a.x || (b.x == a.x && b.y < a.y));
}

fn best_of_workgroup(li: u32, own: vec2<u32>) -> vec2<u32> {
  workgroupBarrier();  // others may still read what pairs held
  pairs[li] = own;
  workgroupBarrier();
  for (var half = WG_SIZE / 2u; half > 0u; half /= 2u) {
    if (li < half) { pairs[li] = better(pairs[li], pairs[li + half]); }
    workgroupBarrier();
  }
  return workgroupUniformLoad(&pairs[0]);
}
