// y = x / sqrt(mean(x^2) + EPS) * weight over each part of WIDTH values of a row.
// One part: the norm of a layer. Several: the norm of each head, or of each of GROUPS, which have
// weights of their own. With GATED, y * silu(gate). With QUANTIZE it goes out as int8: parts are
// whole halves of blocks.
#include "reduce.wgsl"
#include "quantize_block.wgsl"
// @param WIDTH u32
// @param GROUPS u32
// @param EPS f32
// @param X_STRIDE u32
// @param X_OFFSET u32
// @param Y_STRIDE u32
// @param GATED bool
// @param GATE_STRIDE u32
// @param GATE_OFFSET u32
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> weight: array<f32>;
#if QUANTIZE
@group(0) @binding(2) var<storage, read_write> x_int8: array<u32>;
@group(0) @binding(3) var<storage, read_write> x_int8_scales: array<vec2<f32>>;

var<workgroup> values: array<vec4<f32>, WIDTH / 4u>;
#else
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
#endif
#if GATED
@group(0) @binding($(3 + QUANTIZE)) var<storage, read> gate: array<f32>;
#endif

// grid (parts, rows)
@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) id: vec3<u32>, me: Invocation) {
  let x_row = id.y * X_STRIDE + X_OFFSET + id.x * WIDTH;
#if not QUANTIZE
  let y_row = id.y * Y_STRIDE + id.x * WIDTH;
#endif
  var squares = 0.0;
  for (var i = me.index; i < WIDTH; i += WG) {
    squares += x[x_row + i] * x[x_row + i];
  }
  let scale = inverseSqrt(workgroup_add(squares, me) / f32(WIDTH) + EPS);
  for (var i = me.index; i < WIDTH; i += WG) {
    var value = x[x_row + i] * scale * weight[id.x % GROUPS * WIDTH + i];
#if GATED
    let z = gate[id.y * GATE_STRIDE + GATE_OFFSET + id.x * WIDTH + i];
    value *= z / (1.0 + exp(-z));
#endif
#if QUANTIZE
    values[i / 4u][i % 4u] = value;
#else
    y[y_row + i] = value;
#endif
  }
#if QUANTIZE
  workgroupBarrier();
  for (var i = me.index; i < WIDTH / 4u; i += WG) {
    let half = i / 4u;
    var most = 0u;
    for (var j = 0u; j < 4u; j++) {
      most = max(most, magnitude(values[4u * half + j]));
    }
    let at = half_at(id.y, Y_STRIDE / 32u, id.x * (WIDTH / 16u) + half);
    store_int8(at, i % 4u, values[i], most);
    if (i % 4u == 0u) {
      store_scale(at, most, 0.0);
    }
  }
#endif
}
