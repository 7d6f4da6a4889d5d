// The step buffer: what each row of a step computes. kernels/state/step.py is its host side.
struct Row {
  token: u32,     // the id to embed
  position: u32,  // its place in its sequence, from 0
  sequence: u32,
  adapter: u32,   // its number, from 1 (LoRA); 0: none
  alive: u32,     // 0: stopped: no keys and values are written, nor a state, nor a token; 2: only what rows read
  behind: u32,    // rows of its sequence before it that its states have not taken in, and DRAFTED (recent.wgsl)
  drafts: u32,    // of a draft model: how many tokens it is still to draft
  place: u32,     // the row that takes the next of them, in the step that verifies them
}

struct Step {
  n_rows: u32,
  n_logits: u32,  // how many rows get logits, when not all
  unused_0: u32,
  unused_1: u32,
  unused_2: u32,
  unused_3: u32,
  unused_4: u32,
  unused_5: u32,
  logits_rows: array<u32, 8>,  // which
  ends: array<u32, 8>,  // of prefill: where the rows of a sequence end, and those of the next begin, if any do
  rows: array<Row>,
}

const DRAFTED: u32 = 0x80000000;
