// The outputs of a workgroup as int8 (quantize_block.wgsl): 4 * FOURS of them, whole halves of blocks.
// Needs `const FOURS`, and NEXT_NORM: another value is quantised than that which is squared.
#include "quantize_block.wgsl"
#if QUANTIZE

// Not vectors: each value is another invocation's.
var<workgroup> outputs: array<f32, 4u * FOURS>;
#if NEXT_NORM
var<workgroup> scaled_outputs: array<f32, 4u * FOURS>;  // what is quantised of them
#endif

fn four_outputs(i: u32) -> vec4<f32> {
  return vec4<f32>(outputs[4u * i], outputs[4u * i + 1u], outputs[4u * i + 2u], outputs[4u * i + 3u]);
}

fn four_scaled(i: u32) -> vec4<f32> {
#if NEXT_NORM
  return vec4<f32>(
    scaled_outputs[4u * i], scaled_outputs[4u * i + 1u],
    scaled_outputs[4u * i + 2u], scaled_outputs[4u * i + 3u]);
#else
  return four_outputs(i);
#endif
}

// Outputs 4 * i to 4 * i + 3, of which the first lies in half `first` of a row of so many blocks.
fn store_outputs(i: u32, row: u32, blocks: u32, first: u32) {
  let half = i / 4u;
  var most = 0u;
  var squares = 0.0;
#for j in 0..4
  let four$j = four_outputs(4u * half + $ju);
  most = max(most, magnitude(four_scaled(4u * half + $ju)));
  squares += dot(four$j, four$j);
#endfor
  let at = half_at(row, blocks, first + half);
  store_int8(at, i % 4u, four_scaled(i), most);
  if (i % 4u == 0u) {
    store_scale(at, most, squares);
  }
}
#endif
