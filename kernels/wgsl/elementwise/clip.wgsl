// y = clamp(x, -LIMIT, LIMIT), [rows][WIDTH].
// @param LIMIT f32
// @param WIDTH u32
// @param X_STRIDE u32
// @param X_OFFSET u32
// @param Y_STRIDE u32
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;

// grid (WIDTH / 64, rows)
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x < WIDTH) {
    y[id.y * Y_STRIDE + id.x] = clamp(x[id.y * X_STRIDE + X_OFFSET + id.x], -LIMIT, LIMIT);
  }
}
