// How the integers of a quantised weight become values: scale * integer + offset, with a scale, and
// perhaps an offset, for each group of columns of a row. Needs the binding `scales: array<u32>`.
// @param K u32                   columns of W
// @param GROUP_SIZE u32          columns of a group: 16, or a multiple of 32
// @param SCALES f16|bf16|f32|e8m0|int8   int8: times a unit for 256 columns
// @param OFFSET none|zero|bias   what lies beside a scale: nothing, the zero point, a number to add
// @param SHIFT u32               what was taken from unsigned integers to make them signed
// @param WEIGHT f32|f16|bf16|q8|q6|q5|q4|e4m3|mxfp4|nf4|iq4nl
// INTEGERS: multiplied as int8, with activations in int8. PLANES: int8 numbers that make one of them.
#let WIDE = WEIGHT == q8 or WEIGHT == q6 or WEIGHT == q5
#let INTEGERS = WIDE or WEIGHT == q4 or WEIGHT == mxfp4 or WEIGHT == iq4nl or WEIGHT == nf4
#let PLANES = 1 + (WEIGHT == nf4)
// A row of codes of floats is padded to 16 bytes: so many groups of eight columns.
#if WEIGHT == e4m3
const W_EIGHTS = (K + 15u) / 16u * 2u;
#elif WEIGHT == nf4
const W_EIGHTS = (K + 31u) / 32u * 4u;
#else
const W_EIGHTS = (K + 7u) / 8u;
#endif
#let SCALES_BOUND = not (WEIGHT == f32 or WEIGHT == f16 or WEIGHT == bf16)
#if SCALES_BOUND
#let PAIRS = not OFFSET == none
#let AFFINE = not OFFSET == none or SHIFT != 0
#let BYTES = (2 + 2 * (SCALES == f32) - (SCALES == e8m0)) * (1 + PAIRS)
const GROUPS = (K + GROUP_SIZE - 1u) / GROUP_SIZE;  // of a row
#if SCALES == int8
// For 256 columns: the units of scales and of offsets, f16, then int8 scales, offsets beside them.
#let WORDS = 1 + 64 * (1 + PAIRS) / GROUP_SIZE
#let IN_WORD = 4 - 2 * PAIRS  // groups
const SCALE_WORDS = ((K + 255u) / 256u * $(WORDS)u + 3u) / 4u * 4u;
alias RawScale = vec2<u32>;

fn load_scale(row: u32, group: u32) -> RawScale {
  let at = row * SCALE_WORDS + group / $(256 / GROUP_SIZE)u * $(WORDS)u;
  return vec2<u32>(scales[at], scales[at + 1u + group % $(256 / GROUP_SIZE)u / $(IN_WORD)u]);
}
#else
const SCALE_WORDS = (GROUPS * $(BYTES)u + 15u) / 16u * 4u;
#if BYTES == 8
alias RawScale = vec2<u32>;

fn load_scale(row: u32, group: u32) -> RawScale {
  let at = row * SCALE_WORDS + 2u * group;
  return vec2<u32>(scales[at], scales[at + 1u]);
}
#else
alias RawScale = u32;

fn load_scale(row: u32, group: u32) -> RawScale {
  return scales[row * SCALE_WORDS + group * $(BYTES)u / 4u];
}
#endif
#endif

// (scale, offset)
fn widen_scale(raw: RawScale, group: u32) -> vec2<f32> {
#if SCALES == int8
  let bytes = raw.y >> (group % $(IN_WORD)u * $(32 / IN_WORD)u);
#if PAIRS
  let integers = vec2<i32>(i32(bytes << 24u), i32(bytes << 16u)) >> vec2<u32>(24u);
#else
  let integers = vec2<i32>(i32(bytes << 24u) >> 24u, 0);
#endif
  let pair = unpack2x16float(raw.x) * vec2<f32>(integers);
#elif BYTES == 8
  let pair = bitcast<vec2<f32>>(raw);
#elif SCALES == f32
  let pair = vec2<f32>(bitcast<f32>(raw), 0.0);
#elif SCALES == e8m0
  let pair = vec2<f32>(bitcast<f32>(((raw >> (group % 4u * 8u)) & 255u) << 23u), 0.0);
#else
#if PAIRS
  let both = raw;
#else
  let both = raw >> (group % 2u * 16u);
#endif
#if SCALES == f16
  let pair = unpack2x16float(both);
#else
  let pair = bitcast<vec2<f32>>(vec2<u32>(both << 16u, both & 0xffff0000u));
#endif
#endif
#if OFFSET == zero
  return vec2<f32>(pair.x, pair.x * (f32(SHIFT) - pair.y));
#elif OFFSET == bias
  return vec2<f32>(pair.x, pair.y + f32(SHIFT) * pair.x);
#else
  return vec2<f32>(pair.x, f32(SHIFT) * pair.x);
#endif
}
#endif
