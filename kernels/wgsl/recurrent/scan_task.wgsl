// In the body of a scan: the rows of a workgroup, from `begin` on, and its task, of a `head`, a `rate` and a
// `bias`. It returns where there is nothing to do.
#if RECENT
  let first_row = id.z;
  let begin = 0u;
  let count = rows_from(first_row);
  if (count == 0u) {
    return;
  }
  let behind = step.rows[first_row].behind & ~DRAFTED;
  let last_row = behind + count - 1u;
#elif BATCH
  let first_row = id.z;
  let begin = first_row;
  let last_row = first_row;
#else
  let first_row = 0u;
  let begin = first_row;
  let last_row = step.n_rows - 1u;
#endif
  let own_row = step.rows[first_row];
  if (own_row.alive == 0u) {
    return;
  }
  let sequence = own_row.sequence;
#if RECENT
  let before = own_row.position - behind;
  let left = select(behind, NONE, (own_row.behind & DRAFTED) != 0u);
  let task = Task(
    head, id.x * COLUMNS, last_row, rate, bias, first_row, behind, left, sequence, before);
#else
  let task = Task(head, id.x * COLUMNS, last_row, rate, bias);
#endif
