// y = epilogue(x W^T) for many rows of x, as matmul.wgsl, by small matrices of f16 (matrix.wgsl): x is [rows][K]
// in f16, each row with an f32 scale (half_rows.wgsl), and W becomes f16 on its way into workgroup memory. Sums
// are f32.
//
// A workgroup has ROWS rows of x times COLUMNS rows of W, and each of its subgroups SUB_ROWS x SUB_COLUMNS of
// these sums, in registers. DEPTH columns go through workgroup memory at a time, while the next ones are on
// their way into registers.
#include "weight_group.wgsl"
#let EPILOGUE = 4 + SCALES_BOUND + ROW_SCALES
#include "matmul_outputs.wgsl"
#include "epilogue.wgsl"
#include "crossed_halves.wgsl"
#include "half_scale.wgsl"
#include "matrix.wgsl"
// @param ROWS u32                multiples of SUB_ROWS, SUB_COLUMNS and 32
// @param COLUMNS u32
// @param DEPTH u32
// @param SUB_ROWS u32            multiples of MATRIX_M, MATRIX_N and MATRIX_K
// @param SUB_COLUMNS u32
// @param AHEAD u32               tiles that are on their way
// @param X_WIDTH u32             values of a row of x: K, or those of all heads
// @param X_OFFSET u32            this and the next are multiples of 8
// @param X_HEAD u32              columns of x from one head to the next (matmul.wgsl); 0 where there are no heads
// @param Y_HEAD u32              and of y
// @param ROW_SCALES bool         rows of W have powers of two (row_scales.wgsl), without which f16 does not hold them
@group(0) @binding(0) var<storage, read> weight: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;  // rows up to a multiple of the tile
#if SCALES_BOUND
@group(0) @binding(2) var<storage, read> scales: array<u32>;
#endif
@group(0) @binding($(2 + SCALES_BOUND)) var<storage, read> x_scales: array<f32>;
#if ROW_SCALES
@group(0) @binding($(3 + SCALES_BOUND)) var<storage, read> row_scales: array<f32>;
#endif
@group(0) @binding($(3 + SCALES_BOUND + ROW_SCALES)) var<storage, read_write> y: array<f32>;

#let SIZE = ROWS / SUB_ROWS * COLUMNS / SUB_COLUMNS * LANES
#let M_MATRICES = SUB_ROWS / MATRIX_M
#let N_MATRICES = SUB_COLUMNS / MATRIX_N
// The columns that are loaded at once: eight or, of integers, a block of them.
#let BY_BLOCK = SCALES_BOUND and not CODES
#let UNIT = 8 + 24 * BY_BLOCK
#let UNITS = DEPTH / UNIT
// An invocation loads the same columns of several rows, so far apart that its places differ by constants:
// those of each row by itself would take too many registers.
#let X_STEP = SIZE * 8 / DEPTH
#let W_STEP = SIZE / UNITS
#let X_LOADS = (ROWS + X_STEP - 1) / X_STEP
#let W_LOADS = (COLUMNS + W_STEP - 1) / W_STEP
#let WHOLE_TILES = N % (COLUMNS / (1 + GATED)) == 0
const OUTPUTS = COLUMNS / $(1 + GATED)u;
const X_ELEMENTS = (X_WIDTH + 63u) / 64u * 8u;  // of a row of x, zeros behind its columns
const W_UNITS = (K + $(UNIT - 1)u) / $(UNIT)u;  // of a row of W
const STEPS = (K + DEPTH - 1u) / DEPTH;
const SPLIT_STEPS = (STEPS + SPLITS - 1u) / SPLITS;
// Whether no workgroup comes to steps behind its last one, which count as zeros.
#let ALL_STEPS = (K + DEPTH - 1) / DEPTH
#let WHOLE = K % DEPTH == 0 and ALL_STEPS % SPLITS == 0 and ALL_STEPS / SPLITS % AHEAD == 0
// The rows of a tile lie an element further apart than they need to: no bank conflicts.
const POOL_STRIDE = DEPTH / 8u + 1u;
const W_PLACE = ROWS * POOL_STRIDE;
// At the end, sums of one matrix from each row of subgroups at a time.
const SUM_STRIDE = COLUMNS / 4u + 1u;
const SUM_ROWS = ROWS / SUB_ROWS * MATRIX_M;

var<workgroup> pool: array<vec4<u32>, max((ROWS + COLUMNS) * POOL_STRIDE, SUM_ROWS * SUM_STRIDE)>;

