// Write the keys and values of the step's rows into the cache.
#include "step.wgsl"
#include "kv_head.wgsl"
// @param K_STRIDE u32
// @param K_OFFSET u32
// @param V_STRIDE u32
// @param V_OFFSET u32
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> pages: array<u32>;
@group(0) @binding(2) var<storage, read> k: array<f32>;
@group(0) @binding(3) var<storage, read> v: array<f32>;
#if KV == f32
@group(0) @binding(4) var<storage, read_write> keys: array<vec2<f32>>;
@group(0) @binding(5) var<storage, read_write> values: array<vec2<f32>>;
#else
@group(0) @binding(4) var<storage, read_write> keys: array<u32>;
@group(0) @binding(5) var<storage, read_write> values: array<u32>;
#endif

// grid (kv heads, rows)
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let row = step.rows[id.y];
  if (id.y >= step.n_rows || row.alive == 0u) {
    return;
  }
  let slot = kv_slot(row.sequence, row.position);
  let k_head = id.y * K_STRIDE + K_OFFSET + id.x * HEAD_DIM;
  let v_head = id.y * V_STRIDE + V_OFFSET + id.x * HEAD_DIM;
#if KV == q8
  for (var d = 4u * tid; d < HEAD_DIM; d += 256u) {
    let from_k = k_head + d;
    kept[d / 4u] = vec4<f32>(k[from_k], k[from_k + 1u], k[from_k + 2u], k[from_k + 3u]);
  }
  workgroupBarrier();
  for (var d = 4u * tid; d < HEAD_DIM; d += 256u) {
    let key = kept_int8(d);
    let group = kv_index(id.x, slot) + d / 8u;
    keys[kv_index(id.x, slot) * 2u + d / 4u] = key.values;
    keys[kv_scale_index(group)] = key.scale;
  }
  workgroupBarrier();
  for (var d = 4u * tid; d < HEAD_DIM; d += 256u) {
    let from_v = v_head + d;
    kept[d / 4u] = vec4<f32>(v[from_v], v[from_v + 1u], v[from_v + 2u], v[from_v + 3u]);
  }
  workgroupBarrier();
  for (var d = 4u * tid; d < HEAD_DIM; d += 256u) {
    let value = kept_int8(d);
    let group = kv_index(id.x, slot) + d / 8u;
    values[kv_index(id.x, slot) * 2u + d / 4u] = value.values;
    values[kv_scale_index(group)] = value.scale;
  }
#else
  for (var d = 2u * tid; d < HEAD_DIM; d += 128u) {
    let out = kv_index(id.x, slot) * 4u + d / 2u;
    let key = vec2<f32>(k[k_head + d], k[k_head + d + 1u]);
    let value = vec2<f32>(v[v_head + d], v[v_head + d + 1u]);
#if KV == f32
    keys[out] = key;
    values[out] = value;
#else
    keys[out] = pack2x16float(key);
    values[out] = pack2x16float(value);
#endif
  }
#endif
}
