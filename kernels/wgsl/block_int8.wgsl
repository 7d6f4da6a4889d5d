// Blocks of 32 columns in int8: weights q8 or q4 and activations that quantize_block.wgsl wrote, with
// one scale each. A dot product of integers is exact, so only the two scales round.
//
// q8 has two planes in a row, the first and the second half of every block; so have activations.
// q4 has the first half of a block in the low nibbles and the second in the high ones.
// @param K u32                   columns of W
// @param WEIGHT f32|f16|bf16|q8|q4
#if WEIGHT == q8 or WEIGHT == q4
struct Block {
#if WEIGHT == q4
  nibbles: vec4<u32>,
#else
  low: vec4<u32>,
  high: vec4<u32>,
#endif
  scale: f32,
}

struct Activations {
  low: vec4<u32>,
  high: vec4<u32>,
  scale: f32,
  squares: f32,
}

const BLOCKS = (K + 31u) / 32u;  // of a row
const SCALES = (BLOCKS + 7u) / 8u * 4u;  // words of two scales in a row
#if WEIGHT == q4
const UNIT = 0.0625;  // nibbles are multiplied as the upper halves of bytes
#else
const UNIT = 1.0;
#endif

fn load_block(row: u32, i: u32) -> Block {
  let scale = unpack2x16float(scales[row * SCALES + i / 2u] >> (i % 2u * 16u)).x;
#if WEIGHT == q4
  return Block(weight[row * BLOCKS + i], scale);
#else
  return Block(weight[row * 2u * BLOCKS + i], weight[row * 2u * BLOCKS + BLOCKS + i], scale);
#endif
}

// Row m of x; not valid: beyond the last block.
fn load_activations(m: u32, i: u32, valid: bool) -> Activations {
  let first = m * 2u * BLOCKS + i;
  return Activations(
    x[first],
    x[first + BLOCKS],
    select(0.0, x_scales[first], valid),
    select(0.0, x_scales[first + BLOCKS], valid));
}

fn multiply(w: Block, a: Activations) -> f32 {
#if WEIGHT == q4
  let low = (w.nibbles << vec4<u32>(4u)) & vec4<u32>(0xf0f0f0f0u);
  let high = w.nibbles & vec4<u32>(0xf0f0f0f0u);
#else
  let low = w.low;
  let high = w.high;
#endif
  let sum = dot4I8Packed(low.x, a.low.x) + dot4I8Packed(low.y, a.low.y)
    + dot4I8Packed(low.z, a.low.z) + dot4I8Packed(low.w, a.low.w)
    + dot4I8Packed(high.x, a.high.x) + dot4I8Packed(high.y, a.high.y)
    + dot4I8Packed(high.z, a.high.z) + dot4I8Packed(high.w, a.high.w);
  return w.scale * a.scale * f32(sum);
}
#endif
