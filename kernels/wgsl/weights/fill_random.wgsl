// Fills a weight with random values from a hash of their place, spread evenly around a mean. A value
// is never the mean itself, so never zero where the mean is; padding is zero.
//
// @param DTYPE f32|f16|bf16|bits   how the values are stored; bits: random ones, of any codes

#include "grid.wgsl"

struct Fill {
  rows: u32,       // in this shard
  columns: u32,
  stride: u32,     // values from a row to the next, padding included
  first_row: u32,  // of this shard, in the whole tensor
  seed: u32,
  mean: f32,
  spread: f32,     // the largest distance from the mean
}

@group(0) @binding(0) var<storage, read> params: Fill;
@group(0) @binding(1) var<storage, read_write> weights: array<vec4<u32>>;

// PCG-RXS-M-XS (O'Neill 2014; Jarzynski and Olano 2020, "Hash functions for GPU rendering").
fn pcg(v: u32) -> u32 {
  let state = v * 747796405u + 2891336453u;
  let word = ((state >> ((state >> 28u) + 4u)) ^ state) * 277803737u;
  return (word >> 22u) ^ word;
}

fn value(index: u32) -> f32 {
  let row = index / params.stride;
  let column = index % params.stride;
  if (column >= params.columns || row >= params.rows) {
    return 0.0;
  }
  let place = (params.first_row + row) * params.columns + column;
  let hash = pcg(pcg(place) ^ params.seed);
  // A sign bit, and 23 bits that make a magnitude in (0, 1), exact in f32. The lower bound keeps
  // small weights from becoming zero in f16.
  let magnitude = max((f32(hash >> 9u) + 0.5) / 8388608.0, 0.001);
  return params.mean + params.spread * select(magnitude, -magnitude, (hash & 1u) == 1u);
}

// Word `index` of the buffer.
fn word(index: u32) -> u32 {
#if DTYPE == f32
  return bitcast<u32>(value(index));
#elif DTYPE == bits
  return pcg(pcg(index) ^ params.seed);
#elif DTYPE == f16
  return pack2x16float(vec2<f32>(value(2u * index), value(2u * index + 1u)));
#else
  return bf16(value(2u * index)) | (bf16(value(2u * index + 1u)) << 16u);
#endif
}

#if DTYPE == bf16
// Rounded to nearest, ties to even.
fn bf16(x: f32) -> u32 {
  let bits = bitcast<u32>(x);
  return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}
#endif

@compute @workgroup_size(256)
fn main(
  @builtin(workgroup_id) id: vec3<u32>,
  @builtin(num_workgroups) size: vec3<u32>,
  @builtin(local_invocation_index) lane: u32,
) {
  let index = workgroup_index(id, size) * 256u + lane;
  if (index < arrayLength(&weights)) {
    let first = 4u * index;
    weights[index] = vec4<u32>(word(first), word(first + 1u), word(first + 2u), word(first + 3u));
  }
}
