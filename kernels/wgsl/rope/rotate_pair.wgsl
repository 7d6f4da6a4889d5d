// Rotary position embedding (Su et al. 2021) of a pair (x_i, x_j) of the dimensions of a head:
//
//   y_i = cos x_i - sin x_j;  y_j = cos x_j + sin x_i
//
// where j = i + ROTARY_DIM / 2 (half-split) or they are neighbours (INTERLEAVED). Needs the binding
// `table: array<vec2<f32>>`, [position][ROTARY_DIM / 2] of (cos, sin).
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

// y of dimension d, whose x is `own`; that of its partner is `other`.
fn rotate_pair(d: u32, own: f32, other: f32, position: u32) -> f32 {
#if INTERLEAVED
  let rotation = table[position * (ROTARY_DIM / 2u) + d / 2u];
  let is_first = d % 2u == 0u;
#else
  let rotation = table[position * (ROTARY_DIM / 2u) + d % (ROTARY_DIM / 2u)];
  let is_first = d < ROTARY_DIM / 2u;
#endif
  return own * rotation.x + select(other, -other, is_first) * rotation.y;
}
