// y = activated(x W^T + bias) factor + residual, as matmul_vec.wgsl, for 2 to 64 rows of x: each weight goes
// from memory straight into registers, once for all rows of x.
//
// K_LANES invocations lie along the columns, a chunk each; N_LANES, which have other rows of W, share each
// of these chunks of x, and are neighbours, so that they read it at once. All of them are a team, lanes of
// one subgroup. A lane has N_TILE rows of W by M_TILE rows of x. A workgroup has N_TEAMS along the rows of
// W, K_TEAMS along the columns, and as many along the rows of x as there are. SPLITS workgroups share
// the columns too: each writes its sums below those of the one before, and matmul_combine does the rest.
//
// x is f32, or int8 with a scale for each block (quantize_block.wgsl, X_SCALES rows). The factor is as in
// matmul_vec.wgsl.
#include "grid.wgsl"
#include "weight.wgsl"
#include "scales.wgsl"
#let COPIES = 1
#include "integers.wgsl"
#include "step.wgsl"
// @param START u32               the first output that this shard of W holds
// @param Y_STRIDE u32
// @param ROWS u32                rows of x, at most
// @param M_TILE u32              rows of x per lane
// @param N_TILE u32              rows of W per lane, even with GATED
// @param K_LANES u32             a power of two, as is the next; the product is a subgroup at most
// @param N_LANES u32
// @param N_TEAMS u32
// @param K_TEAMS u32
// @param STAGED bool             x goes through workgroup memory; not int8
// @param SPLITS u32              of more than one: no factors, GATED, BIAS, RESIDUAL
// @param SPLIT_ROWS u32          rows that each split has in y
// @param SCALE_ROWS u32          rows that x_scales has
// @param STOPS bool              rows of x are those of the step: one that has stopped writes nothing
// @param GATED bool
// @param FACTORS bool
// @param SIGMOID_GATE bool       not with FACTORS; their gates and factors are:
// @param GATE_STRIDE u32
// @param GATE_OFFSET u32
@group(0) @binding(0) var<storage, read> weight: array<vec4<u32>>;
#if INTEGERS
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
#else
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
#endif
#let SCALED = INTEGERS or CODES
#if SCALED
@group(0) @binding(2) var<storage, read> scales: array<u32>;
#endif
#let FOURS = M_TILE % 4 == 0
#if INTEGERS and FOURS
@group(0) @binding(3) var<storage, read> x_scales: array<vec4<f32>>;
#elif INTEGERS
@group(0) @binding(3) var<storage, read> x_scales: array<f32>;
#endif
#let EPILOGUE = 2 + SCALED + INTEGERS + STOPS
#if STOPS
@group(0) @binding($(EPILOGUE - 1)) var<storage, read> step: Step;
#endif
#include "epilogue.wgsl"
#let GATES = SIGMOID_GATE or FACTORS
#if GATES
@group(0) @binding($(EPILOGUE + BIAS + RESIDUAL)) var<storage, read> gates: array<f32>;
#endif
@group(0) @binding($(EPILOGUE + BIAS + RESIDUAL + GATES)) var<storage, read_write> y: array<f32>;

const TEAM = K_LANES * N_LANES;
const M_TEAMS = (ROWS + M_TILE - 1u) / M_TILE;
const WG = TEAM * N_TEAMS * K_TEAMS * M_TEAMS;
const M_ROWS = M_TEAMS * M_TILE;            // rows of x of a workgroup,
const W_ROWS = N_LANES * N_TEAMS * N_TILE;  // and of W
const OUTPUTS = W_ROWS / $(1 + GATED)u;
const STEP = K_LANES * K_TEAMS;  // chunks that a workgroup multiplies at a time
const SPLIT_STEPS = (CHUNKS + STEP * SPLITS - 1u) / (STEP * SPLITS);
#if INTEGERS
#let COLUMNS = 32  // of a chunk
const CHUNKS = BLOCKS;  // of a row
#else
#let EIGHTS = 1 + CODES
#let COLUMNS = 8 * EIGHTS
const CHUNKS = (K + $(COLUMNS - 1)u) / $(COLUMNS)u;
const ROW_FOURS = (K + 7u) / 8u * 2u;  // of x
#endif
// Whether all steps of all lanes have a chunk.
#let EVEN = (K + COLUMNS - 1) / COLUMNS % (K_LANES * K_TEAMS * SPLITS) == 0
#let VALUES = M_TILE * N_TILE
#let ROUNDS = log2(K_LANES)
// In so many of these a lane passes half of its values on; then their number is odd.
#let EVEN_TWICE = (VALUES % 2 == 0) + (VALUES % 4 == 0) + (VALUES % 8 == 0)
#let HALVINGS = min(ROUNDS, EVEN_TWICE + (VALUES % 16 == 0) + (VALUES % 32 == 0))
#let LEFT = VALUES / (1 << HALVINGS)
#if INTEGERS
const UNIT: f32 = INT8_UNIT;  // what sums are multiples of
#elif CODES
const UNIT = CODE;
#else
const UNIT = 1.0;
#endif

