// In the body of a scan: S of a head from the state [sequence][HEADS][KEY_DIM][VALUE_DIM], or zeros where a
// sequence begins. An invocation has rows 4 (part + j SPLIT) to 4 (part + j SPLIT) + 3, for each j, as s<j>.
  let own_head = sequence * HEADS + head;
  let origin = (own_head * $(KEY_DIM)u + 4u * part) * VALUE_DIM + min(column, VALUE_DIM - TILE);
#for j in 0..KEY_DIM / (4 * SPLIT)
  var s$j = Fragment();
#endfor
  if (step.rows[first_row].position > 0u) {
#for j in 0..KEY_DIM / (4 * SPLIT)
#for i in 0..4
    s$j[$i] = state[(origin + ($ju * 4u * SPLIT + $iu) * VALUE_DIM) / TILE];
#endfor
#endfor
  }
