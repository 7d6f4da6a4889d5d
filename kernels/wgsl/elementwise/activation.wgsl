// y = activate(x), or activate(x) * up with GATED, where up follows x in its row.
#include "activate.wgsl"
// @param WIDTH u32
// @param X_STRIDE u32
// @param X_OFFSET u32
// @param Y_STRIDE u32
// @param GATED bool
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;

// grid (WIDTH / 64, rows)
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= WIDTH) {
    return;
  }
  let i = id.y * X_STRIDE + X_OFFSET + id.x;
  var value = activate(x[i]);
#if GATED
  value *= x[i + WIDTH];
#endif
  y[id.y * Y_STRIDE + id.x] = value;
}
