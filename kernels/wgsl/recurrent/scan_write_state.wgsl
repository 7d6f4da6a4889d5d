// In the body of a scan: what scan_read_state.wgsl has read goes back.
  if (column < VALUE_DIM) {
#for j in 0..KEY_DIM / (4 * SPLIT)
#for i in 0..4
    state[(origin + ($ju * 4u * SPLIT + $iu) * VALUE_DIM) / TILE] = s$j[$i];
#endfor
#endfor
  }
