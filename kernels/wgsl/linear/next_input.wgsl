// Outputs of a kernel that makes y for the projection behind it: y itself (KEEP); y times the weights of
// that projection's norm (NEXT_NORM); or that, or y, as int8 (QUANTIZE), of which the outputs of a workgroup,
// 4 * FOURS, are whole halves of blocks. KEEP and NEXT_NORM are parameters or #let, FOURS is a const, and
// `#let OUTPUT` is the first of the bindings.
#let X_SCALES = halves
#include "quantize_block.wgsl"
#if KEEP
@group(0) @binding($(OUTPUT)) var<storage, read_write> y: array<f32>;
#endif
#if QUANTIZE
@group(0) @binding($(OUTPUT + KEEP)) var<storage, read_write> x_int8: array<u32>;
@group(0) @binding($(OUTPUT + KEEP + 1)) var<storage, read_write> x_int8_scales: array<Int8Scale>;
#elif NEXT_NORM
@group(0) @binding($(OUTPUT + KEEP)) var<storage, read_write> next_x: array<f32>;
#endif
#if NEXT_NORM
@group(0) @binding($(OUTPUT + KEEP + 1 + QUANTIZE)) var<storage, read> next_norm: array<f32>;
#endif

// Value i of the workgroup's, which lies at `at` of y, and the weight of the next norm.
fn store_output(i: u32, at: u32, value: f32, norm: f32) {
#if KEEP
  y[at] = value;
#endif
#if QUANTIZE
  outputs[i] = value;
#if NEXT_NORM
  scaled_outputs[i] = value * norm;
#endif
#elif NEXT_NORM
  next_x[at] = value * norm;
#endif
}
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

// After a barrier: outputs 4 * i to 4 * i + 3, of which the first lies in half `first` of a row of so many
// blocks, as int8.
fn quantize_outputs(i: u32, row: u32, blocks: u32, first: u32) {
  let half = i / 4u;
  var most = 0u;
  var squares = 0.0;
#for j in 0..4
  let four$j = four_outputs(4u * half + $ju);
  most = max(most, magnitude(four_scaled(4u * half + $ju)));
  squares += dot(four$j, four$j);
#endfor
  store_int8(row, blocks, first + half, i % 4u, four_scaled(i), most, squares);
}
#endif
