// Where the results of a workgroup of attention go: with JOINED the context is a single split, and
//
//   y = o / sum, GATED times the sigmoid of a gate for each value, or that as int8 (QUANTIZE)
//
// Else (max, sum) and o of each head and split go to attention_combine.wgsl, as attention_split.wgsl
// says. SINKS: a logit of each head that takes part in softmax, with no value; only with JOINED, as GATED
// and QUANTIZE are.
#include "quantize_block.wgsl"
// @param X_SCALES halves|blocks|rows
// @param SCALE_ROWS u32
// @param JOINED bool
// @param SINKS bool
// @param GATED bool
// @param GATE_STRIDE u32
// @param GATE_OFFSET u32
// @param Y_STRIDE u32
#if QUANTIZE
@group(0) @binding(5) var<storage, read_write> x_int8: array<u32>;
@group(0) @binding(6) var<storage, read_write> x_int8_scales: array<Int8Scale>;
#elif JOINED
@group(0) @binding(5) var<storage, read_write> y: array<vec4<f32>>;
#else
@group(0) @binding(5) var<storage, read_write> y: array<vec2<f32>>;
#endif
#if SINKS
@group(0) @binding($(6 + QUANTIZE)) var<storage, read> sinks: array<f32>;
#endif
#if GATED
@group(0) @binding($(6 + QUANTIZE + SINKS)) var<storage, read> gates: array<vec4<f32>>;
#endif
#let NEXT = 6 + QUANTIZE + SINKS + GATED  // the first binding that is free

// Dimensions 4 d to 4 d + 3 of o of a head, of which a row has n_heads, and the head's (max, sum) of a
// split. Only those that are to write do, but all invocations take part.
fn store_output(
  row: u32, n_heads: u32, head: u32, split: u32, d: u32, sums: vec2<f32>, o: vec4<f32>, writes: bool
) {
#if JOINED
  let at = head * (HEAD_DIM / 4u) + d;
#if GATED
  let gate = gates[(row * GATE_STRIDE + GATE_OFFSET) / 4u + at];
  let value = o / sums.y / (1.0 + exp(-gate));
#else
  let value = o / sums.y;
#endif
#if QUANTIZE
  var most_of_all = magnitude(value);
#for i in 0..log2(SHARERS)
  most_of_all = max(most_of_all, subgroupShuffleXor(most_of_all, $(1 << $i)u));
#endfor
  if (writes) {
    store_int8(row, n_heads * HEAD_DIM / 32u, at / 4u, at % 4u, value, most_of_all, 0.0);
  }
#else
  if (writes) {
    y[row * (Y_STRIDE / 4u) + at] = value;
  }
#endif
#else
  if (writes) {
    let stored = stored_head(row, n_heads, head);
    let at = stored_output(stored, split) + d;
    y[2u * at] = o.xy;
    y[2u * at + 1u] = o.zw;
    if (d == 0u) {
      y[2u * stored + split] = sums;
    }
  }
#endif
}
