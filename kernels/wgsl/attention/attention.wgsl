// Attention of a few rows over one split of the context:
//
//   o = sum of 2^(score - most) v,  sum = sum of 2^(score - most),  most = max of score
//   score = log2(e) SCALE q k, perhaps capped
//
// for every row and head, over the positions of the split that the row attends to (attention_range.wgsl).
// q is x [rows][heads][HEAD_DIM]; k and v are the cache's [positions][KV heads][HEAD_DIM], GROUP heads to a
// KV head; LATENT: values are the keys, which are loaded once. attention_combine.wgsl joins the splits
// (Flash-Decoding, Dao et al. 2023), of which there may be only one: then y = o / sum (JOINED).
#include "attention_lanes.wgsl"
#include "attention_output.wgsl"
// @param LATENT bool
@group(0) @binding(3) var<storage, read> keys: array<KvWords>;
@group(0) @binding(4) var<storage, read> values: array<KvWords>;

#include "attention_main.wgsl"
#for h in 0..HEADS
#for e in 0..PER_LANE
  let raw$h_$e = load_group(heads, (first_head + $hu) * GROUPS + part + $eu * CLUSTER);
#endfor
#endfor

  let row = step.rows[id.z];
  let first = first_position(row.position);
  let length = split_length(row.position + 1u - first);
  let start = first + id.x * length;
  if (start > row.position) {
    return;
  }
  let count = min(length, row.position + 1u - start);
#include "attention_load.wgsl"
#for e in 0..PER_LANE
#for h in 0..HEADS
  let q$h_$e_low = Q_SCALE * raw$h_$e.low;
  let q$h_$e_high = Q_SCALE * raw$h_$e.high;
#endfor
#endfor
#include "attention_core.wgsl"
}
