// keys[slot of a row] = k[row], values[slot of a row] = v[row], [KV heads][HEAD_DIM] each, through the type of
// the cache. LATENT: values are the keys, and a key is k and v side by side.
#include "step.wgsl"
#include "kv_head.wgsl"
// @param LATENT bool
// @param K_DIM u32               values of a head in k
// @param K_STRIDE u32
// @param K_OFFSET u32
// @param V_STRIDE u32
// @param V_OFFSET u32
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> pages: array<u32>;
@group(0) @binding(2) var<storage, read> k: array<f32>;
@group(0) @binding(3) var<storage, read> v: array<f32>;
@group(0) @binding(4) var<storage, read_write> keys: array<KvWord>;
#if not LATENT
@group(0) @binding(5) var<storage, read_write> values: array<KvWord>;
#endif

// grid (kv heads, rows)
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let row = step.rows[id.y];
  if (id.y >= step.n_rows || row.alive != 1u) {
    return;
  }
  let slot = kv_slot(row.sequence, row.position);
#if KV == q8
  for (var d = 4u * tid; d < HEAD_DIM; d += 256u) {
    kept[d / 2u] = key_pair(id, d);
    kept[d / 2u + 1u] = key_pair(id, d + 2u);
  }
  workgroupBarrier();
  for (var d = 4u * tid; d < HEAD_DIM; d += 256u) {
    let key = kept_int8(d);
    let group = kv_index(id.x, slot) + d / 8u;
    keys[kv_index(id.x, slot) * 2u + d / 4u] = key.values;
    keys[kv_scale_index(group, arrayLength(&keys))] = key.scale;
  }
#if not LATENT
  workgroupBarrier();
  for (var d = 4u * tid; d < HEAD_DIM; d += 256u) {
    kept[d / 2u] = value_pair(id, d);
    kept[d / 2u + 1u] = value_pair(id, d + 2u);
  }
  workgroupBarrier();
  for (var d = 4u * tid; d < HEAD_DIM; d += 256u) {
    let value = kept_int8(d);
    let group = kv_index(id.x, slot) + d / 8u;
    values[kv_index(id.x, slot) * 2u + d / 4u] = value.values;
    values[kv_scale_index(group, arrayLength(&values))] = value.scale;
  }
#endif
#else
  for (var d = 2u * tid; d < HEAD_DIM; d += 128u) {
    let out = kv_index(id.x, slot) * 4u + d / 2u;
    keys[out] = stored(key_pair(id, d));
#if not LATENT
    values[out] = stored(value_pair(id, d));
#endif
  }
#endif
}

// Two dimensions of the key of a head and row.
fn key_pair(id: vec3<u32>, d: u32) -> vec2<f32> {
#if LATENT
  if (d >= K_DIM) {
    let from_v = id.y * V_STRIDE + V_OFFSET + id.x * (HEAD_DIM - K_DIM) + d - K_DIM;
    return vec2<f32>(v[from_v], v[from_v + 1u]);
  }
#endif
  let from_k = id.y * K_STRIDE + K_OFFSET + id.x * K_DIM + d;
  return vec2<f32>(k[from_k], k[from_k + 1u]);
}
#if not LATENT

fn value_pair(id: vec3<u32>, d: u32) -> vec2<f32> {
  let from_v = id.y * V_STRIDE + V_OFFSET + id.x * HEAD_DIM + d;
  return vec2<f32>(v[from_v], v[from_v + 1u]);
}
#endif
