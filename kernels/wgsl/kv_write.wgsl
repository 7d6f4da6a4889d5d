// Write the keys and values of the step's rows into the cache.
#include "step.wgsl"
#include "kv.wgsl"
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
}
