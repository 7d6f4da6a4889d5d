// The rows of a step: the next row of each of its sequences, which sample_commit.wgsl has left, or the host.
#include "step.wgsl"
@group(0) @binding(0) var<storage, read> members: array<u32>;    // how many, then which sequences
@group(0) @binding(1) var<storage, read> sequences: array<Row>;
@group(0) @binding(2) var<storage, read_write> step: Step;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) tid: u32) {
  let n = members[0];
  if (tid == 0u) {
    step.n_rows = n;
  }
  for (var row = tid; row < n; row += 64u) {
    step.rows[row] = sequences[members[1u + row]];
  }
}
