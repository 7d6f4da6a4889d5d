// In the body of a scan: S of a head from the state [HEADS][KEY_DIM][VALUE_DIM], or zeros where a sequence
// begins. An invocation has rows 4 (part + j SPLIT) to 4 (part + j SPLIT) + 3, for each j, as s<j>.
  let origin = (head * $(KEY_DIM)u + 4u * part) * VALUE_DIM + min(column, VALUE_DIM - TILE);
#for j in 0..KEY_DIM / (4 * SPLIT)
  var s$j = Fragment();
#endfor
  if (step.rows[0].position > 0u) {
#for j in 0..KEY_DIM / (4 * SPLIT)
#for i in 0..4
    s$j[$i] = state[(origin + ($ju * 4u * SPLIT + $iu) * VALUE_DIM) / TILE];
#endfor
#endfor
  }
