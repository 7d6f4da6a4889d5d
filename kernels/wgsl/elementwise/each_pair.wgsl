// y[row][i] = result(a[row][i], b[row][i]) for i < WIDTH: what result is, a kernel says.
// @param WIDTH u32
// @param A_STRIDE u32
// @param A_OFFSET u32
// @param B_STRIDE u32
// @param B_OFFSET u32
// @param Y_STRIDE u32
@group(0) @binding(0) var<storage, read> a: array<f32>;
@group(0) @binding(1) var<storage, read> b: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

// grid (WIDTH / 64, rows)
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x < WIDTH) {
    y[id.y * Y_STRIDE + id.x] =
      result(a[id.y * A_STRIDE + A_OFFSET + id.x], b[id.y * B_STRIDE + B_OFFSET + id.x]);
  }
}