#if BY_BLOCK
#let PARTS = 1 + (GROUP_SIZE == 16)  // groups of a block
#let PLAIN = MATRIX == subgroup and SCALES == f16 and OFFSET == none and not ROW_SCALES
#let NIBBLES = PLAIN and WEIGHT == q4
#let BYTES_OF_8 = PLAIN and WEIGHT == q8

struct Block {
  integers: Integers,
#for q in 0..PARTS
  scale$q: RawScale,
#endfor
}

fn group_of(block: u32, part: u32) -> u32 {
#if GROUP_SIZE == 16
  return min(2u * block + part, GROUPS - 1u);
#else
  return block / (GROUP_SIZE / 32u);
#endif
}

#if NIBBLES or BYTES_OF_8
#if NIBBLES
const MASK = 0x000f000fu;
const ZERO = 1032.0h;
#else
const MASK = 0x00ff00ffu;
const ZERO = 1152.0h;
#endif

// Integers of four or eight bits, with their sign bit turned, at the lower ends of eight bytes, times a scale. As the
// last bits of an f16 they stand for 1024 and them; all values are those that f32 would give.
fn eight_integers(bytes: vec2<u32>, scale: f32) -> vec4<u32> {
  let pairs = (vec4<u32>(bytes.x, bytes.x >> 8u, bytes.y, bytes.y >> 8u) & vec4<u32>(MASK))
    | vec4<u32>(0x64006400u);
  let factor = vec2<f16>(f16(scale));
  return vec4<u32>(
#for i in 0..4
    bitcast<u32>((bitcast<vec2<f16>>(pairs[$i]) - vec2<f16>(ZERO)) * factor),
#endfor
  );
}
#else
fn eight(integers: vec2<u32>, scale: vec2<f32>) -> vec4<u32> {
  return crossed_halves(
    INT8_UNIT * scale.x * vec4<f32>(unpack4xI8(integers.x)) + scale.y,
    INT8_UNIT * scale.x * vec4<f32>(unpack4xI8(integers.y)) + scale.y);
}
#endif
#endif

#if ROW_SCALES
fn exponent_of(power: f32) -> i32 {
  return i32(bitcast<u32>(power) >> 23u) - 127;
}

fn power_of_two(exponent: i32) -> f32 {
  return bitcast<f32>(u32(exponent + 127) << 23u);
}
#endif

// A sum times the scales of its rows of x and W.
fn scaled(sum: f32, x_scale: f32, w_row: u32) -> f32 {
#if ROW_SCALES
  // In two steps, as the product of both scales may be beyond f32 where the result is not.
  let exponent = exponent_of(x_scale) + exponent_of(row_scales[w_row]);
  return sum * power_of_two(exponent / 2) * power_of_two(exponent - exponent / 2);
#else
  return x_scale * sum;
#endif
}

// The unit of a row of W that an invocation loads in step t; beyond the end of the row its last one again.
fn unit_of(t: u32, unit: u32) -> u32 {
#if K % DEPTH == 0
  return t * $(UNITS)u + unit;
#else
  return min(t * $(UNITS)u + unit, W_UNITS - 1u);
#endif
}

// grid (N / OUTPUTS, rows / ROWS, heads or SPLITS); GROUPED: (N / OUTPUTS, tiles)
@compute @workgroup_size($(SIZE))
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  fill_tables(tid, $(SIZE)u);
  let first_row = id.y * ROWS;
  let first_output = id.x * OUTPUTS;
  let head = id.z / SPLITS;
  let split = id.z % SPLITS;
#if GROUPED
  if (!in_shard(tile_experts[id.y])) {
    return;
  }
  let expert_row = (tile_experts[id.y] - FIRST_EXPERT) * N * $(1 + GATED)u;
#elif X_HEAD > 0
  let expert_row = head * N;
#else
  let expert_row = 0u;
#endif
#if BIAS
  let first_bias = expert_row + FIRST_EXPERT * N * $(1 + GATED)u;  // all shards share one
#else
  let first_bias = 0u;
#endif
  let lane = tid % LANES;
  let subgroup_row = tid / LANES / (COLUMNS / SUB_COLUMNS);
  let subgroup_column = tid / LANES % (COLUMNS / SUB_COLUMNS);

#for i in 0..M_MATRICES
#for j in 0..N_MATRICES
  var sum$i_$j = Sum();
#endfor
#endfor

  let x_head = (X_OFFSET + head * X_HEAD) / 8u;
  let x_row0 = tid / (DEPTH / 8u);
  let x_column = tid % (DEPTH / 8u);
