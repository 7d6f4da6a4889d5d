// y = epilogue(x W^T) for many rows of x (prefill), in f32: x is [rows][K], W [N][K], or [2 N][K] with GATED,
// and y [rows][N]. Tiles of x and W go through workgroup memory; matmul_tile.wgsl says what else W may hold.
// X_HEAD, Y_HEAD: W holds heads one below the other, of N outputs each, and every head has columns of
// its own of x and of y.
//
// Tiles are stored as loaded, [row][16 columns] in 16-byte elements with an odd row stride, so that
// neither stores nor loads meet bank conflicts; the next tile is in flight while this one is used.
#include "rolled.wgsl"
#include "weight_group.wgsl"
#let EPILOGUE = 3 + SCALES_BOUND
#include "matmul_tile.wgsl"
#include "epilogue.wgsl"
#include "z_curve.wgsl"
// @param X_STRIDE u32            this and the next two are multiples of 4
// @param X_OFFSET u32
// @param X_HEAD u32              columns of x from one head to the next; 0 where there are no heads
// @param Y_HEAD u32              and of y
// M_TILE is a multiple of N_SIZE / 4.
@group(0) @binding(0) var<storage, read> weight: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;  // rows up to a multiple of the tile
#if SCALES_BOUND
@group(0) @binding(2) var<storage, read> scales: array<u32>;
#endif
@group(0) @binding($(2 + SCALES_BOUND)) var<storage, read_write> y: array<f32>;

const EIGHTS = (K + 7u) / 8u;
const STRIDE = 5u;  // 16 columns are 4 elements, one more against bank conflicts
const TILES = (EIGHTS + 1u) / 2u;
const SPLIT_TILES = (TILES + SPLITS - 1u) / SPLITS;
// How much an invocation loads of each tile: elements of x, groups of W (where all invocations have some).
#let X_LOADS = (4 * M_TILE + N_SIZE - 1) / N_SIZE
#let W_LOADS = (2 * N_TILE + M_SIZE - 1) / M_SIZE
// Columns in vec4 whose products are written out: all on GPUs, which are up to 12 % slower else.
#let UNROLLED = 4 - 3 * SOFTWARE

var<workgroup> x_tile: array<vec4<f32>, BUFFERS * ROWS * STRIDE>;
var<workgroup> w_tile: array<vec4<f32>, BUFFERS * COLUMNS * STRIDE>;
#if K % 16 != 0

// Columns beyond K are padding: zero in W, anything in x.
fn masked(value: vec4<f32>, column: u32) -> vec4<f32> {
  return select(vec4<f32>(), value, column + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(K));
}
#endif

// The groups of eight columns of a tile; again the last one beyond it, where x is masked.
fn group_of(tile: u32, eight: u32) -> u32 {
#if (K + 7) / 8 % 2 != 0
  return min(2u * tile + eight, EIGHTS - 1u);
#else
  return 2u * tile + eight;
#endif
}

// grid (N / OUTPUTS, rows / ROWS, heads of the shard or SPLITS); GROUPED: (N / OUTPUTS, tiles)
@compute @workgroup_size(SIZE)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  fill_tables(tid, SIZE);
  let first_row = id.y * ROWS;
  let first_output = id.x * OUTPUTS;
  let head = id.z / SPLITS;
  let split = id.z % SPLITS;
#if GROUPED
  if (!in_shard(tile_experts[id.y])) {
    return;
  }
  let own_row = (tile_experts[id.y] - FIRST_EXPERT) * N * $(1 + GATED)u;
#else
  let own_row = head * N;
#endif
  let first_bias = own_row + FIRST_EXPERT * N * $(1 + GATED)u;  // all shards share one

  let place = z_curve(tid);
  let tx = place.x;
  let ty = place.y;

#for i in 0..M_TILE
#for j in 0..N_TILE
  var c$i_$j = 0.0;
#endfor
#endfor

