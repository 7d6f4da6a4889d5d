// Rotary position embedding of a head of HEAD_DIM values, in workgroup memory: pairs of the first ROTARY_DIM
// dimensions are rotated (rotate_pair.wgsl), the others stay.
#include "rotate_pair.wgsl"
// @param HEAD_DIM u32
var<workgroup> head: array<f32, HEAD_DIM>;

fn rotated(d: u32, position: u32) -> f32 {
  if (d >= ROTARY_DIM) {
    return head[d];
  }
  return rotate_pair(d, head[d], head[partner(d)], position);
}
