// Softmax and the sum of values of one split, in the body of attention.wgsl and attention_decode.wgsl. For
// every position from `start` on, of which there are `count`, and for every head:
//
//   score = q k;  most' = max(most, score);  rescale = 2^(most - most');  weight = 2^(score - most')
//   sum' = rescale sum + weight;  o' = rescale o + weight v
//
// (online softmax: Milakov & Gimelshein 2018; q has the factor log2(e)). Each cluster of lanes does so for
// its own positions. Then they are merged, at first those of a subgroup, then the subgroups:
//
//   joint = max of most;  share = 2^(most - joint);  sum = sum of share sum;  o = sum of share o
//
// Takes queries in names such as q0_1_low (head 0, its group 1 of eight dimensions), and what
// attention_load.wgsl has begun: most, sum, o, and the first keys and values.
  for (var base = 0u; base < count; base += CLUSTERS * BATCH) {
    // The next keys and values are on their way while these are used.
    let next = base + CLUSTERS * BATCH;
#for b in 0..BATCH
#for e in 0..PER_LANE
    var next_key$b_$e = Kv8();
    var next_value$b_$e = Kv8();
#endfor
#endfor
    if (next < count) {
#for b in 0..BATCH
      let next_place$b = min(next + $bu * CLUSTERS + cluster, count - 1u);
      let next_kv$b = kv_index(kv_head, kv_slot(row.sequence, start + next_place$b)) + part;
#for e in 0..PER_LANE
      next_key$b_$e = load_key(next_kv$b + $eu * CLUSTER);
#if LATENT
      next_value$b_$e = next_key$b_$e;
#else
      next_value$b_$e = load_value(next_kv$b + $eu * CLUSTER);
#endif
#endfor
#endfor
    }

    // Scores: a lane's part of all of them, then its KEPT whole ones.
#for h in 0..HEADS
#for b in 0..BATCH
    var score$($h * BATCH + $b) = 0.0;
#for e in 0..PER_LANE
    score$($h * BATCH + $b) += dot(kv_low(key$b_$e), q$h_$e_low);
    score$($h * BATCH + $b) += dot(kv_high(key$b_$e), q$h_$e_high);
#endfor
#endfor
#endfor
#for i in HEADS * BATCH..SCORES
    var score$i = 0.0;
#endfor
#for k in 0..FOLDS
    let upper$k = (part & (CLUSTER / $(2 << $k)u)) != 0u;
#for i in 0..SCORES / (2 << $k)
#for j in $i + SCORES / (2 << $k)..$i + SCORES / (2 << $k) + 1
    score$i = select(score$i, score$j, upper$k)
      + subgroupShuffleXor(select(score$j, score$i, upper$k), CLUSTER / $(2 << $k)u);
#endfor
#endfor
#endfor
#for k in FOLDS..CLUSTER_BITS
    score0 += subgroupShuffleXor(score0, CLUSTER / $(2 << $k)u);
#endfor

    // Online softmax, in base two.
#for m in 0..KEPT_HEADS
    let before$m = most$m;
#for i in $m * KEPT / KEPT_HEADS..($m + 1) * KEPT / KEPT_HEADS
    let place_of$i = base + (mine + $iu) % BATCH * CLUSTERS + cluster;
#if SOFTCAP > 0
    score$i = LOG2_E * capped(score$i);
#endif
    score$i = select(LOWEST, score$i, place_of$i < count);
    most$m = max(most$m, score$i);
#endfor
#for k in 0..HEAD_BITS
    most$m = max(most$m, subgroupShuffleXor(most$m, COPIES * $(1 << $k)u));
#endfor
    let rescale$m = exp2(before$m - most$m);
    sum$m *= rescale$m;
#for i in $m * KEPT / KEPT_HEADS..($m + 1) * KEPT / KEPT_HEADS
    let weight$i = exp2(score$i - most$m);
    sum$m += weight$i;
#endfor
#endfor
#for h in 0..HEADS
    let rescale_of$h = subgroupShuffle(
      rescale$($h * BATCH % KEPT / BATCH), lane - part + $($h * BATCH / KEPT)u * COPIES);
#for e in 0..PER_LANE
    o$h_$e_low *= rescale_of$h;
    o$h_$e_high *= rescale_of$h;
#endfor
#for b in 0..BATCH
    let weight_of$h_$b = subgroupShuffle(
      weight$($h * BATCH % KEPT + $b % KEPT),
      lane - part + $($h * BATCH / KEPT + $b / KEPT)u * COPIES);
#for e in 0..PER_LANE
    o$h_$e_low += weight_of$h_$b * kv_low(value$b_$e);
    o$h_$e_high += weight_of$h_$b * kv_high(value$b_$e);
#endfor
#endfor
#endfor
#for b in 0..BATCH
#for e in 0..PER_LANE
    key$b_$e = next_key$b_$e;
    value$b_$e = next_value$b_$e;
#endfor
#endfor
  }

  // Merge the clusters of a subgroup. One without a position has the maximum LOWEST: no weight.
