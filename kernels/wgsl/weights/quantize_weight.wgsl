// Rows of a float weight as blocks of 32 columns with one scale each; tensor.py has the layouts.
//
// q8: scale = the largest magnitude / 127. q4: scale = m / -8 * f, where m is the value of the
// largest magnitude (of two the positive one) and f that of 0.75, 0.775, ..., 1.1 which gives the
// least sum of squared errors. The scale is rounded to f16, then values to multiples of it.
//
// A block with a value that is not finite, or too large for such a scale, is a fault: its scale is
// NaN, and the weight is marked in `faults`.
//
// @param FORMAT q8|q4
#include "grid.wgsl"
#include "weight.wgsl"

struct Rows {
  count: u32,
  columns: u32,
  first: u32,  // where they go in the weight
  index: u32,  // of the weight, in `faults`
}

@group(0) @binding(0) var<storage, read> rows: Rows;
@group(0) @binding(1) var<storage, read> weight: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> blocks: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> scales: array<u32>;
@group(0) @binding(4) var<storage, read_write> faults: array<atomic<u32>>;

#if FORMAT == q4
const LARGEST = 8.0 / 1.1 * 65504.0;  // magnitude whose scale f16 holds
const LEAST_VALUE = vec4<f32>(-8.0);
const MOST_VALUE = vec4<f32>(7.0);
#else
const LARGEST = 127.0 * 65504.0;
const LEAST_VALUE = vec4<f32>(-127.0);
const MOST_VALUE = vec4<f32>(127.0);
#endif

alias Block = array<vec4<f32>, 8>;

fn load_block(row: u32, block: u32) -> Block {
  let groups = (rows.columns + 7u) / 8u;
  var values: Block;
#for i in 0..4
  if (4u * block + $iu < groups) {  // the padding of rows is zero
    let w = load8(row * groups + 4u * block + $iu);
    values[2u * $iu] = low4(w);
    values[2u * $iu + 1u] = high4(w);
  }
#endfor
  return values;
}

fn is_finite(v: vec4<f32>) -> bool {
  return all((bitcast<vec4<u32>>(v) & vec4<u32>(0x7f800000u)) != vec4<u32>(0x7f800000u));
}

fn largest(v: vec4<f32>) -> f32 {
  let m = max(abs(v.xy), abs(v.zw));
  return max(m.x, m.y);
}

// A scale other than zero, rounded to what f16 holds. By hand: a compiler may drop packing that is
// undone at once, and WGSL leaves open which way packing rounds.
fn stored(scale: f32) -> f32 {
  let bits = bitcast<u32>(abs(scale));
  var size = bitcast<f32>((bits + 0xfffu + ((bits >> 13u) & 1u)) & 0xffffe000u);
  if (size < 0x1p-14) {  // subnormal in f16
    size = max(round(abs(scale) * 0x1p24), 1.0) * 0x1p-24;
  }
  return select(size, -size, scale < 0.0);
}

fn rounded(v: vec4<f32>, inverse: f32) -> vec4<f32> {
  return clamp(round(v * inverse), LEAST_VALUE, MOST_VALUE);
}

#if FORMAT == q4
fn best_scale(values: ptr<function, Block>, magnitude: f32) -> f32 {
  var positive = false;
#for i in 0..8
  positive = positive || any((*values)[$i] == vec4<f32>(magnitude));
#endfor
  let full = select(magnitude, -magnitude, positive) / 8.0;
  var best = 0.0;
  var least = 0.0;
  for (var i = 0u; i < 15u; i++) {
    let scale = stored(full * (0.75 + 0.025 * f32(i)));
    let inverse = 1.0 / scale;
    var squares = vec4<f32>();
#for j in 0..8
    {
      let error = (*values)[$j] - scale * rounded((*values)[$j], inverse);
      squares += error * error;
    }
#endfor
    let sum = (squares.x + squares.y) + (squares.z + squares.w);
    if (i == 0u || sum < least) {
      best = scale;
      least = sum;
    }
  }
  return best;
}
#else
fn best_scale(values: ptr<function, Block>, magnitude: f32) -> f32 {
  return stored(magnitude / 127.0);
}
#endif

// Four integers in a byte each.
fn bytes(v: vec4<f32>, inverse: f32) -> u32 {
  return pack4xI8(vec4<i32>(rounded(v, inverse)));
}

// Quantises one block and returns its scale's bits.
fn quantize(row: u32, block: u32) -> u32 {
  var values = load_block(row, block);
  var magnitude = 0.0;
  var finite = true;
#for i in 0..8
  magnitude = max(magnitude, largest(values[$i]));
  finite = finite && is_finite(values[$i]);
#endfor
  if (!finite || magnitude > LARGEST) {
    atomicStore(&faults[rows.index], 1u);
    return 0x7e00u;
  }
  if (magnitude == 0.0) {
    return 0u;  // buffers start as zeros
  }
  let scale = best_scale(&values, magnitude);
  let inverse = 1.0 / scale;
  let n_blocks = (rows.columns + 31u) / 32u;
#for i in 0..8
  let bytes_$i = bytes(values[$i], inverse);
#endfor
#if FORMAT == q4
  let low = vec4<u32>(bytes_0, bytes_1, bytes_2, bytes_3) & vec4<u32>(0x0f0f0f0fu);
  let high = vec4<u32>(bytes_4, bytes_5, bytes_6, bytes_7) & vec4<u32>(0x0f0f0f0fu);
  blocks[(rows.first + row) * n_blocks + block] = low | (high << vec4<u32>(4u));
#else
  let place = (rows.first + row) * 2u * n_blocks + block;
  blocks[place] = vec4<u32>(bytes_0, bytes_1, bytes_2, bytes_3);
  blocks[place + n_blocks] = vec4<u32>(bytes_4, bytes_5, bytes_6, bytes_7);
#endif
  return pack2x16float(vec2<f32>(scale, 0.0));
}

// An invocation for each pair of blocks, whose scales share a word.
@compute @workgroup_size(64)
fn main(
  @builtin(workgroup_id) id: vec3<u32>,
  @builtin(num_workgroups) size: vec3<u32>,
  @builtin(local_invocation_index) lane: u32,
) {
  let n_blocks = (rows.columns + 31u) / 32u;
  let pairs = (n_blocks + 1u) / 2u;
  let index = workgroup_index(id, size) * 64u + lane;
  let row = index / pairs;
  if (row >= rows.count) {
    return;
  }
  let pair = index % pairs;
  var word = quantize(row, 2u * pair);
  if (2u * pair + 1u < n_blocks) {
    word |= quantize(row, 2u * pair + 1u) << 16u;
  }
  scales[(rows.first + row) * ((n_blocks + 7u) / 8u * 4u) + pair] = word;
}
