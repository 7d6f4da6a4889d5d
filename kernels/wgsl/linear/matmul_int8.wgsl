// y = epilogue(x W^T) for many rows of x (prefill), as matmul.wgsl, both in int8: W is integers or codes of
// some, x was quantised in the same blocks of 32 columns (quantize.wgsl with SHARED). For each block
//
//   y[m][n] += x_scale[m] (w_scale[n] sum of x w + w_offset[n] sum of x)
//
// where a block may have a scale of W for each half. A block of columns goes through workgroup memory at
// a time.
//
// The epilogue is written out, as is the place in the tile: called as functions (epilogue.wgsl,
// z_curve.wgsl) they cost 1 % of prefill in q4, and 4 % in q6.
//
// Dot products of integers are exact, so only the scales round. q4 becomes int8 on its way into
// workgroup memory, as the upper halves of bytes: 16 times what it means. nf4 becomes two planes of
// int8, of which the second counts 256 times.
// M_TILE is N_SIZE at most, and N_TILE M_SIZE.
#include "activate.wgsl"
#let COPIES = 1
#include "integers.wgsl"
#include "tile_rows.wgsl"
@group(0) @binding(0) var<storage, read> weight: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;  // rows up to a multiple of the tile
@group(0) @binding(2) var<storage, read> scales: array<u32>;
@group(0) @binding(3) var<storage, read> x_scales: array<vec2<f32>>;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;
#let EPILOGUE = 5
#include "matmul_tile.wgsl"

const STRIDE = 3u;  // 32 columns are 2 elements, one more against bank conflicts
const W_STRIDE = $(1 + 2 * PLANES)u;
const SPLIT_BLOCKS = (BLOCKS + SPLITS - 1u) / SPLITS;
#let UNITS = 1 + (WEIGHT == q8)
#let PARTS = 1 + (GROUP_SIZE == 16)  // groups of a block
// Elements of 16 bytes that an invocation loads of each tile, where all have some.
#let X_LOADS = (2 * M_TILE + N_SIZE - 1) / N_SIZE
#let W_LOADS = (UNITS * N_TILE + M_SIZE - 1) / M_SIZE

var<workgroup> x_tile: array<vec4<u32>, BUFFERS * ROWS * STRIDE>;
var<workgroup> w_tile: array<vec4<u32>, BUFFERS * COLUMNS * W_STRIDE>;
var<workgroup> x_scale_tile: array<f32, BUFFERS * ROWS>;
#if not AFFINE
var<workgroup> w_scale_tile: array<f32, BUFFERS * COLUMNS * $(PARTS)u>;
#else
var<workgroup> w_scale_tile: array<vec2<f32>, BUFFERS * COLUMNS * $(PARTS)u>;  // and offsets
var<workgroup> x_sum_tile: array<f32, BUFFERS * ROWS * 2u>;  // of the integers of both halves
#endif

// The group of part p of a block.
fn group_of(block: u32, p: u32) -> u32 {
#if GROUP_SIZE == 16
  return min(2u * block + p, GROUPS - 1u);
#else
  return block / (GROUP_SIZE / 32u);
#endif
}

// grid (N / OUTPUTS, rows / ROWS, SPLITS); GROUPED: (N / OUTPUTS, tiles)
@compute @workgroup_size(SIZE)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
#if TABLE
  fill_table(tid, SIZE);
#endif
  let first_row = id.y * ROWS;
  let first_output = id.x * OUTPUTS;
#if GROUPED
  if (!in_shard(tile_experts[id.y])) {
    return;
  }
  let expert_row = (tile_experts[id.y] - FIRST_EXPERT) * N * $(1 + GATED)u;
#else
  let expert_row = 0u;
#endif
#if BIAS
  let first_bias = expert_row + FIRST_EXPERT * N * $(1 + GATED)u;  // all shards share one
#endif

  // Neighbouring invocations go along a Z curve, so that they share what they load.
  let lane = tid % 32u;
  let part = tid / 32u;  // of 4 by 8 invocations
  let tx = part % (N_SIZE / 8u) * 8u + ((lane & 1u) | ((lane >> 1u) & 2u) | ((lane >> 2u) & 4u));
  let ty = part / (N_SIZE / 8u) * 4u + (((lane >> 1u) & 1u) | ((lane >> 2u) & 2u));

#for i in 0..M_TILE
#for j in 0..N_TILE
  var c$i_$j = 0.0;
#endfor
#endfor

  // Where this invocation loads from and stores to. Neighbours have neighbouring rows.