#for m in 0..KEPT_HEADS
#for k in 0..HEAD_BITS
  sum$m += subgroupShuffleXor(sum$m, COPIES * $(1 << $k)u);
#endfor
  var joint$m = most$m;
  for (var other = CLUSTER; other < subgroup_size; other *= 2u) {
    joint$m = max(joint$m, subgroupShuffleXor(joint$m, other));
  }
  let share$m = exp2(most$m - joint$m);
  sum$m *= share$m;
  for (var other = CLUSTER; other < subgroup_size; other *= 2u) {
    sum$m += subgroupShuffleXor(sum$m, other);
  }
  if (lane < CLUSTER && part % COPIES == 0u && mine % BATCH == 0u && mine / BATCH + $mu < HEADS) {
    parts[(mine / BATCH + $mu) * SUBGROUPS + subgroup] = vec2<f32>(joint$m, sum$m);
  }
#endfor
#for h in 0..HEADS
  let share_of$h = subgroupShuffle(
    share$($h * BATCH % KEPT / BATCH), lane - part + $($h * BATCH / KEPT)u * COPIES);
#for e in 0..PER_LANE
  o$h_$e_low *= share_of$h;
  o$h_$e_high *= share_of$h;
#endfor
#endfor
  for (var other = CLUSTER; other < subgroup_size; other *= 2u) {
#for h in 0..HEADS
#for e in 0..PER_LANE
    o$h_$e_low += subgroupShuffleXor(o$h_$e_low, other);
    o$h_$e_high += subgroupShuffleXor(o$h_$e_high, other);
#endfor
#endfor
  }

  // Merge the subgroups of the workgroup.
  let n_subgroups = max(1u, WG / subgroup_size);
#for r in 0..HEADS / MERGED
#if $r > 0
  workgroupBarrier();
#endif
  if (lane < CLUSTER) {
#for h in $r * MERGED..($r + 1) * MERGED
#for e in 0..PER_LANE
    {
      let out = ($($h % MERGED)u * SUBGROUPS + subgroup) * GROUPS + part + $eu * CLUSTER;
      outputs[2u * out] = o$h_$e_low;
      outputs[2u * out + 1u] = o$h_$e_high;
    }
#endfor
#endfor
  }
  workgroupBarrier();
  for (var base = 0u; base < MERGED * GROUPS * 2u; base += WG) {
    let writes = base + tid < MERGED * GROUPS * 2u;
    let i = min(base + tid, MERGED * GROUPS * 2u - 1u);
    let d = i % (GROUPS * 2u);
    let h = i / (GROUPS * 2u);
    let head = first_head + $ru * MERGED + h;
#if SINKS
    let sink = LOG2_E * sinks[head];
    var most = sink;
#else
    var most = LOWEST;
#endif
#for g in 0..SUBGROUPS
    let part$g = parts[($ru * MERGED + h) * SUBGROUPS + $gu];
    let most$g = select(LOWEST, part$g.x, $gu < n_subgroups);
    most = max(most, most$g);
#endfor
#if SINKS
    var sum = exp2(sink - most);
#else
    var sum = 0.0;
#endif
    var o = vec4<f32>();
#for g in 0..SUBGROUPS
    let factor$g = exp2(most$g - most);
    sum += factor$g * part$g.y;
    o += factor$g * outputs[(h * SUBGROUPS + $gu) * GROUPS * 2u + d];
#endfor
    store_output(id.z, HEADS * size.y, head, id.x, d, vec2<f32>(most, sum), o, writes);
  }
#endfor