#for l in 0..X_LOADS
#if GROUPED
  let x_from$l = x_row(first_row + min(x_row0 + $($l * X_STEP)u, ROWS - 1u)) * X_ELEMENTS + x_head;
#else
  let x_from$l = (first_row + x_row0) * X_ELEMENTS + $($l * X_STEP)u * X_ELEMENTS + x_head;
#endif
#for u in 0..AHEAD
  var x_next$u_$l = vec4<u32>();
#endfor
#endfor
  let w_row0 = tid / $(UNITS)u;
  let w_unit = tid % $(UNITS)u;
#for l in 0..W_LOADS
#if not WHOLE_TILES or COLUMNS % W_STEP != 0 or (GATED and COLUMNS / 2 % W_STEP != 0)
  let w_from$l = expert_row + weight_row(first_output, w_row0 + $($l * W_STEP)u);
#elif GATED and $l * W_STEP >= COLUMNS / 2
  let w_from$l = expert_row + first_output + w_row0 + ($($l * W_STEP)u - OUTPUTS + N);
#else
  let w_from$l = expert_row + first_output + w_row0 + $($l * W_STEP)u;
#endif
#if ROW_SCALES
  let w_factor$l = power_of_two(-exponent_of(row_scales[w_from$l]));
#endif
#for u in 0..AHEAD
#if BY_BLOCK
  var w_next$u_$l = Block();
#else
  var w_next$u_$l = Stored();
#endif
#endfor
#endfor

  let start = split * SPLIT_STEPS;
  let end = min(start + SPLIT_STEPS, STEPS);
  // AHEAD tiles are on their way, each in registers of its own: the first half of these passes asks for the first
  // tiles, the other is the loop. Without conditions around what is held in registers: with them the sums went to
  // memory, and a product took twice as long.
#for p in 0..2 * AHEAD
#if $p < AHEAD
  let next$p = min(start + $pu, STEPS - 1u);
