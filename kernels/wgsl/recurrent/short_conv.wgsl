// y[t] = activate(sum of weight[j] x[t - TAPS + 1 + j] + bias) for each channel, j from 0 to TAPS - 1: a causal
// convolution of x [rows][CHANNELS]. With GATED, a row of x is gate, output gate and input side by side
// (LFM2: B, C, x): what is convolved is gate * input, and the result is multiplied by the output gate.
// Inputs before the first row come from the state, which then holds the last ones.
// BATCH: each row is of a sequence of its own; with RECENT it may be one of several.
#include "step.wgsl"
#include "recent.wgsl"
#include "activate.wgsl"
// @param CHANNELS u32
// @param TAPS u32
// @param ROWS u32      of a workgroup; at least TAPS, or with BATCH one
// @param BATCH bool
// @param GATED bool
// @param BIAS bool
// @param X_STRIDE u32
// @param X_OFFSET u32
// @param Y_STRIDE u32
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> weight: array<f32>;              // [CHANNELS][TAPS]
@group(0) @binding(3) var<storage, read_write> state: array<f32>;         // [sequence][TAPS - 1][CHANNELS]
@group(0) @binding(4) var<storage, read_write> y: array<f32>;
#if BIAS
@group(0) @binding(5) var<storage, read> bias: array<f32>;
#endif
#if RECENT
@group(0) @binding($(5 + BIAS)) var<storage, read_write> recent: array<f32>;  // [sequence][RECENT][CHANNELS]
#endif

fn input(row: u32, channel: u32) -> f32 {
  let i = row * X_STRIDE + X_OFFSET + channel;
#if GATED
  return x[i] * x[i + 2u * CHANNELS];
#else
  return x[i];
#endif
}

// grid (CHANNELS / 64, rows / ROWS)
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let channel = id.x;
  let n_rows = step.n_rows;
  let first = id.y * ROWS;
#if BATCH
  let own = step.rows[first];
  let is_first = true;
#else
  let own = step.rows[0];
  // Only the first workgroup of a channel touches the state: it has read it before it writes.
  let is_first = id.y == 0u;
#endif
  if (channel >= CHANNELS || own.alive == 0u) {
    return;
  }
#if RECENT
  let count = rows_from(first);
  if (count == 0u) {
    return;
  }
  let end = first + count;
#else
  let end = min(first + ROWS, n_rows);
#endif
  let starts = own.position == 0u;
  let from_state = own.sequence * $(TAPS - 1)u * CHANNELS + channel;
#for j in 0..TAPS - 1
  var before$j = 0.0;
  if (!is_first) {
    before$j = input(first - TAPS + $($j + 1)u, channel);
  } else if (!starts) {
    before$j = state[from_state + $ju * CHANNELS];
  }
#endfor
#if RECENT
  let from_recent = own.sequence * RECENT * CHANNELS + channel;
  for (var i = own.position - (own.behind & ~DRAFTED); i < own.position; i++) {
#for j in 0..TAPS - 2
    before$j = before$($j + 1);
#endfor
    before$(TAPS - 2) = recent[from_recent + i % RECENT * CHANNELS];
  }
#endif
  for (var row = first; row < end; row++) {
    let now = input(row, channel);
#if BIAS
    var sum = bias[channel];
#else
    var sum = 0.0;
#endif
#for j in 0..TAPS - 1
    sum += weight[channel * TAPS + $ju] * before$j;
#endfor
    sum += weight[channel * TAPS + TAPS - 1u] * now;
#if ACTIVATION != none
    sum = activate(sum);
#endif
#if GATED
    sum *= x[row * X_STRIDE + X_OFFSET + CHANNELS + channel];
#endif
    y[row * Y_STRIDE + channel] = sum;
#for j in 0..TAPS - 2
    before$j = before$($j + 1);
#endfor
    before$(TAPS - 2) = now;
#if RECENT
    if (row == first && (own.behind & DRAFTED) == 0u) {
#for j in 0..TAPS - 1
      state[from_state + $ju * CHANNELS] = before$j;
#endfor
    } else {
      recent[from_recent + (own.position + row - first) % RECENT * CHANNELS] = now;
    }
#endif
  }
#if not RECENT
  if (is_first) {
#for j in 0..TAPS - 1
#if not BATCH
    if (n_rows > ROWS) {
      before$j = input(n_rows - TAPS + $($j + 1)u, channel);
    }
#endif
    state[from_state + $ju * CHANNELS] = before$j;
#endfor
  }
#endif
}
