// Finds the tokens that count in a step with drafts: those of rows before which all rows of the sequence have
// sampled the token that the next row was drafted with.
// @param VOCAB u32
// @param STRIDE u32     counts of a sequence: VOCAB rounded up to a multiple of 8
// @param COUNTS bool    counts += these tokens
// @param ACCEPTS bool   the host, which does not know the drafts, gets NO_TOKEN for the others
#include "step.wgsl"
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read_write> sampled: array<u32>;          // [row]
@group(0) @binding(2) var<storage, read_write> counts: array<atomic<u32>>;   // [sequence][STRIDE]

const NO_TOKEN: u32 = 0xffffffff;

// One invocation a row.
@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) row: u32) {
  var right = row < step.n_rows;
  var token = NO_TOKEN;
  if (right) {
    let sequence = step.rows[row].sequence;
    token = sampled[row];
    for (var i = row; i > 0u; i--) {
      if (step.rows[i - 1u].sequence != sequence) { break; }
      right = right && sampled[i - 1u] == step.rows[i].token;
    }
#if COUNTS
    if (right && step.rows[row].alive != 0u && token < VOCAB) { atomicAdd(&counts[sequence * STRIDE + token], 1u); }
#endif
  }
#if ACCEPTS
  storageBarrier();
  workgroupBarrier();
  if (row < step.n_rows && !right) { sampled[row] = NO_TOKEN; }
#endif
}
