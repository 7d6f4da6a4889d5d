// Products of 16 int8 by 16, four in a word; with ONES the sum of 16, for weights that have offsets (AFFINE).
#if AFFINE

const ONES = vec4<u32>(0x01010101u);
#endif

fn dot16(a: vec4<u32>, b: vec4<u32>) -> i32 {
  return dot4I8Packed(a.x, b.x) + dot4I8Packed(a.y, b.y)
    + dot4I8Packed(a.z, b.z) + dot4I8Packed(a.w, b.w);
}
