// y = x * sigmoid(gate), [rows][WIDTH], where a row has one gate, or a value one of its own.
// @param WIDTH u32
// @param STRIDE u32
// @param GATE_STRIDE u32
// @param GATE_OFFSET u32
// @param GATES u32       of a row
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> gate: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

// grid (WIDTH / 64, rows)
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x < WIDTH) {
    let i = id.y * STRIDE + id.x;
    y[i] = x[i] / (1.0 + exp(-gate[id.y * GATE_STRIDE + GATE_OFFSET + id.x % GATES]));
  }
}
