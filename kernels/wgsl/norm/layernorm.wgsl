// y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + EPS) * weight + bias over each part of WIDTH values
// of a row of x [rows][parts][WIDTH]. One part: the norm of a layer. Several: the norm of each head, of
// which GROUPS have weights of their own.
#include "reduce.wgsl"
// @param WIDTH u32
// @param GROUPS u32
// @param EPS f32
// @param X_STRIDE u32
// @param X_OFFSET u32
// @param Y_STRIDE u32
// @param BIAS bool
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> weight: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
#if BIAS
@group(0) @binding(3) var<storage, read> bias: array<f32>;
#endif

// grid (parts, rows)
@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) id: vec3<u32>, me: Invocation) {
  let x_row = id.y * X_STRIDE + X_OFFSET + id.x * WIDTH;
  let y_row = id.y * Y_STRIDE + id.x * WIDTH;
  let own = id.x % GROUPS * WIDTH;
  var sum = 0.0;
  for (var i = me.index; i < WIDTH; i += WG) {
    sum += x[x_row + i];
  }
  let mean = workgroup_add(sum, me) / f32(WIDTH);
  var squares = 0.0;
  for (var i = me.index; i < WIDTH; i += WG) {
    squares += (x[x_row + i] - mean) * (x[x_row + i] - mean);
  }
  let scale = inverseSqrt(workgroup_add(squares, me) / f32(WIDTH) + EPS);
  for (var i = me.index; i < WIDTH; i += WG) {
    var value = (x[x_row + i] - mean) * scale * weight[own + i];
#if BIAS
    value += bias[own + i];
#endif
    y[y_row + i] = value;
  }
}
