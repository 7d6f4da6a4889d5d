// Rotary position embedding of one head in workgroup memory: pairs of dimensions turn by
// position * frequency. The pair of dimension i is i + ROTARY_DIM / 2 (half-split) or its neighbour
// (INTERLEAVED); dimensions from ROTARY_DIM on stay. Needs the binding
// `table: array<vec2<f32>>`, [position][ROTARY_DIM / 2] of (cos, sin).
// @param HEAD_DIM u32
// @param ROTARY_DIM u32
// @param INTERLEAVED bool
var<workgroup> head: array<f32, HEAD_DIM>;

fn rotated(d: u32, position: u32) -> f32 {
  if (d >= ROTARY_DIM) {
    return head[d];
  }
#if INTERLEAVED
  let turn = table[position * (ROTARY_DIM / 2u) + d / 2u];
  let other = select(head[d ^ 1u], -head[d ^ 1u], d % 2u == 0u);
#else
  let half = ROTARY_DIM / 2u;
  let turn = table[position * half + d % half];
  var other = head[(d + half) % ROTARY_DIM];
  if (d < half) {
    other = -other;
  }
#endif
  return head[d] * turn.x + other * turn.y;
}
