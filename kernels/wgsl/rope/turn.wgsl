// What rotary position embedding makes of a dimension. The pair of dimension i is i + ROTARY_DIM / 2
// (half-split) or its neighbour (INTERLEAVED). Needs the binding `table: array<vec2<f32>>`,
// [position][ROTARY_DIM / 2] of (cos, sin).
// @param ROTARY_DIM u32
// @param INTERLEAVED bool

// The other dimension of a pair.
fn partner(d: u32) -> u32 {
#if INTERLEAVED
  return d ^ 1u;
#else
  return (d + ROTARY_DIM / 2u) % ROTARY_DIM;
#endif
}

fn turned(d: u32, own: f32, other: f32, position: u32) -> f32 {
#if INTERLEAVED
  let turn = table[position * (ROTARY_DIM / 2u) + d / 2u];
  let is_first = d % 2u == 0u;
#else
  let turn = table[position * (ROTARY_DIM / 2u) + d % (ROTARY_DIM / 2u)];
  let is_first = d < ROTARY_DIM / 2u;
#endif
  return own * turn.x + select(other, -other, is_first) * turn.y;
}
