// Attention of decode's one row over one split of the context, from its q, k, v projection: what
// rope_kv_write.wgsl and attention.wgsl compute, in one kernel.
//
//   q = rotate(norm(x_q));  k = rotate(norm(x_k));  v = x_v or norm(x_v)
//   norm(x) = x / sqrt(mean(x^2) + EPS) w
//   o, sum and most as in attention.wgsl, over the cache's positions and (k, v)
//
// x is [query, key and value heads][HEAD_DIM]. NORM: heads of q and k are normed, those of v with V_NORM.
// ROTATE_FIRST: norm(rotate(x)). ROW_NORM: norms are of all queries and of all keys, with weights for each
// head; every workgroup sums up the squares of both. ROTARY_DIM 0: no rotation. V_IS_K: x_v is x_k.
//
// OWN: there are k and v. The workgroup of the split that ends with the row's position takes both from
// x and puts them into the cache, where no workgroup may read them yet. Else there are queries alone.
#include "attention_lanes.wgsl"
#include "attention_output.wgsl"
#include "rotate_group.wgsl"
#include "kv_store.wgsl"
#let LATENT = 0
// @param OWN bool
// @param NORM bool
// @param ROW_NORM bool           only with NORM; then neither V_NORM nor ROTATE_FIRST
// @param V_NORM bool             only with NORM and OWN
// @param V_IS_K bool
// @param EPS f32
#if OWN
@group(0) @binding(3) var<storage, read_write> keys: array<KvWords>;
@group(0) @binding(4) var<storage, read_write> values: array<KvWords>;
#else
@group(0) @binding(3) var<storage, read> keys: array<KvWords>;
@group(0) @binding(4) var<storage, read> values: array<KvWords>;
#endif
#if ROTARY_DIM > 0
@group(0) @binding($(NEXT)) var<storage, read> table: array<vec4<f32>>;
#endif
#let NORMS = NEXT + (ROTARY_DIM > 0)
#if NORM
@group(0) @binding($(NORMS)) var<storage, read> q_norm: array<vec4<f32>>;
#if OWN
@group(0) @binding($(NORMS + 1)) var<storage, read> k_norm: array<vec4<f32>>;
#endif
#if V_NORM
@group(0) @binding($(NORMS + 2)) var<storage, read> v_norm: array<vec4<f32>>;
#endif
#endif
#if ROW_NORM

const QUERIES = GROUP * KV_HEADS * GROUPS * 2u;  // vectors in all queries of a row
const KEYS = u32(OWN) * KV_HEADS * GROUPS * 2u;  // in all of its keys
#let ROUNDS = ((GROUP + OWN) * KV_HEADS * HEAD_DIM + 4 * WG - 1) / (4 * WG)
#endif

#include "attention_main.wgsl"
#for h in 0..HEADS
#for e in 0..PER_LANE
  let raw$h_$e = load_query(heads, (first_head + $hu) * GROUPS + part + $eu * CLUSTER);
#endfor
#endfor
#if OWN
  let key_head = (HEADS * size.y + kv_head) * GROUPS;
#if V_IS_K
  let value_head = key_head;
#else
  let value_head = key_head + HEADS * size.y / GROUP * GROUPS;
#endif
#endif
#if ROW_NORM
#for j in 0..ROUNDS
  let row$j = x[heads + min(tid + $ju * WG, QUERIES + KEYS - 1u)];
#endfor
#endif
#for e in 0..PER_LANE
  let partner$e = partner_of(part + $eu * CLUSTER);
#for h in 0..HEADS
  let raw_partner$h_$e = load_query(heads, (first_head + $hu) * GROUPS + partner$e);
#endfor
#if NORM and not ROW_NORM
  let q_weight$e = q_weight(part + $eu * CLUSTER);
  let q_weight_partner$e = q_weight(partner$e);
#endif
#if OWN
  let raw_key$e = load_own_key(heads, key_head + part + $eu * CLUSTER);
  let raw_key_partner$e = load_own_key(heads, key_head + partner$e);
  let raw_value$e = load_group(heads, value_head + part + $eu * CLUSTER);
#if NORM and not ROW_NORM
  let k_weight$e = k_weight(part + $eu * CLUSTER);
  let k_weight_partner$e = k_weight(partner$e);