#for l in 0..X_LOADS
  let x_row$l = (tid + $lu * SIZE) / 4u;
  let x_column$l = tid % 4u;
  let x_from$l = (x_row(first_row + x_row$l) * X_STRIDE + X_OFFSET + head * X_HEAD) / 4u;
  var x_next$l = vec4<f32>();
#endfor
#for l in 0..W_LOADS
  let w_row$l = (tid + $lu * SIZE) / 2u;
  let w_column$l = tid % 2u;
  let w_from$l = own_row + weight_row(first_output, w_row$l);
  var w_next$l = Stored();
#endfor

  let start = split * SPLIT_TILES;
  let end = min(start + SPLIT_TILES, TILES);
  for (var t = start; t <= end; t++) {
    // Load tile t while tile t - 1 is in use.
    if (t < end) {
#for l in 0..X_LOADS
#if K % 16 != 0
      x_next$l = masked(
        x[x_from$l + min(t * 4u + x_column$l, (K + 3u) / 4u - 1u)],
        t * 16u + x_column$l * 4u);
#else
      x_next$l = x[x_from$l + t * 4u + x_column$l];
#endif
#endfor
#for l in 0..W_LOADS
      w_next$l = load_stored(w_from$l, group_of(t, w_column$l));
#endfor
    }
    if (t > start) {
#if DOUBLE
      let x_base = ((t - 1u) % 2u * ROWS + ty) * STRIDE;
      let w_base = ((t - 1u) % 2u * COLUMNS + tx) * STRIDE;
#else
      let x_base = ty * STRIDE;
      let w_base = tx * STRIDE;
#endif
      for (var first = 0u; first < rolled(4u, id.z); first += $(UNROLLED)u) {
#for k in 0..UNROLLED
#for j in 0..N_TILE
        let b$k_$j = w_tile[w_base + $ju * N_SIZE * STRIDE + first + $ku];
#endfor
#for i in 0..M_TILE
        let a$k_$i = x_tile[x_base + $iu * M_SIZE * STRIDE + first + $ku];
#for j in 0..N_TILE
        c$i_$j = fma(a$k_$i.x, b$k_$j.x, c$i_$j);
        c$i_$j = fma(a$k_$i.y, b$k_$j.y, c$i_$j);
        c$i_$j = fma(a$k_$i.z, b$k_$j.z, c$i_$j);
        c$i_$j = fma(a$k_$i.w, b$k_$j.w, c$i_$j);
#endfor
#endfor
#endfor
      }
#if not DOUBLE
      workgroupBarrier();
#endif
    }
    if (t < end) {
#if DOUBLE
      let x_store = t % 2u * ROWS;
      let w_store = t % 2u * COLUMNS;
#else
      let x_store = 0u;
      let w_store = 0u;
#endif
#for l in 0..X_LOADS
      x_tile[(x_store + x_row$l) * STRIDE + x_column$l] = x_next$l;
#endfor
#for l in 0..W_LOADS
      if (w_row$l < COLUMNS) {
        let w_wide$l = widen_group(w_next$l, group_of(t, w_column$l));
        w_tile[(w_store + w_row$l) * STRIDE + 2u * w_column$l] = w_wide$l[0];
        w_tile[(w_store + w_row$l) * STRIDE + 2u * w_column$l + 1u] = w_wide$l[1];
      }
#endfor
    }
    workgroupBarrier();
  }

#for i in 0..M_TILE
  let y_row$i = y_row(first_row + ty + $iu * M_SIZE);
#for j in 0..N_TILE / (1 + GATED)
  if (first_output + tx + $ju * N_SIZE < N && is_written(y_row$i)) {
    let n = START + first_output + tx + $ju * N_SIZE;
    let out = (split * SPLIT_ROWS + y_row$i) * Y_STRIDE + head * Y_HEAD + n;
    y[out] = epilogue(c$i_$j, c$i_$($j + GATED * N_TILE / 2), first_bias + n, out);
  }
#endfor
#endfor
}