#else
#if $p == AHEAD
  for (var t = start; t < end; t += $(AHEAD)u) {
#endif
    let now$p = t + $($p - AHEAD)u;
    workgroupBarrier();
#for l in 0..X_LOADS
#if ROWS % X_STEP != 0
    if (x_row0 + $($l * X_STEP)u < ROWS) {
#else
    {
#endif
      let place = (x_row0 + $($l * X_STEP)u) * POOL_STRIDE + x_column;
#if WHOLE
      pool[place] = x_next$($p - AHEAD)_$l;
#else
      // Beyond the columns of W there are some of its next row, and beyond the steps any.
      let inside = now$p * (DEPTH / 8u) + x_column < X_ELEMENTS && now$p < end;
      pool[place] = select(vec4<u32>(), x_next$($p - AHEAD)_$l, inside);
#endif
    }
#endfor
    let unit_now$p = unit_of(now$p, w_unit);
#for l in 0..W_LOADS
#if COLUMNS % W_STEP != 0
    if (w_row0 + $($l * W_STEP)u < COLUMNS) {
#else
    {
#endif
      let place =
        W_PLACE + (w_row0 + $($l * W_STEP)u) * POOL_STRIDE + w_unit * $(UNIT / 8)u;
#if BY_BLOCK
#for q in 0..PARTS
#if ROW_SCALES
      let scale$q = w_factor$l
        * widen_scale(w_next$($p - AHEAD)_$l.scale$q, group_of(unit_now$p, $qu));
#else
      let scale$q = widen_scale(w_next$($p - AHEAD)_$l.scale$q, group_of(unit_now$p, $qu));
#endif
#endfor
#if NIBBLES
      // A nibble n whose upper bit is turned is n - 8 in two's complement.
      let nibbles = w_next$($p - AHEAD)_$l.integers ^ vec4<u32>(0x88888888u);
      pool[place] = eight_integers(nibbles.xy, scale0.x);
      pool[place + 1u] = eight_integers(nibbles.zw, scale0.x);
      let upper = nibbles >> vec4<u32>(4u);
      pool[place + 2u] = eight_integers(upper.xy, scale$(PARTS - 1).x);
      pool[place + 3u] = eight_integers(upper.zw, scale$(PARTS - 1).x);
#elif BYTES_OF_8
      let low = w_next$($p - AHEAD)_$l.integers.low ^ vec4<u32>(0x80808080u);
      let high = w_next$($p - AHEAD)_$l.integers.high ^ vec4<u32>(0x80808080u);
      pool[place] = eight_integers(low.xy, scale0.x);
      pool[place + 1u] = eight_integers(low.zw, scale0.x);
      pool[place + 2u] = eight_integers(high.xy, scale$(PARTS - 1).x);
      pool[place + 3u] = eight_integers(high.zw, scale$(PARTS - 1).x);
#else
      let low = low_int8(w_next$($p - AHEAD)_$l.integers);
      let high = high_int8(w_next$($p - AHEAD)_$l.integers);
      pool[place] = eight(low.xy, scale0);
      pool[place + 1u] = eight(low.zw, scale0);
      pool[place + 2u] = eight(high.xy, scale$(PARTS - 1));
      pool[place + 3u] = eight(high.zw, scale$(PARTS - 1));
#endif
#else
      let wide = widen_group(w_next$($p - AHEAD)_$l, unit_now$p);
#if ROW_SCALES
      pool[place] = crossed_halves(w_factor$l * wide[0], w_factor$l * wide[1]);
#else
      pool[place] = crossed_halves(wide[0], wide[1]);
#endif
#endif
    }
#endfor
    workgroupBarrier();
    let next$p = min(t + $pu, STEPS - 1u);
#endif
#for l in 0..X_LOADS
#if K % DEPTH == 0
    x_next$($p % AHEAD)_$l = x[x_from$l + next$p * (DEPTH / 8u) + x_column];
#else
    x_next$($p % AHEAD)_$l = x[x_from$l + min(next$p * (DEPTH / 8u) + x_column, X_ELEMENTS - 1u)];
#endif
#endfor
    let unit_next$p = unit_of(next$p, w_unit);
#for l in 0..W_LOADS
#if BY_BLOCK
    w_next$($p % AHEAD)_$l.integers = load_integers(w_from$l, unit_next$p);
#for q in 0..PARTS
    w_next$($p % AHEAD)_$l.scale$q = load_scale(w_from$l, group_of(unit_next$p, $qu));
#endfor
#else
    w_next$($p % AHEAD)_$l = load_stored(w_from$l, unit_next$p);
#endif
#endfor
#if $p >= AHEAD
#for k in 0..DEPTH / MATRIX_K
#for i in 0..M_MATRICES
    let left$p_$k_$i = load_left(
      (subgroup_row * SUB_ROWS + $iu * MATRIX_M) * POOL_STRIDE + $ku * (MATRIX_K / 8u),
      POOL_STRIDE);
#endfor
#for j in 0..N_MATRICES
    let right$p_$k_$j = load_right(
      W_PLACE + (subgroup_column * SUB_COLUMNS + $ju * MATRIX_N) * POOL_STRIDE
        + $ku * (MATRIX_K / 8u),
      POOL_STRIDE);
#for i in 0..M_MATRICES
    sum$i_$j = multiply(left$p_$k_$i, right$p_$k_$j, sum$i_$j, lane);
#endfor
#endfor
#endfor
#endif
#endfor
  }
  workgroupBarrier();

#for i in 0..M_MATRICES
#for j in 0..N_MATRICES
  store_sum(
    subgroup_row * MATRIX_M * SUM_STRIDE + (subgroup_column * SUB_COLUMNS + $ju * MATRIX_N) / 4u,
    SUM_STRIDE, sum$i_$j, lane);
#endfor
  workgroupBarrier();
  for (var at = tid; at < SUM_ROWS * OUTPUTS; at += $(SIZE)u) {
    let sum_row = at / OUTPUTS;
    let output = at % OUTPUTS;
    let row = first_row + sum_row / MATRIX_M * SUB_ROWS + $iu * MATRIX_M + sum_row % MATRIX_M;
    let y_at = y_row(row);
    if (first_output + output < N && is_written(y_at)) {
      let x_scale = x_scales[x_row(row)];
      let w_row = expert_row + first_output + output;
      let place = sum_row * SUM_STRIDE;
      let sum = scaled(
        bitcast<vec4<f32>>(pool[place + output / 4u])[output % 4u], x_scale, w_row);
#if GATED
      let up_at = OUTPUTS + output;
      let up = scaled(
        bitcast<vec4<f32>>(pool[place + up_at / 4u])[up_at % 4u], x_scale, w_row + N);
#else
      let up = 0.0;
#endif
      let n = START + first_output + output;
      let out = (split * SPLIT_ROWS + y_at) * Y_STRIDE + head * Y_HEAD + n;
      y[out] = epilogue(sum, up, first_bias + n, out);
    }
  }
  workgroupBarrier();
#endfor
}
