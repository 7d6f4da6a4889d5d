// y = sum of 2^(most_s - most) o_s / sum of 2^(most_s - most) sum_s over the splits s of a row's context, where
// most is the largest most_s: what attention.wgsl has left of each row and head (attention_split.wgsl),
// joined. y is [rows][N_HEADS][HEAD_DIM]; QUANTIZE: it goes out as int8.
//
// One chain of loads: the first AT_ONCE splits are read, with what is left there from other steps,
// while the row's position is, which says how many there are.
// SINKS: a logit of each head that takes part in softmax, with no value (Xiao et al. 2023; gpt-oss).
// GATED: every value of the result is multiplied by the sigmoid of a gate of its own.
#include "step.wgsl"
#include "attention_range.wgsl"
#include "attention_split.wgsl"
#include "quantize_block.wgsl"
// @param WG u32
// @param N_HEADS u32
// @param AT_ONCE u32             splits whose loads are in flight together: divides STORED_SPLITS
// @param Y_STRIDE u32
// @param X_SCALES halves|blocks|rows
// @param SCALE_ROWS u32
// @param SINKS bool
// @param GATED bool
// @param GATE_STRIDE u32
// @param GATE_OFFSET u32
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;  // see attention_split.wgsl
#if QUANTIZE
@group(0) @binding(2) var<storage, read_write> x_int8: array<u32>;
@group(0) @binding(3) var<storage, read_write> x_int8_scales: array<Int8Scale>;

var<workgroup> magnitudes: array<u32, WG>;
#else
@group(0) @binding(2) var<storage, read_write> y: array<vec4<f32>>;
#endif
#if SINKS
@group(0) @binding($(3 + QUANTIZE)) var<storage, read> sinks: array<f32>;
#endif
#if GATED
@group(0) @binding($(3 + QUANTIZE + SINKS)) var<storage, read> gates: array<vec4<f32>>;
#endif

const VALUES = N_HEADS * (HEAD_DIM / 4u);  // of a row, as vec4<f32>
const LOWEST = -3.0e38;
const LOG2_E = 1.44269504;

// grid (vec4s of a row / WG, 1, rows)
@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let i = min(id.x * WG + tid, VALUES - 1u);
  let first = stored_head(id.z, N_HEADS, i / (HEAD_DIM / 4u));
  let d = i % (HEAD_DIM / 4u);
#for j in 0..AT_ONCE / 2
  var weights$j = x[first + $ju];
#endfor
#for j in 0..AT_ONCE
  var x$j = x[stored_output(first, $ju) + d];
#endfor
#if GATED
  let gate = gates[(id.z * GATE_STRIDE + GATE_OFFSET) / 4u + i];
#endif
  let position = step.rows[id.z].position;
  let positions = position + 1u - first_position(position);
  let length = split_length(positions);
  let n_splits = (positions + length - 1u) / length;
#if SINKS
  var most = LOG2_E * sinks[i / (HEAD_DIM / 4u)];
  var total = 1.0;
#else
  var most = LOWEST;
  var total = 0.0;
#endif
  var sum = vec4<f32>();
  for (var base = 0u; base < n_splits; base += AT_ONCE) {
#if STORED_SPLITS > AT_ONCE
    if (base > 0u) {
#for j in 0..AT_ONCE / 2
      weights$j = x[first + base / 2u + $ju];
#endfor
#for j in 0..AT_ONCE
      x$j = x[stored_output(first, base + $ju) + d];
#endfor
    }
#endif
    let before = most;
#for j in 0..AT_ONCE
    let most$j = select(LOWEST, weights$($j / 2)[$($j % 2 * 2)], base + $ju < n_splits);
    most = max(most, most$j);
#endfor
    let rescale = exp2(before - most);
    total *= rescale;
    sum *= rescale;
#for j in 0..AT_ONCE
    let factor$j = exp2(most$j - most);
    if (base + $ju < n_splits) {  // not what was left there
      total += factor$j * weights$($j / 2)[$($j % 2 * 2 + 1)];
      sum += factor$j * x$j;
    }
#endfor
  }
#if GATED
  let value = sum / total / (1.0 + exp(-gate));
#else
  let value = sum / total;
#endif
#if QUANTIZE
  magnitudes[tid] = magnitude(value);
  workgroupBarrier();
  var most_of_all = 0u;
#for j in 0..SHARERS
  most_of_all = max(most_of_all, magnitudes[tid / $(SHARERS)u * $(SHARERS)u + $ju]);
#endfor
  if (id.x * WG + tid < VALUES) {
    store_int8(id.z, VALUES / 8u, i / 4u, i % 4u, value, most_of_all, 0.0);
  }
#else
  y[id.z * (Y_STRIDE / 4u) + i] = value;
#endif
}