#for l in 0..X_LOADS
  let x_half$l = (tid + $lu * SIZE) / ROWS;
  let x_row$l = (tid + $lu * SIZE) % ROWS;
  let x_from$l = (x_row(first_row + x_row$l) * 2u + min(x_half$l, 1u)) * BLOCKS;
  var x_next$l = vec4<u32>();
#endfor
#for l in 0..W_LOADS
  let w_half$l = (tid + $lu * SIZE) / COLUMNS;
  let w_row$l = (tid + $lu * SIZE) % COLUMNS;
  let w_from$l = expert_row + weight_row(first_output, w_row$l);
#if WEIGHT == q8
  let w_plane$l = (w_from$l * 2u + min(w_half$l, 1u)) * BLOCKS;
  var w_next$l = vec4<u32>();
#else
  var w_next$l = Integers();
#endif
#endfor
  let x_scales_from = x_row(first_row + min(tid, ROWS - 1u)) * 2u * BLOCKS;
  let w_scale_row = expert_row + weight_row(first_output, tid);
  var x_scale_next = 0.0;
#for p in 0..PARTS
  var w_scale_next$p = RawScale();
#endfor

  let start = id.z * SPLIT_BLOCKS;
  let end = min(start + SPLIT_BLOCKS, BLOCKS);
  for (var t = start; t <= end; t++) {
    // Load tile t while tile t - 1 is in use.
    if (t < end) {
#for l in 0..X_LOADS
#if 2 * M_TILE % N_SIZE != 0
      if (x_half$l < 2u) {
        x_next$l = x[x_from$l + t];
      }
#else
      x_next$l = x[x_from$l + t];
#endif
#endfor
#for l in 0..W_LOADS
#if UNITS * N_TILE % M_SIZE != 0
      if (w_half$l < $(UNITS)u) {
#else
      {
#endif
#if WEIGHT == q8
        w_next$l = weight[w_plane$l + t];
#else
        w_next$l = load_integers(w_from$l, t);
#endif
      }
#endfor
      if (tid < ROWS) {
        x_scale_next = x_scales[x_scales_from + t].x;
      }
      if (tid < COLUMNS) {
#for p in 0..PARTS
        w_scale_next$p = load_scale(w_scale_row, group_of(t, $pu));
#endfor
      }
    }
    if (t > start) {
#if DOUBLE
      let x_base = (t - 1u) % 2u * ROWS + ty;
      let w_base = (t - 1u) % 2u * COLUMNS + tx;
#else
      let x_base = ty;
      let w_base = tx;
#endif
#for q in 0..PLANES
      {
#for j in 0..N_TILE
        let w_at$j = (w_base + $ju * N_SIZE) * W_STRIDE + $(2 * $q)u;
        let w_low$j = w_tile[w_at$j];
        let w_high$j = w_tile[w_at$j + 1u];
#for p in 0..PARTS
        let w_scale$j_$p = w_scale_tile[(w_base + $ju * N_SIZE) * $(PARTS)u + $pu];
#endfor
#endfor
#for i in 0..M_TILE
        let x_low$i = x_tile[(x_base + $iu * M_SIZE) * STRIDE];
        let x_high$i = x_tile[(x_base + $iu * M_SIZE) * STRIDE + 1u];
#if $q == 0
        let x_scale$i = x_scale_tile[x_base + $iu * M_SIZE];
#else
        let x_scale$i = 256.0 * x_scale_tile[x_base + $iu * M_SIZE];
#endif
#if AFFINE
        let x_at$i = (x_base + $iu * M_SIZE) * 2u;
        let x_sums$i = x_scale$i * vec2<f32>(x_sum_tile[x_at$i], x_sum_tile[x_at$i + 1u]);
#endif
#for j in 0..N_TILE
        // 2^23 + 2^22 + sum, made as the bits of a float: cheaper than a conversion (|sum| < 2^22).
        let bits$i_$j = 0x4b400000
          + dot4I8Packed(x_low$i.x, w_low$j.x) + dot4I8Packed(x_low$i.y, w_low$j.y)
          + dot4I8Packed(x_low$i.z, w_low$j.z) + dot4I8Packed(x_low$i.w, w_low$j.w)
#if GROUP_SIZE == 16
          ;
        let high_bits$i_$j = 0x4b400000
#endif
          + dot4I8Packed(x_high$i.x, w_high$j.x) + dot4I8Packed(x_high$i.y, w_high$j.y)
          + dot4I8Packed(x_high$i.z, w_high$j.z) + dot4I8Packed(x_high$i.w, w_high$j.w);
#if AFFINE
        c$i_$j = fma(bitcast<f32>(bits$i_$j) - 12582912.0, x_scale$i * w_scale$j_0.x, c$i_$j);
#else
        c$i_$j = fma(bitcast<f32>(bits$i_$j) - 12582912.0, x_scale$i * w_scale$j_0, c$i_$j);
#endif
#if GROUP_SIZE == 16 and AFFINE
        c$i_$j = fma(bitcast<f32>(high_bits$i_$j) - 12582912.0, x_scale$i * w_scale$j_1.x, c$i_$j);
#elif GROUP_SIZE == 16
        c$i_$j = fma(bitcast<f32>(high_bits$i_$j) - 12582912.0, x_scale$i * w_scale$j_1, c$i_$j);
#endif
#if GROUP_SIZE == 16 and AFFINE and $q == 0
        c$i_$j += x_sums$i.x * w_scale$j_0.y + x_sums$i.y * w_scale$j_1.y;
#elif AFFINE and $q == 0
        c$i_$j = fma(x_sums$i.x + x_sums$i.y, w_scale$j_0.y, c$i_$j);
#endif
#endfor
#endfor
      }
#endfor
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
#if 2 * M_TILE % N_SIZE != 0
      if (x_half$l < 2u) {
#else
      {
#endif
        x_tile[(x_store + x_row$l) * STRIDE + x_half$l] = x_next$l;
#if AFFINE
        x_sum_tile[(x_store + x_row$l) * 2u + x_half$l] = f32(
          dot4I8Packed(x_next$l.x, 0x01010101u) + dot4I8Packed(x_next$l.y, 0x01010101u)
            + dot4I8Packed(x_next$l.z, 0x01010101u) + dot4I8Packed(x_next$l.w, 0x01010101u));
#endif
      }
#endfor
#for l in 0..W_LOADS
#if UNITS * N_TILE % M_SIZE != 0
      if (w_half$l < $(UNITS)u) {
#else
      {
#endif
        let w_at$l = (w_store + w_row$l) * W_STRIDE;
#if WEIGHT == q8
        w_tile[w_at$l + w_half$l] = w_next$l;
#elif PLANES == 2
        let first$l = low_int8(w_next$l);
        let second$l = high_int8(w_next$l);
#for q in 0..PLANES
        w_tile[w_at$l + $(2 * $q)u] = first$l[$q];
        w_tile[w_at$l + $(2 * $q)u + 1u] = second$l[$q];
#endfor
#else
        w_tile[w_at$l] = low_int8(w_next$l);
        w_tile[w_at$l + 1u] = high_int8(w_next$l);
#endif
      }
#endfor
      if (tid < ROWS) {
        x_scale_tile[x_store + tid] = x_scale_next;
      }
      if (tid < COLUMNS) {
#for p in 0..PARTS
        let w_scale$p = widen_scale(w_scale_next$p, group_of(t, $pu));
#if AFFINE
        w_scale_tile[(w_store + tid) * $(PARTS)u + $pu] = w_scale$p / vec2<f32>(1.0, INT8_UNIT);
#else
        w_scale_tile[(w_store + tid) * $(PARTS)u + $pu] = w_scale$p.x;
#endif
#endfor
      }
    }
    workgroupBarrier();
  }

#for i in 0..M_TILE
  let y_row$i = y_row(first_row + ty + $iu * M_SIZE);
#for j in 0..N_TILE / (1 + GATED)
  if (first_output + tx + $ju * N_SIZE < N && is_written(y_row$i)) {
    let n = START + first_output + tx + $ju * N_SIZE;
    let out = (id.z * SPLIT_ROWS + y_row$i) * Y_STRIDE + n;
#if GATED
    var gate = INT8_UNIT * c$i_$j;
    var up = INT8_UNIT * c$i_$($j + N_TILE / 2);
#if BIAS
    gate += bias[first_bias + n];
    up += bias[first_bias + N + n];
#endif
    var value = gated(gate, up);
#else
    var value = INT8_UNIT * c$i_$j;
#if BIAS
    value += bias[first_bias + n];
#endif
#if SCALE != 1
    value *= SCALE;
#endif
#if ACTIVATION != none
    value = activate(value);
#endif
#endif
#if RESIDUAL
    value += residual[out];
#endif
    y[out] = value;
  }
#endfor
#endfor
}
