// The one key of a latent cache: ROTARY_DIM values that are rotated, then the latent, which is normed.
// Needs the bindings of rotate_pair.wgsl and step.wgsl, `latent: array<f32>`, where the values lie,
// `latent_norm: array<f32>`, `pages: array<u32>` where PAGED, and `keys: array<KvWord>` (kv_head.wgsl).
#include "reduce.wgsl"
#include "step.wgsl"
#include "rotate_head.wgsl"
#include "kv_head.wgsl"
// @param EPS f32
// @param LATENT_STRIDE u32
// @param LATENT_OFFSET u32
fn write_latent(index: u32, me: Invocation) {  // of a row; by all invocations of a workgroup
  let row = step.rows[index];
  let writes = index < step.n_rows && row.alive == 1u;
  var squares = 0.0;
  for (var d = me.index; d < HEAD_DIM; d += WG) {
    head[d] = latent[index * LATENT_STRIDE + LATENT_OFFSET + d];
    squares += select(0.0, head[d] * head[d], d >= ROTARY_DIM);
  }
  let scale = inverseSqrt(workgroup_add(squares, me) / f32(HEAD_DIM - ROTARY_DIM) + EPS);
  for (var d = ROTARY_DIM + me.index; d < HEAD_DIM; d += WG) {
    head[d] *= scale * latent_norm[d - ROTARY_DIM];
  }
  workgroupBarrier();
  let kv = kv_index(0u, kv_slot(row.sequence, row.position));
  for (var d = 2u * me.index; d < HEAD_DIM; d += 2u * WG) {
    let pair = vec2<f32>(rotated(d, row.position), rotated(d + 1u, row.position));
#if KV == q8
    kept[d / 2u] = pair;
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
    keys[kv_scale_index(kv + d / 8u, arrayLength(&keys))] = int8.scale;
  }
#endif
}
