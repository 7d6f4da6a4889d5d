// Logits as the sequence's bias, penalties, temperature and mask leave them, in transformers' order.
// @param VOCAB u32
// @param STRIDE u32      values between two rows, or sequences: VOCAB rounded up to 8
// @param PENALTIES bool
// @param BIAS bool
// @param ENDS bool       stop ids are forbidden before min_position
// @param MASK bool
// @param MASK_WORDS u32  a bit for each token of the vocabulary
// @param DRAFTS bool     rows of a sequence follow each other; all but the first have drafted tokens
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> sampling: Samplings;
@group(0) @binding(2) var<storage, read> logits: array<vec4<f32>>;  // [row][STRIDE / 4]
@group(0) @binding(3) var<storage, read> counts: array<vec4<u32>>;  // [sequence][STRIDE / 4]
@group(0) @binding(4) var<storage, read> biases: array<vec4<f32>>;  // [sequence][STRIDE / 4]

// The scores of tokens first .. first + 3, and LOWEST for what is masked or beyond the vocabulary.
fn scores(row: u32, sequence: u32, first: u32) -> vec4<f32> {
  var result = vec4<f32>(LOWEST);
  if (first >= VOCAB) { return result; }
  var x = logits[(row * STRIDE + first) / 4u];
#if BIAS
  x += biases[(sequence * STRIDE + first) / 4u];
#endif
#if ENDS
  x += ends(row, sequence, first);
#endif
#if PENALTIES
#if DRAFTS
  let times = counts[(sequence * STRIDE + first) / 4u] + drafted(row, sequence, first);
#else
  let times = counts[(sequence * STRIDE + first) / 4u];
#endif
#for c in 0..4
  x[$c] = penalized(x[$c], times[$c], sequence);
#endfor
#endif
  let temperature = sampling.records[sequence].temperature;
  if (temperature > 0.0) { x /= temperature; }
#for c in 0..4
  if (first + $cu < VOCAB) { result[$c] = x[$c]; }
#endfor
#if MASK
#if DRAFTS
  let mask = sampling.masks[row * MASK_WORDS + first / 32u] >> (first % 32u);
#else
  let mask = sampling.masks[sequence * MASK_WORDS + first / 32u] >> (first % 32u);
#endif
  let possible = select(0xfu, mask, sampling.records[sequence].masked != 0u);
#for c in 0..4
  if ((possible & (1u << $cu)) == 0u) { result[$c] = LOWEST; }
#endfor
#endif
  return result;
}
#if ENDS

// Returns the values to add to the logits of tokens first .. first + 3: FORBIDDEN of kernels/state/step.py for
// stop ids that come too early, and otherwise zero.
fn ends(row: u32, sequence: u32, first: u32) -> vec4<f32> {
  let tokens = vec4<u32>(first, first + 1u, first + 2u, first + 3u);
  var result = vec4<f32>(0.0);
  if (step.rows[step_row(row)].position < sampling.records[sequence].min_position) {
    for (var i = 0u; i < min(sampling.records[sequence].n_stop_ids, 51u); i++) {
      result = select(result, vec4<f32>(-1e30), tokens == vec4<u32>(sampling.records[sequence].stop_ids[i]));
    }
  }
  return result;
}
#endif
#if PENALTIES
#if DRAFTS

// How often tokens first .. first + 3 were drafted before a row, or for it: they are in no count yet.
fn drafted(row: u32, sequence: u32, first: u32) -> vec4<u32> {
  let tokens = vec4<u32>(first, first + 1u, first + 2u, first + 3u);
  var times = vec4<u32>(0u);
  for (var i = row; i > 0u; i--) {
    if (step.rows[i - 1u].sequence != sequence) { break; }
    times += vec4<u32>(tokens == vec4<u32>(step.rows[i].token));
  }
  return times;
}
#endif

fn penalized(logit: f32, count: u32, sequence: u32) -> f32 {
  var x = logit;
  if (count != 0u) {
    let penalty = sampling.records[sequence].repetition_penalty;
    x = select(x / penalty, x * penalty, x < 0.0);
    let times = count & 0x7fffffffu;
    if (times > 0u) {
      x -= sampling.records[sequence].presence_penalty + f32(times) * sampling.records[sequence].frequency_penalty;
    }
  }
  return x;
}
#endif
