// The first lines of the body of kernels of many rows. They define `first_row` and `last_row` of the workgroup's
// tile, which has up to ROWS rows of one sequence. They need id, size (the workgroups) and the binding `step`.
// @param PROMPTS u32             sequences whose rows follow each other, at most
  // The last rows attend to the most positions: they start first.
#if PROMPTS == 1
  let first_row = (size.y - 1u - id.y) * ROWS;
  let last_row = min(first_row + ROWS, step.n_rows) - 1u;
#else
  var before = 0u;  // tiles of the sequences so far
  var begin_row = 0u;
  var end_row = 0u;
  var tiles = 0u;
  for (var i = 0u; i < PROMPTS && before + tiles <= id.y; i++) {
    before += tiles;
    begin_row = end_row;
    end_row = step.ends[i];
    tiles = (end_row - begin_row + ROWS - 1u) / ROWS;
  }
  if (before + tiles <= id.y) {
    return;
  }
  let first_row = begin_row + (before + tiles - 1u - id.y) * ROWS;
  let last_row = min(first_row + ROWS, end_row) - 1u;
#endif
