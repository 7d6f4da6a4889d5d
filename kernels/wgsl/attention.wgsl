// Attention of a few rows (decode): one split of the context for HEADS query heads that share a KV
// head, so that every key and value is read once for all of them. attention_combine joins the splits
// (Flash-Decoding, Dao et al. 2023).
//
// CLUSTER neighbouring lanes of a subgroup share a position. Each cluster goes through its own
// positions with an online softmax, without a barrier; the clusters are merged at the end.
#include "step.wgsl"
#include "kv_read_keys.wgsl"
#include "kv_read_values.wgsl"
#include "attention_range.wgsl"
#include "attention_split.wgsl"
// @param WG u32
// @param CLUSTER u32             lanes per position: a power of two, at most a subgroup
// @param CLUSTER_BITS u32        its logarithm
// @param PER_LANE u32            groups of eight dimensions per lane
// @param BATCH u32               positions that a cluster loads at once
// @param HEADS u32               query heads per workgroup
// @param GROUP u32               query heads per KV head
// @param SCALE f32
// @param Q_STRIDE u32
// @param Q_OFFSET u32
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> pages: array<u32>;
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> keys: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> values: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read_write> y: array<f32>;              // [row][head][split][HEAD_DIM]
@group(0) @binding(6) var<storage, read_write> weights: array<vec2<f32>>;  // (max, sum) of each split

const CLUSTERS = WG / CLUSTER;
const LOWEST = -3.0e38;

var<workgroup> parts: array<array<vec2<f32>, CLUSTERS>, HEADS>;  // (max, sum) of each subgroup
var<workgroup> outputs: array<f32, CLUSTERS * HEAD_DIM>;

// grid (splits, KV heads * GROUP / HEADS, rows)
@compute @workgroup_size(WG)
fn main(
  @builtin(workgroup_id) id: vec3<u32>,
  @builtin(num_workgroups) size: vec3<u32>,
  @builtin(local_invocation_index) tid: u32,
  @builtin(subgroup_id) subgroup: u32,
  @builtin(subgroup_size) subgroup_size: u32,
  @builtin(subgroup_invocation_id) lane: u32,
) {
  let row = step.rows[id.z];
  let kv_head = id.y * HEADS / GROUP;
  let first_head = id.y * HEADS;
  let first = first_position(row.position);
  let length = split_length(row.position + 1u - first);
  let start = first + id.x * length;
  if (start > row.position) {
    return;
  }
  let count = min(length, row.position + 1u - start);
  let cluster = subgroup * (subgroup_size / CLUSTER) + lane / CLUSTER;
  let part = lane % CLUSTER;

  let query = (id.z * Q_STRIDE + Q_OFFSET + first_head * HEAD_DIM) / 4u;
#for h in 0..HEADS
#for e in 0..PER_LANE
  let q$h_$e_low = SCALE * q[query + $hu * HEAD_DIM / 4u + 2u * (part + $eu * CLUSTER)];
  let q$h_$e_high = SCALE * q[query + $hu * HEAD_DIM / 4u + 2u * (part + $eu * CLUSTER) + 1u];
  var o$h_$e_low = vec4<f32>();
  var o$h_$e_high = vec4<f32>();
#endfor
  var most$h = LOWEST;
  var sum$h = 0.0;
#endfor
  for (var base = 0u; base < count; base += CLUSTERS * BATCH) {
#for b in 0..BATCH
    let place$b = base + $bu * CLUSTERS + cluster;
    let kv$b = kv_index(kv_head, kv_slot(row.sequence, start + min(place$b, count - 1u))) + part;
#for e in 0..PER_LANE
    let key$b_$e = load_key(kv$b + $eu * CLUSTER);
#endfor
#endfor
#for b in 0..BATCH
#for e in 0..PER_LANE
    let value$b_$e = load_value(kv$b + $eu * CLUSTER);
#endfor
#endfor
#for b in 0..BATCH
#for h in 0..HEADS
    var score$b_$h = 0.0;
#for e in 0..PER_LANE
    score$b_$h += dot(kv_low(key$b_$e), q$h_$e_low) + dot(kv_high(key$b_$e), q$h_$e_high);
#endfor
#for k in 0..CLUSTER_BITS
    score$b_$h += subgroupShuffleXor(score$b_$h, $(1 << $k)u);
#endfor
    score$b_$h = select(LOWEST, score$b_$h, place$b < count);
#endfor
#endfor
#for h in 0..HEADS
    let before$h = most$h;
#for b in 0..BATCH
    most$h = max(most$h, score$b_$h);
#endfor
    let rescale$h = exp(before$h - most$h);
    sum$h *= rescale$h;
#for e in 0..PER_LANE
    o$h_$e_low *= rescale$h;
    o$h_$e_high *= rescale$h;
#endfor
#for b in 0..BATCH
    let p$b_$h = exp(score$b_$h - most$h);
    sum$h += p$b_$h;
#for e in 0..PER_LANE
    o$h_$e_low += p$b_$h * kv_low(value$b_$e);
    o$h_$e_high += p$b_$h * kv_high(value$b_$e);
#endfor
#endfor
#endfor
  }

  // Merge the clusters of a subgroup. One without a position has the maximum LOWEST: no weight.
  for (var other = CLUSTER; other < subgroup_size; other *= 2u) {
#for h in 0..HEADS
    {
      let joint = max(most$h, subgroupShuffleXor(most$h, other));
      let weight = exp(most$h - joint);
      most$h = joint;
      sum$h *= weight;
      sum$h += subgroupShuffleXor(sum$h, other);
#for e in 0..PER_LANE
      o$h_$e_low *= weight;
      o$h_$e_low += subgroupShuffleXor(o$h_$e_low, other);
      o$h_$e_high *= weight;
      o$h_$e_high += subgroupShuffleXor(o$h_$e_high, other);
#endfor
    }
#endfor
  }

  // Merge the subgroups of the workgroup.
  let n_subgroups = WG / subgroup_size;
  if (lane == 0u) {
#for h in 0..HEADS
    parts[$h][subgroup] = vec2<f32>(most$h, sum$h);
#endfor
  }
  workgroupBarrier();
#for h in 0..HEADS
  {
    var all = LOWEST;
    for (var i = 0u; i < n_subgroups; i++) {
      all = max(all, parts[$h][i].x);
    }
    let weight = exp(most$h - all);
    if (lane < CLUSTER) {
#for e in 0..PER_LANE
      let out$e = subgroup * HEAD_DIM + 8u * (part + $eu * CLUSTER);
#for i in 0..4
      outputs[out$e + $iu] = weight * o$h_$e_low[$i];
      outputs[out$e + 4u + $iu] = weight * o$h_$e_high[$i];
#endfor
#endfor
    }
    workgroupBarrier();
    let stored = (id.z * HEADS * size.y + first_head + $hu) * STORED_SPLITS + id.x;
    for (var d = tid; d < HEAD_DIM; d += WG) {
      var sum = 0.0;
      for (var i = 0u; i < n_subgroups; i++) {
        sum += outputs[i * HEAD_DIM + d];
      }
      y[stored * HEAD_DIM + d] = sum;
    }
    if (tid == WG - 1u - $hu) {
      var sum = 0.0;
      for (var i = 0u; i < n_subgroups; i++) {
        sum += parts[$h][i].y * exp(parts[$h][i].x - all);
      }
      weights[stored] = vec2<f32>(all, sum);
    }
    workgroupBarrier();
  }
#endfor
}
