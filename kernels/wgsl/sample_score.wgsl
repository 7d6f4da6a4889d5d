// Logits as the sequence's penalties, bias and temperature leave them, in transformers' order.
// @param VOCAB u32
// @param STRIDE u32      values between two rows of logits: VOCAB rounded up to a multiple of 8
// @param PENALTIES bool
// @param BIAS bool

// The scores of tokens first .. first + 3, and LOWEST for what is beyond the vocabulary.
fn scores(row: u32, sequence: u32, first: u32) -> vec4<f32> {
  var result = vec4<f32>(LOWEST);
  if (first >= VOCAB) { return result; }
  let raw = logits[(row * STRIDE + first) / 4u];
#for c in 0..4
  if (first + $cu < VOCAB) { result[$c] = score(raw[$c], sequence, first + $cu); }
#endfor
  return result;
}

fn score(logit: f32, sequence: u32, token: u32) -> f32 {
  var x = logit;
#if PENALTIES
  let count = counts[sequence * VOCAB + token];
  if (count != 0u) {
    let penalty = sampling[sequence].repetition_penalty;
    x = select(x / penalty, x * penalty, x < 0.0);
    let times = count & 0x7fffffffu;
    if (times > 0u) {
      x -= sampling[sequence].presence_penalty + f32(times) * sampling[sequence].frequency_penalty;
    }
  }
#endif
#if BIAS
  x += biases[sequence * VOCAB + token];
#endif
  let temperature = sampling[sequence].temperature;
  return select(x, x / temperature, temperature > 0.0);
}
