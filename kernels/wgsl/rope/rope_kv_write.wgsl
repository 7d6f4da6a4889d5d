// One kernel from a q, k, v projection x [rows][query, key and value heads][HEAD_DIM] to attention:
//
//   y = rotate(norm(x_q));  key = rotate(norm(x_k));  value = x_v or norm(x_v)
//   norm(x) = x / sqrt(mean(x^2) + EPS) w, with NORM
//
// Queries go to y, keys and values into the cache. ROTATE_FIRST: norm(rotate(x)). Values are normed with
// V_NORM, and their x_v is x_k with V_IS_K. Without OWN there are queries alone. ROW_NORM: the norms are of
// all queries and of all keys of a row, with weights for each head.
#include "reduce.wgsl"
#include "step.wgsl"
#include "rotate_head.wgsl"
#include "kv_head.wgsl"
// @param N_HEADS u32
// @param N_KV_HEADS u32
// @param NORM bool
// @param ROTATE_FIRST bool
// @param OWN bool
// @param ROW_NORM bool           only with NORM, and without V_NORM
// @param V_NORM bool             only with NORM
// @param V_IS_K bool
// @param EPS f32
// @param X_STRIDE u32
// @param Y_STRIDE u32
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> pages: array<u32>;
@group(0) @binding(2) var<storage, read> table: array<vec2<f32>>;
@group(0) @binding(3) var<storage, read> x: array<f32>;  // [rows][query, key and value heads]
@group(0) @binding(4) var<storage, read_write> y: array<vec2<f32>>;
#if OWN
@group(0) @binding(5) var<storage, read_write> keys: array<KvWord>;
@group(0) @binding(6) var<storage, read_write> values: array<KvWord>;
#endif
#let NORMS = 5 + 2 * OWN
#if NORM
@group(0) @binding($(NORMS)) var<storage, read> q_norm: array<f32>;
#if OWN
@group(0) @binding($(NORMS + 1)) var<storage, read> k_norm: array<f32>;
#endif
#if V_NORM
@group(0) @binding($(NORMS + 2)) var<storage, read> v_norm: array<f32>;
#endif
#endif

// grid (N_HEADS + 2 * N_KV_HEADS, rows); without OWN (N_HEADS, rows)
@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) id: vec3<u32>, me: Invocation) {
  let row = step.rows[id.y];
  let is_query = id.x < N_HEADS;
  let is_value = id.x >= N_HEADS + N_KV_HEADS;
  let is_key = !is_query && !is_value;
#if OWN
  let writes = id.y < step.n_rows && row.alive == 1u;
  let slot = kv_slot(row.sequence, row.position);  // under way while the head is normed and rotated
  let kv = kv_index(id.x - select(N_HEADS, N_HEADS + N_KV_HEADS, is_value), slot);
#endif
  let x_head = id.x - select(0u, N_KV_HEADS, V_IS_K && is_value);
  for (var d = me.index; d < HEAD_DIM; d += WG) {
    head[d] = x[id.y * X_STRIDE + x_head * HEAD_DIM + d];
  }
  workgroupBarrier();
#if NORM
  let weights = select(0u, (id.x - select(N_HEADS, 0u, is_query)) * HEAD_DIM, ROW_NORM);
  if (!is_value || V_NORM) {
    var squares = 0.0;
#if ROW_NORM
    let width = select(N_KV_HEADS, N_HEADS, is_query) * HEAD_DIM;
    let row_start = id.y * X_STRIDE + select(N_HEADS * HEAD_DIM, 0u, is_query);
    for (var i = me.index; i < width; i += WG) {
      let value = x[row_start + i];
      squares += value * value;
    }
#else
    let width = HEAD_DIM;
    for (var d = me.index; d < HEAD_DIM; d += WG) {
      squares += head[d] * head[d];
    }
#endif
    let scale = inverseSqrt(workgroup_add(squares, me) / f32(width) + EPS);
    for (var d = me.index; d < HEAD_DIM; d += WG) {
      let weight = norm_weight(weights + d, is_query, is_value);
      head[d] *= scale * select(weight, 1.0, ROTATE_FIRST && !is_value);
    }
    workgroupBarrier();
  }
#endif
  for (var d = 2u * me.index; d < HEAD_DIM; d += 2u * WG) {
    var pair = vec2<f32>(head[d], head[d + 1u]);
    if (!is_value) {
      pair = vec2<f32>(rotated(d, row.position), rotated(d + 1u, row.position));
#if NORM and ROTATE_FIRST
      let at = weights + d;
      pair *= vec2<f32>(norm_weight(at, is_query, false), norm_weight(at + 1u, is_query, false));
#endif
    }
    if (is_query) {
      y[(id.y * Y_STRIDE + id.x * HEAD_DIM + d) / 2u] = pair;
    }
#if OWN and KV == q8
    kept[d / 2u] = pair;
#elif OWN
    if (writes && is_key) {
      keys[kv * 4u + d / 2u] = stored(pair);
    } else if (writes && is_value) {
      values[kv * 4u + d / 2u] = stored(pair);
    }
#endif
  }
#if OWN and KV == q8
  workgroupBarrier();
  for (var d = 4u * me.index; d < HEAD_DIM && writes; d += 4u * WG) {
    let int8 = kept_int8(d);
    if (is_key) {
      keys[kv * 2u + d / 4u] = int8.values;
      keys[kv_scale_index(kv + d / 8u, arrayLength(&keys))] = int8.scale;
    } else if (is_value) {
      values[kv * 2u + d / 4u] = int8.values;
      values[kv_scale_index(kv + d / 8u, arrayLength(&values))] = int8.scale;
    }
  }
#endif
}
#if NORM

fn norm_weight(i: u32, is_query: bool, is_value: bool) -> f32 {
#if V_NORM
  if (is_value) {
    return v_norm[i];
  }
#endif
#if OWN
  if (!is_query) {
    return k_norm[i];
  }
#endif
  return q_norm[i];
}
#endif
