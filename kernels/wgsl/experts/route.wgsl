// routing[row] = the experts with the largest scores of the row's logits [EXPERTS], and their weights
// (top_experts.wgsl).
#include "reduce.wgsl"
#include "top_experts.wgsl"
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read_write> routing: array<f32>;  // see routing.wgsl
#if CORRECTION
@group(0) @binding(2) var<storage, read> correction: array<f32>;
#endif
#if EXPERT_SCALES
@group(0) @binding($(2 + CORRECTION)) var<storage, read> expert_scales: array<f32>;
#endif

// grid (1, rows)
@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) id: vec3<u32>, me: Invocation) {
  choose_experts(id.y, me);
  write_routing(id.y, 0u, ALL_SLOTS, me);
}