var<workgroup> partial: array<f32, K_TEAMS * M_ROWS * W_ROWS>;
#if STAGED
const IN_ROW = STEP * $(2 * EIGHTS)u;  // vec4s of a row of x that are staged,
const TILE = M_ROWS * IN_ROW;          // and of all rows
#let LOADS = (M_TILE * 2 * EIGHTS + N_LANES * N_TEAMS - 1) / (N_LANES * N_TEAMS)
var<workgroup> x_tile: array<vec4<f32>, 2u * TILE>;  // this step's, and the next one's
#endif

fn total(row: u32, w_row: u32) -> f32 {
  var sum = 0.0;
#for k in 0..K_TEAMS
  sum += partial[($ku * M_ROWS + row) * W_ROWS + w_row];
#endfor
  return UNIT * sum;
}

// A chunk of a row of W as it is stored: what is on its way takes few registers.
#if INTEGERS
struct Stored {
  integers: Integers,
  scale: RawScale,
#if GROUP_SIZE == 16
  high_scale: RawScale,
#endif
}

fn load_stored(row: u32, i: u32) -> Stored {
#if GROUP_SIZE == 16
  return Stored(
    load_integers(row, i), load_scale(row, 2u * i), load_scale(row, min(2u * i + 1u, GROUPS - 1u)));
#else
  return Stored(load_integers(row, i), load_scale(row, i / (GROUP_SIZE / 32u)));
#endif
}
#include "dot_int8.wgsl"
#if PLANES == 2

fn dot_half(w: Int8, x: vec4<u32>) -> f32 {
  return f32(dot16(w[0], x) + 256 * dot16(w[1], x));
}

fn dot_both(low: Int8, x_low: vec4<u32>, high: Int8, x_high: vec4<u32>) -> f32 {
  return dot_half(low, x_low) + dot_half(high, x_high);
}
#else

// 2^23 + 2^22 + sum, made as the bits of a float: cheaper than a conversion (|sum| < 2^22).
fn dot_half(w: vec4<u32>, x: vec4<u32>) -> f32 {
  return bitcast<f32>(0x4b400000 + dot16(w, x)) - 12582912.0;
}

fn dot_both(low: vec4<u32>, x_low: vec4<u32>, high: vec4<u32>, x_high: vec4<u32>) -> f32 {
  return bitcast<f32>(0x4b400000 + dot16(low, x_low) + dot16(high, x_high)) - 12582912.0;
}
#endif
#elif CODES
struct Stored {
  codes: vec4<u32>,
  scale: RawScale,
}

fn load_stored(row: u32, i: u32) -> Stored {
  let scale = load_scale(row, i * 16u / GROUP_SIZE);
  return Stored(weight[row * CHUNKS + i], scale);
}

fn widened(w: Stored, i: u32) -> array<vec4<f32>, 4> {
  let scale = widen_scale(w.scale, i * 16u / GROUP_SIZE).x;
  return array<vec4<f32>, 4>(
    scale * low4(w.codes.xy), scale * high4(w.codes.xy),
    scale * low4(w.codes.zw), scale * high4(w.codes.zw));
}
#else
alias Stored = Packed8;

fn load_stored(row: u32, i: u32) -> Stored {
  return load8(row * CHUNKS + i);
}

fn widened(w: Stored, i: u32) -> array<vec4<f32>, 2> {
  return array<vec4<f32>, 2>(low4(w), high4(w));
}
#endif
#if not INTEGERS

// Columns beyond K are padding: zero in W, anything in x.
fn masked(value: vec4<f32>, column: u32, valid: bool) -> vec4<f32> {
#if K % COLUMNS != 0
  let inside = column + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(K);
  return select(vec4<f32>(), value, inside & vec4<bool>(valid));
#else
  return select(vec4<f32>(), value, valid);
#endif
}
#endif

#if STAGED

// Where vec4 i of the part of x that begins with a chunk lies, row after row.
fn staged_from(i: u32, chunk: u32, last: u32) -> u32 {
  let row = min(i / IN_ROW, ROWS - 1u);
  let at = min(chunk + i % IN_ROW / $(2 * EIGHTS)u, last) * $(2 * EIGHTS)u + i % $(2 * EIGHTS)u;
  return row * ROW_FOURS + min(at, ROW_FOURS - 1u);
}

// And where in x_tile: what lanes along the columns read at once is side by side.
fn staged_to(i: u32) -> u32 {
  return (i % $(2 * EIGHTS)u * M_ROWS + i / IN_ROW) * STEP + i % IN_ROW / $(2 * EIGHTS)u;
}
#endif

