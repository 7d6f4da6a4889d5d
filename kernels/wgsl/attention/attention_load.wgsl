// Belongs before attention_core.wgsl, in the body of a kernel: loads the first keys and values, which are on
// their way while queries are made, and declares the maximum, the sum and the output, of no position yet.
#for b in 0..BATCH
#for e in 0..PER_LANE
  var key$b_$e = Kv8();
  var value$b_$e = Kv8();
#endfor
#endfor
  if (count > 0u) {
#for b in 0..BATCH
    let place$b = min($bu * CLUSTERS + cluster, count - 1u);
    let kv$b = kv_index(kv_head, kv_slot(row.sequence, start + place$b)) + part;
#for e in 0..PER_LANE
    key$b_$e = load_key(kv$b + $eu * CLUSTER);
#endfor
#endfor
#for b in 0..BATCH
#for e in 0..PER_LANE
#if LATENT
    value$b_$e = key$b_$e;
#else
    value$b_$e = load_value(kv$b + $eu * CLUSTER);
#endif
#endfor
#endfor
  }
  // The heads that the lane has scores of: their maximum, equal in all such lanes, and the sum of the lane's own
  // weights.
#for m in 0..KEPT_HEADS
  var most$m = LOWEST;
  var sum$m = 0.0;
#endfor
  // The lane's dimensions of the output of all heads.
#for h in 0..HEADS
#for e in 0..PER_LANE
  var o$h_$e_low = vec4<f32>();
  var o$h_$e_high = vec4<f32>();
#endfor
#endfor
