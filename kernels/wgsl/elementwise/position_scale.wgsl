// y = x * (1 + BETA * log(1 + floor(position / INTERVAL))): [rows][WIDTH]: queries of
// long contexts (Llama 4).
#include "step.wgsl"
// @param BETA f32
// @param INTERVAL u32
// @param WIDTH u32
// @param X_STRIDE u32
// @param X_OFFSET u32
// @param Y_STRIDE u32
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

// grid (WIDTH / 64, rows)
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x < WIDTH) {
    let scale = 1.0 + BETA * log(1.0 + f32(step.rows[id.y].position / INTERVAL));
    y[id.y * Y_STRIDE + id.x] = scale * x[id.y * X_STRIDE + X_OFFSET + id.x];
  }
}
