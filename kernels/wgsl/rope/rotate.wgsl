// Rotary position embedding of one head in workgroup memory: pairs of dimensions turn by
// position * frequency (turn.wgsl); dimensions from ROTARY_DIM on stay.
#include "turn.wgsl"
// @param HEAD_DIM u32
var<workgroup> head: array<f32, HEAD_DIM>;

fn rotated(d: u32, position: u32) -> f32 {
  if (d >= ROTARY_DIM) {
    return head[d];
  }
  return turned(d, head[d], head[partner(d)], position);
}
