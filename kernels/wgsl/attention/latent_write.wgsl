// keys[slot of a row] = (rotate(k), norm(latent)) of each row of a step: HEAD_DIM values, see latent.wgsl.
#include "latent.wgsl"
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> table: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read> latent: array<f32>;
@group(0) @binding(3) var<storage, read> latent_norm: array<f32>;
@group(0) @binding(4) var<storage, read_write> keys: array<KvWord>;
#if PAGED
@group(0) @binding(5) var<storage, read> pages: array<u32>;
#endif

// grid (1, rows)
@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) id: vec3<u32>, me: Invocation) {
  write_latent(id.y, me);
}
