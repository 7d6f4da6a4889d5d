// States where tokens are drafted. A step may then have several rows of a sequence, neighbours, and nobody
// knows yet whether those after the first are right. So the first row's workgroups compute all of them, but
// leave the state as it is after the first, and keep what went into the others. In the sequence's next step
// those that were right, the first row's `behind`, go in before anything else. Inputs lie by their position
// modulo RECENT, at least twice as many as a step has rows of a sequence: none that is read is written.
//
// A draft model makes its drafts one step after the other: where the first row's token is one of them, which its
// `behind` says by DRAFTED beside the number, the state stays as it is, and the row is kept as the others are.
// @param RECENT u32   0: nothing is drafted
#if RECENT

// How many rows of its sequence begin with that one; 0: it is not their first.
fn rows_from(first: u32) -> u32 {
  let sequence = step.rows[first].sequence;
  if (first > 0u && step.rows[first - 1u].sequence == sequence) {
    return 0u;
  }
  var end = first + 1u;
  while (end < step.n_rows && step.rows[end].sequence == sequence && step.rows[end].alive != 0u) {
    end++;
  }
  return end - first;
}
#endif
