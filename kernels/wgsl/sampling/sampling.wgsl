// Code that all sampling kernels share: how a sequence is sampled, which rows are, and the order of scores.
// kernels/state/step.py is the host side of Sampling; kernels/state/sampler.py says how the kernels play together.
// @param GATHER bool    logits row i is step row step.logits_rows[i] (prefill), or step row i (decode)
// @param SEQUENCES u32  with one, nothing has to wait for a row to say which it is
#include "step.wgsl"

struct Sampling {
  temperature: f32,  // 0: greedy
  top_p: f32,        // 1: off
  min_p: f32,        // 0: off
  repetition_penalty: f32,
  presence_penalty: f32,
  frequency_penalty: f32,
  top_k: u32,        // 0: off
  seed_low: u32,
  seed_high: u32,
  max_position: u32, // no row from here on is computed
  min_position: u32, // no row before this one samples a stop id
  n_stop_ids: u32,
  masked: u32,       // 0: any token may come next
  stop_ids: array<u32, 51>,
}

struct Samplings {
  records: array<Sampling, SEQUENCES>,
  masks: array<u32>,  // [sequence, or with drafts row][MASK_WORDS]: bit t % 32 of word t / 32: whether token t is possible
}

const WG_SIZE: u32 = 256;
const TILE: u32 = 1024;  // tokens of a workgroup: four for each invocation
const LOWEST: f32 = -0x1.fffffep+127f;  // the score of what is no token: none wins with it
const NOTHING: u32 = 0xffffffff;

// Larger for larger x; 0.0 and -0.0 are equal; NaN of either sign is NOTHING, above all.
fn order(x: f32) -> u32 {
  let bits = bitcast<u32>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) { return NOTHING; }
  if (bits == 0x80000000u) { return 0x80000000u; }
  return select(bits | 0x80000000u, ~bits, (bits >> 31u) == 1u);
}

fn n_sampled_rows() -> u32 {
#if GATHER
  return min(step.n_logits, 8u);
#else
  return step.n_rows;
#endif
}

fn sequence_of(row: u32) -> u32 {
#if SEQUENCES == 1
  return 0u;
#else
  return step.rows[row].sequence;
#endif
}

fn step_row(i: u32) -> u32 {
#if GATHER
  return step.logits_rows[i];
#else
  return i;
#endif
}
