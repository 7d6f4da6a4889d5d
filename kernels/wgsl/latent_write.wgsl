// The one key of a latent cache: ROTARY_DIM values that are turned, then the latent, which is normed.
#include "reduce.wgsl"
#include "step.wgsl"
#include "rotate.wgsl"
#include "kv_head.wgsl"
// @param EPS f32
// @param X_STRIDE u32
// @param X_OFFSET u32
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> pages: array<u32>;
@group(0) @binding(2) var<storage, read> table: array<vec2<f32>>;
@group(0) @binding(3) var<storage, read> x: array<f32>;
@group(0) @binding(4) var<storage, read> norm: array<f32>;
#if KV == f32
@group(0) @binding(5) var<storage, read_write> keys: array<vec2<f32>>;
#else
@group(0) @binding(5) var<storage, read_write> keys: array<u32>;
#endif

// grid (1, rows)
@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) id: vec3<u32>, me: Invocation) {
  let row = step.rows[id.y];
  let writes = id.y < step.n_rows && row.alive != 0u;
  var squares = 0.0;
  for (var d = me.index; d < HEAD_DIM; d += WG) {
    head[d] = x[id.y * X_STRIDE + X_OFFSET + d];
    squares += select(0.0, head[d] * head[d], d >= ROTARY_DIM);
  }
  let scale = inverseSqrt(workgroup_add(squares, me) / f32(HEAD_DIM - ROTARY_DIM) + EPS);
  for (var d = ROTARY_DIM + me.index; d < HEAD_DIM; d += WG) {
    head[d] *= scale * norm[d - ROTARY_DIM];
  }
  workgroupBarrier();
  let kv = kv_index(0u, kv_slot(row.sequence, row.position));
  for (var d = 2u * me.index; d < HEAD_DIM; d += 2u * WG) {
    let pair = vec2<f32>(rotated(d, row.position), rotated(d + 1u, row.position));
#if KV == q8
    kept[d / 4u][d % 4u] = pair.x;
    kept[d / 4u][d % 4u + 1u] = pair.y;
#else
    if (writes) {
      keys[kv * 4u + d / 2u] = stored(pair);
    }
#endif
  }
#if KV == q8
  workgroupBarrier();
  for (var d = 4u * me.index; d < HEAD_DIM && writes; d += 4u * WG) {
    let int8 = kept_int8(d);
    keys[kv * 2u + d / 4u] = int8.values;
    keys[kv_scale_index(kv + d / 8u)] = int8.scale;
  }
#endif
}
