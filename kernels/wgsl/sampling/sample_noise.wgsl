// Noise that depends on seed, position and token alone, so that a draw repeats in any batch and grid.

// Threefry-2x32 with 20 rounds (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011).
fn threefry(key: vec2<u32>, counter: vec2<u32>) -> vec2<u32> {
  let schedule = array<u32, 3>(key.x, key.y, key.x ^ key.y ^ 0x1bd11bdau);
  var x = counter + key;
#for g in 0..5
#if $g % 2 == 0
  x = threefry_round(x, 13u);
  x = threefry_round(x, 15u);
  x = threefry_round(x, 26u);
  x = threefry_round(x, 6u);
#else
  x = threefry_round(x, 17u);
  x = threefry_round(x, 29u);
  x = threefry_round(x, 16u);
  x = threefry_round(x, 24u);
#endif
  x += vec2<u32>(schedule[($g + 1) % 3], schedule[($g + 2) % 3] + $gu + 1u);
#endfor
  return x;
}

fn threefry_round(x: vec2<u32>, bits: u32) -> vec2<u32> {
  let sum = x.x + x.y;
  return vec2<u32>(sum, ((x.y << bits) | (x.y >> (32u - bits))) ^ sum);
}

// Standard Gumbel noise: the token with the largest score + noise is a draw from softmax(scores).
// It is -log(e) for e = -log(1 - u), u = (bits + 1/2) / 2^32. What wins has a small e, so e needs all
// 32 bits near u = 0, where 1 - u would round: there it is the series of the logarithm.
fn gumbel(seed: vec2<u32>, position: u32, token: u32) -> f32 {
  return gumbel_of(threefry(seed, vec2<u32>(position, token)).x);
}

fn gumbel_of(bits: u32) -> f32 {
  let u = (f32(bits) + 0.5) * 0x1p-32f;
  var e = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25)));
  if (bits >= 0x04000000u) { e = -log((f32(~bits) + 0.5) * 0x1p-32f); }
  return -log(e);
}