// grid: linear_grid(N / OUTPUTS); its depth is SPLITS
@compute @workgroup_size(WG)
fn main(
  @builtin(workgroup_id) id: vec3<u32>,
  @builtin(num_workgroups) size: vec3<u32>,
  @builtin(subgroup_id) subgroup: u32,
  @builtin(num_subgroups) n_subgroups: u32,
  @builtin(subgroup_invocation_id) lane: u32,
) {
  let first = workgroup_index(id, size) * OUTPUTS;
  if (first >= N) {
    return;
  }
  let tid = subgroup * (WG / n_subgroups) + lane;
#if TABLE
  fill_table(tid, WG);
#endif
  let k_lane = tid / N_LANES % K_LANES;
  let team = tid / TEAM;
  let k_team = team / N_TEAMS % K_TEAMS;
  let in_step = k_team * K_LANES + k_lane;
  let first_row = team / (N_TEAMS * K_TEAMS) * M_TILE;
  let w_row = (team % N_TEAMS * N_LANES + tid % N_LANES) * N_TILE;  // of the workgroup's
#for r in 0..N_TILE
#if GATED
  let row$r = min(first + w_row / 2u + $($r / 2)u, N - 1u) + $($r % 2)u * N;
#else
  let row$r = min(first + w_row + $ru, N - 1u);
#endif
#endfor
#for m in 0..M_TILE
#if ROWS % M_TILE != 0
  let x_row$m = min(first_row + $mu, ROWS - 1u);
#else
  let x_row$m = first_row + $mu;
#endif
#endfor
#for i in 0..VALUES
  var sum0_$i = 0.0;  // of row of x i / N_TILE and row of W i % N_TILE
#endfor

  let start = id.z * SPLIT_STEPS * STEP + in_step;
  let last = min(CHUNKS, (id.z + 1u) * SPLIT_STEPS * STEP) - 1u;
#if STOPS and not STAGED
  let steps = select(0u, SPLIT_STEPS, first_row < step.n_rows);
#else
  let steps = SPLIT_STEPS;
#endif
#if STAGED
  let first_chunk = id.z * SPLIT_STEPS * STEP;
#for l in 0..LOADS
  let own$l = tid + $lu * WG;
  if (own$l < TILE) {
    x_tile[staged_to(own$l)] = x[staged_from(own$l, first_chunk, last)];
  }
#endfor
  workgroupBarrier();
#endif
#for r in 0..N_TILE
  var next$r = load_stored(row$r, min(start, last));
#endfor

  for (var done = 0u; done < steps; done++) {
#if EVEN
    let i = start + done * STEP;
    let valid = true;
#else
    let valid = start + done * STEP <= last;
    let i = min(start + done * STEP, last);
#endif
    // Not inside an `if`, from which a compiler may move it down to its use.
    let later = min(start + (done + 1u) * STEP, last);
#for r in 0..N_TILE
    let w$r = next$r;
    next$r = load_stored(row$r, later);
#endfor
#if STAGED
#for l in 0..LOADS
    let staged$l = x[staged_from(own$l, first_chunk + (done + 1u) * STEP, last)];
#endfor
#endif
#if INTEGERS
#for r in 0..N_TILE
    let low$r = low_int8(w$r.integers);
    let high$r = high_int8(w$r.integers);
#if GROUP_SIZE == 16
    let scale$r = widen_scale(w$r.scale, 2u * i);
    let high_scale$r = widen_scale(w$r.high_scale, min(2u * i + 1u, GROUPS - 1u));
#else
    let scale$r = widen_scale(w$r.scale, i / (GROUP_SIZE / 32u));
    let high_scale$r = scale$r;
#endif
#endfor
#if FOURS
#for q in 0..M_TILE / 4
    let four$q = x_scales[i * (SCALE_ROWS / 4u) + min(first_row / 4u + $qu, SCALE_ROWS / 4u - 1u)];
#endfor
#endif
#for m in 0..M_TILE
    let x_low$m = x[x_row$m * 2u * BLOCKS + i];
    let x_high$m = x[x_row$m * 2u * BLOCKS + BLOCKS + i];
#if FOURS
    let of_block$m = four$($m / 4)[$($m % 4)];
#else
    let of_block$m = x_scales[i * SCALE_ROWS + x_row$m];
#endif
#if EVEN
    let x_scale$m = of_block$m;
#else
    let x_scale$m = select(0.0, of_block$m, valid);
#endif
#if AFFINE
    let x_low_sum$m = x_scale$m / INT8_UNIT * f32(dot16(x_low$m, ONES));
    let x_high_sum$m = x_scale$m / INT8_UNIT * f32(dot16(x_high$m, ONES));
#endif
#for r in 0..N_TILE
#if GROUP_SIZE == 16
    sum0_$($m * N_TILE + $r) = fma(
      dot_half(low$r, x_low$m), x_scale$m * scale$r.x, sum0_$($m * N_TILE + $r));
    sum0_$($m * N_TILE + $r) = fma(
      dot_half(high$r, x_high$m), x_scale$m * high_scale$r.x, sum0_$($m * N_TILE + $r));
#else
    sum0_$($m * N_TILE + $r) = fma(
      dot_both(low$r, x_low$m, high$r, x_high$m), x_scale$m * scale$r.x, sum0_$($m * N_TILE + $r));
#endif
#if AFFINE
    sum0_$($m * N_TILE + $r) = fma(x_low_sum$m, scale$r.y, sum0_$($m * N_TILE + $r));
    sum0_$($m * N_TILE + $r) = fma(x_high_sum$m, high_scale$r.y, sum0_$($m * N_TILE + $r));
#endif
#endfor
#endfor
#else
#for r in 0..N_TILE
    let v$r = widened(w$r, i);
#endfor
#for h in 0..2 * EIGHTS
#if EIGHTS > 1
    let at$h = min($(2 * EIGHTS)u * i + $hu, ROW_FOURS - 1u);
#else
    let at$h = 2u * i + $hu;
#endif
#for m in 0..M_TILE
#if STAGED
    let four$h_$m = x_tile[done % 2u * TILE + ($hu * M_ROWS + first_row + $mu) * STEP + in_step];
#else
    let four$h_$m = x[x_row$m * ROW_FOURS + at$h];
#endif
#if EVEN and K % COLUMNS == 0
    let x$h_$m = four$h_$m;
#else
    let x$h_$m = masked(four$h_$m, $(COLUMNS)u * i + $(4 * $h)u, valid);
#endif
#for c in 0..4
#for r in 0..N_TILE
    sum0_$($m * N_TILE + $r) = fma(v$r[$h][$c], x$h_$m[$c], sum0_$($m * N_TILE + $r));
#endfor
#endfor
#endfor
#endfor
#endif
#if STAGED
#for l in 0..LOADS
    if (own$l < TILE) {
      x_tile[(done + 1u) % 2u * TILE + staged_to(own$l)] = staged$l;
    }
#endfor
    workgroupBarrier();
#endif
  }

  // Lanes along the columns add up: of two each keeps half of the values, as long as that goes.
  var place = 0u;
#for j in 0..HALVINGS
#for h in VALUES / (2 << $j)..VALUES / (2 << $j) + 1
  let upper$j = (k_lane & $(1 << $j)u) != 0u;
  place += select(0u, $hu, upper$j);
#for i in 0..$h
  let sum$($j + 1)_$i = select(sum$j_$i, sum$j_$($i + $h), upper$j)
    + subgroupShuffleXor(select(sum$j_$($i + $h), sum$j_$i, upper$j), $(N_LANES << $j)u);
#endfor
#endfor
#endfor
#for j in HALVINGS..ROUNDS
#for i in 0..LEFT
  let sum$($j + 1)_$i = sum$j_$i + subgroupShuffleXor(sum$j_$i, $(N_LANES << $j)u);
#endfor
#endfor
  if (k_lane < $(1 << HALVINGS)u) {
#for i in 0..LEFT
    partial[(k_team * M_ROWS + first_row + (place + $iu) / N_TILE) * W_ROWS
      + w_row + (place + $iu) % N_TILE] = sum$(ROUNDS)_$i;
#endfor
  }
  workgroupBarrier();

  for (var i = tid; i < ROWS * OUTPUTS; i += WG) {
    let row = i / OUTPUTS;
    let own = i % OUTPUTS;
    let n = first + own;
    var writes = n < N;
#if STOPS
    writes = writes && row < step.n_rows && step.rows[row].alive != 0u;
#endif
    if (writes) {
      let at = row * Y_STRIDE + START + n;
#if GATED
      var gate = total(row, 2u * own);
      var up = total(row, 2u * own + 1u);
#if BIAS
      gate += bias[START + n];
      up += bias[START + N + n];
#endif
      var value = activated(gate, up);
#else
      var sum = total(row, own);
#if BIAS
      sum += bias[START + n];
#endif
      var value = activated(sum, sum);
#endif
#if SIGMOID_GATE
      value /= 1.0 + exp(-gates[row * GATE_STRIDE + GATE_OFFSET]);
#elif FACTORS
      value *= gates[row * GATE_STRIDE + GATE_OFFSET + START + n];
#endif
#if RESIDUAL
      value += residual[at];
#endif
      y[id.z * SPLIT_ROWS * Y_STRIDE + at] = value;
    }
  }
}