#endif
#if V_NORM
  let v_weight$e = v_weight(part + $eu * CLUSTER);
#endif
#endif
#endfor

  let row = step.rows[id.z];
  let first = first_position(row.position);
  let length = split_length(row.position + 1u - first);
  let start = first + id.x * length;
  if (start > row.position) {
    return;
  }
#for e in 0..PER_LANE
  let rotation$e = rotation_of(part + $eu * CLUSTER, row.position);
#endfor
#if OWN
  let count = min(length, row.position - start);  // positions to read from the cache
  let is_last = row.position - start < length;
#else
  let count = min(length, row.position + 1u - start);
#endif
#include "attention_load.wgsl"

  // The queries: normed and rotated.
#if ROW_NORM
  var squares_of_row = vec2<f32>();  // queries, keys
#for j in 0..ROUNDS
  squares_of_row += squares_at(tid + $ju * WG, row$j);
#endfor
  squares_of_row = subgroupAdd(squares_of_row);
  if (lane == 0u) {
    parts[subgroup] = squares_of_row;
  }
  workgroupBarrier();
  squares_of_row = parts[0];
#for g in 1..SUBGROUPS
  squares_of_row += select(vec2<f32>(), parts[$g], $gu * subgroup_size < WG);
#endfor
  workgroupBarrier();  // parts are written again
#endif
#for h in 0..HEADS
  var scale$h = Q_SCALE;
#if ROW_NORM
  scale$h *= inverseSqrt(squares_of_row.x / f32(4u * QUERIES) + EPS);
#elif NORM
  var squares$h = 0.0;
#for e in 0..PER_LANE
  squares$h += squared(raw$h_$e);
#endfor
  scale$h *= inverseSqrt(cluster_add(squares$h) / f32(HEAD_DIM) + EPS);
#endif
#endfor
#for e in 0..PER_LANE
#if NORM and not ROW_NORM
  let q_rotation$e = weighted(rotation$e, q_weight$e, q_weight_partner$e);
#else
  let q_rotation$e = rotation$e;
#endif
#for h in 0..HEADS
  let rotated$h_$e = rotate_group(raw$h_$e, raw_partner$h_$e, q_rotation$e);
  let q$h_$e_low = scale$h * rotated$h_$e.low;
  let q$h_$e_high = scale$h * rotated$h_$e.high;
#endfor
#endfor
#if OWN
  if (is_last) {
    // The row's own key and value, through the type of the cache.
    var key_scale = 1.0;
#if ROW_NORM
    key_scale = inverseSqrt(squares_of_row.y / f32(4u * KEYS) + EPS);
#elif NORM
    var squares = 0.0;
#for e in 0..PER_LANE
    squares += squared(raw_key$e);
#endfor
    key_scale = inverseSqrt(cluster_add(squares) / f32(HEAD_DIM) + EPS);
#endif
#if V_NORM
    var value_squares = 0.0;
#for e in 0..PER_LANE
    value_squares += squared(raw_value$e);
#endfor
    let value_scale = inverseSqrt(cluster_add(value_squares) / f32(HEAD_DIM) + EPS);
#endif
#for e in 0..PER_LANE
#if NORM and not ROW_NORM
    let k_rotation$e = weighted(rotation$e, k_weight$e, k_weight_partner$e);
#else
    let k_rotation$e = rotation$e;
#endif
    let rotated_key$e = rotate_group(raw_key$e, raw_key_partner$e, k_rotation$e);
    let own_key$e = to_kv(key_scale * rotated_key$e.low, key_scale * rotated_key$e.high);
#if V_NORM
    let value_low$e = value_scale * raw_value$e.low * v_weight$e.low;
    let value_high$e = value_scale * raw_value$e.high * v_weight$e.high;
    let own_value$e = to_kv(value_low$e, value_high$e);
#else
    let own_value$e = to_kv(raw_value$e.low, raw_value$e.high);
#endif
#if KV == q8
    let key_scales$e = two_scales(own_key$e);
    let value_scales$e = two_scales(own_value$e);
#endif
#endfor
    // Attention to it alone: most = score, sum = 1, o = v.
#for h in 0..HEADS
    var part_of_own$h = 0.0;
#for e in 0..PER_LANE
    part_of_own$h += dot(kv_low(own_key$e), q$h_$e_low) + dot(kv_high(own_key$e), q$h_$e_high);
#endfor
#if SOFTCAP > 0
    let own$h = LOG2_E * capped(cluster_add(part_of_own$h));
#else
    let own$h = cluster_add(part_of_own$h);
#endif
#endfor
    if (cluster == 0u) {  // the others begin with nothing
#for m in 0..KEPT_HEADS
#for h in 0..HEADS
      most$m = select(most$m, own$h, mine / BATCH + $mu == $hu);
#endfor
      sum$m = select(0.0, 1.0, mine % BATCH == 0u);
#endfor
#for h in 0..HEADS
#for e in 0..PER_LANE
      o$h_$e_low = kv_low(own_value$e);
      o$h_$e_high = kv_high(own_value$e);
#endfor
#endfor
      // One of the workgroups that share a KV head writes its key and value.
      if (first_head % GROUP == 0u && row.alive != 0u && id.z < step.n_rows) {
        let own = kv_index(kv_head, kv_slot(row.sequence, row.position)) + part;
#for e in 0..PER_LANE
        store_key(own + $eu * CLUSTER, own_key$e);
        store_value(own + $eu * CLUSTER, own_value$e);
#if KV == q8
        if (part % 8u == 0u) {
          let scales = kv_scale_index(own + $eu * CLUSTER, 2u * arrayLength(&keys)) / 2u;
          keys[scales] = key_scales$e;
          values[scales] = value_scales$e;
        }
#endif
#endfor
      }
    }
  }
