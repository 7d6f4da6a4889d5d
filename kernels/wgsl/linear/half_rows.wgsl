// x [rows][K] in f16, each row times a power of two (half_scale.wgsl), whose inverse is the row's scale. Behind its
// K columns a row has zeros, up to a multiple of 64. Columns are in the order of crossed_halves.wgsl.
#include "reduce.wgsl"
#include "crossed_halves.wgsl"
#include "half_scale.wgsl"
// @param K u32
// @param X_STRIDE u32
// @param ORDER bool              column i is column order[i] of x
// @param WG u32
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> x_halves: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> x_scales: array<f32>;
#if ORDER
@group(0) @binding(3) var<storage, read> order: array<u32>;
#endif

const ELEMENTS = (K + 63u) / 64u * 8u;
// Eight columns of each invocation stay in registers.
#let OWN = ((K + 63) / 64 * 8 + WG - 1) / WG

fn value(row: u32, column: u32) -> f32 {
#if ORDER
  return select(0.0, x[row * X_STRIDE + order[min(column, K - 1u)]], column < K);
#else
  return select(0.0, x[row * X_STRIDE + min(column, K - 1u)], column < K);
#endif
}

// grid (1, rows)
@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) id: vec3<u32>, me: Invocation) {
  let row = id.y;
  var most = 0.0;
#for o in 0..OWN
  let first$o = (me.index + WG * $ou) * 8u;
#for h in 0..2
  let four$o_$h = vec4<f32>(
    value(row, first$o + $(4 * $h)u), value(row, first$o + $(4 * $h + 1)u),
    value(row, first$o + $(4 * $h + 2)u), value(row, first$o + $(4 * $h + 3)u));
  let large$o_$h = max(abs(four$o_$h.xy), abs(four$o_$h.zw));
  most = max(most, max(large$o_$h.x, large$o_$h.y));
#endfor
#endfor
  most = workgroup_max(most, me);
  let scale = half_scale(most);
  if (me.index == 0u) {
    x_scales[row] = scale.inverse;
  }
#for o in 0..OWN
  if (me.index + WG * $ou < ELEMENTS) {
    x_halves[row * ELEMENTS + me.index + WG * $ou] = crossed_halves(
      scale.factor * four$o_0, scale.factor * four$o_1);
  }
#endfor
}
