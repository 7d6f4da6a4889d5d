// The outputs of a workgroup as int8 (quantize_block.wgsl): 4 * FOURS of them, whole halves of blocks.
// Needs `const FOURS`.
#include "quantize_block.wgsl"
#if QUANTIZE

var<workgroup> outputs: array<vec4<f32>, FOURS>;  // and what is quantised of them:
var<workgroup> scaled_outputs: array<vec4<f32>, FOURS>;

// Outputs 4 * i to 4 * i + 3, of which the first lies in half `first` of a row of so many blocks.
fn store_outputs(i: u32, row: u32, blocks: u32, first: u32) {
  let half = i / 4u;
  var most = 0u;
  var squares = 0.0;
#for j in 0..4
  most = max(most, magnitude(scaled_outputs[4u * half + $ju]));
  squares += dot(outputs[4u * half + $ju], outputs[4u * half + $ju]);
#endfor
  let at = half_at(row, blocks, first + half);
  store_int8(at, i % 4u, scaled_outputs[i], most);
  if (i % 4u == 0u) {
    store_scale(at, most, squares);
  }
}
#endif
