// y[row][i] = result(x[row][i], row) for i < WIDTH: a kernel that makes each value from one says what result is.
// Needs `#let X`, the binding of x; y is the next one.
// @param WIDTH u32
// @param X_STRIDE u32
// @param X_OFFSET u32
// @param Y_STRIDE u32
@group(0) @binding($(X)) var<storage, read> x: array<f32>;
@group(0) @binding($(X + 1)) var<storage, read_write> y: array<f32>;

// grid (WIDTH / 64, rows)
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x < WIDTH) {
    y[id.y * Y_STRIDE + id.x] = result(x[id.y * X_STRIDE + X_OFFSET + id.x], id.y);
  }
}