#endif
#include "attention_core.wgsl"
}

// A group of a query, times the weights of a norm of rows: those of heads go into the rotation.
fn load_query(heads: u32, group: u32) -> Group {
  let query = load_group(heads, group);
#if ROW_NORM
  let weight = q_weight(group);
  return Group(query.low * weight.low, query.high * weight.high);
#else
  return query;
#endif
}
#if OWN

// A group of the row's own key, times the weights of a norm of rows.
fn load_own_key(heads: u32, group: u32) -> Group {
  let key = load_group(heads, group);
#if ROW_NORM
  let weight = k_weight(group - QUERIES / 2u);
  return Group(key.low * weight.low, key.high * weight.high);
#else
  return key;
#endif
}

fn store_key(i: u32, key: Kv8) {
#if KV == f32
  keys[2u * i] = key.low;
  keys[2u * i + 1u] = key.high;
#elif KV == q8
  keys[i] = vec2<u32>(key.low, key.high);
#else
  keys[i] = key;
#endif
}

fn store_value(i: u32, value: Kv8) {
#if KV == f32
  values[2u * i] = value.low;
  values[2u * i + 1u] = value.high;
#elif KV == q8
  values[i] = vec2<u32>(value.low, value.high);
#else
  values[i] = value;
#endif
}
#endif

// The sum over the lanes of a cluster, each of which gets it.
fn cluster_add(value: f32) -> f32 {
  var sum = value;
#for k in 0..CLUSTER_BITS
  sum += subgroupShuffleXor(sum, $(1 << $k)u);
#endfor
  return sum;
}
#if ROW_NORM

// The sums that vector i of a row adds to the squares of the queries and of the keys.
fn squares_at(i: u32, vector: vec4<f32>) -> vec2<f32> {
  let is_query = i < QUERIES;
  let is_key = i < QUERIES + KEYS && !is_query;
  return select(vec2<f32>(), vec2<f32>(dot(vector, vector)), vec2<bool>(is_query, is_key));
}
#endif
#if NORM

fn squared(group: Group) -> f32 {
  return dot(group.low, group.low) + dot(group.high, group.high);
}

fn q_weight(i: u32) -> Group {
  return Group(q_norm[2u * i], q_norm[2u * i + 1u]);
}
#if OWN

fn k_weight(i: u32) -> Group {
  return Group(k_norm[2u * i], k_norm[2u * i + 1u]);
}
#endif
#if V_NORM

fn v_weight(i: u32) -> Group {
  return Group(v_norm[2u * i], v_norm[2u * i + 1u]);
}
#endif
#endif
