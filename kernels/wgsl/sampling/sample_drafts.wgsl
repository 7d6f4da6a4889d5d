// Writes the tokens that a draft model has sampled into the rows of the step that verifies them. The first n_logits
// rows are those of its next step, as far as they are to draft more: these compute with tokens that may be wrong.
#include "step.wgsl"
@group(0) @binding(0) var<storage, read_write> step: Step;
@group(0) @binding(1) var<storage, read_write> verified: Step;

// One invocation a row, after sample_commit.wgsl.
@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) i: u32) {
  if (i < step.n_logits) {
    let row = step.rows[i];
    if (row.drafts > 0u && row.place < arrayLength(&verified.rows)) {
      verified.rows[row.place].token = row.token;
    }
    let goes_on = row.alive != 0u && row.drafts > 1u;
    step.rows[i].alive = u32(goes_on);
    step.rows[i].drafts = select(0u, row.drafts - 1u, goes_on);
    step.rows[i].place = row.place + 1u;
    step.rows[i].behind = select(DRAFTED, row.behind + 1u, (row.behind & DRAFTED) != 0u);
  }
  if (i == 0u) { step.n_rows = step.n_logits; }
}
