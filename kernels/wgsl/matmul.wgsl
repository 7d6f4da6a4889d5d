// y = x W^T for many rows of x (prefill): tiles of x and W go through workgroup memory, and each
// invocation keeps M_TILE x N_TILE outputs in registers. f32 arithmetic.
//
// Tiles are stored as loaded, [row][16 columns] in 16-byte elements with an odd row stride, so that
// neither stores nor loads meet bank conflicts; the next tile is in flight while this one is used.
#include "weight.wgsl"
// @param K u32                   columns of W
// @param N u32                   rows of this shard of W
// @param START u32               the first output that this shard holds
// @param Y_STRIDE u32
// @param M_TILE u32              rows per invocation: a workgroup has 16 times that
// @param N_TILE u32              outputs per invocation: likewise
// @param DOUBLE bool             two buffers of workgroup memory: one barrier per tile, not two
// @param BIAS bool
// @param RESIDUAL bool
@group(0) @binding(0) var<storage, read> weight: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;  // rows up to a multiple of the tile
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
#if BIAS
@group(0) @binding(3) var<storage, read> bias: array<f32>;
#endif
#if RESIDUAL
@group(0) @binding($(3 + BIAS)) var<storage, read> residual: array<f32>;
#endif

const GROUPS = (K + 7u) / 8u;
const ROWS = 16u * M_TILE;
const COLUMNS = 16u * N_TILE;
const STRIDE = 5u;  // 16 columns are 4 elements, one more against bank conflicts
const TILES = (GROUPS + 1u) / 2u;
const BUFFERS = $(1 + DOUBLE)u;

var<workgroup> x_tile: array<vec4<f32>, BUFFERS * ROWS * STRIDE>;
var<workgroup> w_tile: array<vec4<f32>, BUFFERS * COLUMNS * STRIDE>;
#if K % 16 != 0

// Columns beyond K are padding: zero in W, anything in x.
fn masked(value: vec4<f32>, column: u32) -> vec4<f32> {
  return select(vec4<f32>(), value, column + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(K));
}
#endif

// grid (N / COLUMNS, rows / ROWS)
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let first_row = id.y * ROWS;
  let first_output = id.x * COLUMNS;

  // Neighbouring invocations go along a Z curve, so that they share what they load.
  let lane = tid % 32u;
  let tx = tid / 32u % 2u * 8u + ((lane & 1u) | ((lane >> 1u) & 2u) | ((lane >> 2u) & 4u));
  let ty = tid / 64u * 4u + (((lane >> 1u) & 1u) | ((lane >> 2u) & 2u));

#for i in 0..M_TILE
#for j in 0..N_TILE
  var c$i_$j = 0.0;
#endfor
#endfor

  // What this invocation loads of each tile: M_TILE / 4 elements of x, N_TILE / 8 groups of W.
#for l in 0..M_TILE / 4
  let x_row$l = (tid + $lu * 256u) / 4u;
  let x_column$l = tid % 4u;
  let x_from$l = (first_row + x_row$l) * GROUPS * 2u + x_column$l;
  var x_next$l = vec4<f32>();
#endfor
  let w_row = tid / 2u;
  let w_column = tid % 2u;
  let loads_w = w_row < COLUMNS;
  let w_from = min(first_output + w_row, N - 1u) * GROUPS + w_column;
  var w_next = load8(w_from);
#if (K + 7) / 8 % 2 != 0
  var w_valid = true;
#endif

  for (var t = 0u; t <= TILES; t++) {
    // Load tile t while tile t - 1 is in use.
    if (t < TILES) {
#for l in 0..M_TILE / 4
#if K % 16 != 0
      x_next$l = masked(
        x[min(x_from$l + t * 4u, (first_row + x_row$l + 1u) * GROUPS * 2u - 1u)],
        t * 16u + x_column$l * 4u);
#else
      x_next$l = x[x_from$l + t * 4u];
#endif
#endfor
#if (K + 7) / 8 % 2 != 0
      w_valid = 2u * t + w_column < GROUPS;
      w_next = load8(select(0u, w_from + 2u * t, w_valid));
#else
      w_next = load8(w_from + 2u * t);
#endif
    }
    if (t > 0u) {
#if DOUBLE
      let x_base = ((t - 1u) % 2u * ROWS + ty) * STRIDE;
      let w_base = ((t - 1u) % 2u * COLUMNS + tx) * STRIDE;
#else
      let x_base = ty * STRIDE;
      let w_base = tx * STRIDE;
#endif
#for k in 0..4
#for j in 0..N_TILE
      let b$k_$j = w_tile[w_base + $ju * 16u * STRIDE + $ku];
#endfor
#for i in 0..M_TILE
      let a$k_$i = x_tile[x_base + $iu * 16u * STRIDE + $ku];
#for j in 0..N_TILE
      c$i_$j = fma(a$k_$i.x, b$k_$j.x, c$i_$j);
      c$i_$j = fma(a$k_$i.y, b$k_$j.y, c$i_$j);
      c$i_$j = fma(a$k_$i.z, b$k_$j.z, c$i_$j);
      c$i_$j = fma(a$k_$i.w, b$k_$j.w, c$i_$j);
#endfor
#endfor
#endfor
#if not DOUBLE
      workgroupBarrier();
#endif
    }
    if (t < TILES) {
#if DOUBLE
      let x_store = t % 2u * ROWS;
      let w_store = t % 2u * COLUMNS;
#else
      let x_store = 0u;
      let w_store = 0u;
#endif
#for l in 0..M_TILE / 4
      x_tile[(x_store + x_row$l) * STRIDE + x_column$l] = x_next$l;
#endfor
      if (loads_w) {
        var w_low = low4(w_next);
        var w_high = high4(w_next);
#if (K + 7) / 8 % 2 != 0
        w_low = select(vec4<f32>(), w_low, w_valid);
        w_high = select(vec4<f32>(), w_high, w_valid);
#endif
        w_tile[(w_store + w_row) * STRIDE + 2u * w_column] = w_low;
        w_tile[(w_store + w_row) * STRIDE + 2u * w_column + 1u] = w_high;
      }
    }
    workgroupBarrier();
  }

#for i in 0..M_TILE
#for j in 0..N_TILE
  if (first_output + tx + $ju * 16u < N) {
    let n = START + first_output + tx + $ju * 16u;
    let out = (first_row + ty + $iu * 16u) * Y_STRIDE + n;
    var value = c$i_$j;
#if BIAS
    value += bias[n];
#endif
#if RESIDUAL
    value += residual[out];
#endif
    y[out] = value;
  }
#endfor
#endfor
}
