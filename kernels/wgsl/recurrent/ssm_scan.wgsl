// The state space model of Mamba 2 (Dao & Gu 2024): for one row after the other, and for each head,
//
//   S = exp(-dt exp(a_log)) S + B^T (dt x);  y = (C S + D x) silu(z)
//
// where softplus(dt + dt_bias), from DT_MIN to DT_MAX, is taken for dt. S goes on from the state and
// is left there.
//
// S stays in registers through all rows: SPLIT invocations share TILE columns. What ROWS rows need is
// put into workgroup memory, while the loads of the next ROWS are in flight. Nobody needs C S but y, so
// it is summed over the SPLIT once for all of these rows. What goes out, of y
// [rows][HEADS][HEAD_DIM], is said in next_input.wgsl.
#include "step.wgsl"
#include "softplus.wgsl"
#let KEY_DIM = STATE_DIM
#include "scan_values.wgsl"
// @param GROUPS u32      neighbouring heads share B and C
// @param HEADS u32
// @param STATE_DIM u32   a multiple of 4 * SPLIT
// @param HEAD_DIM u32    a multiple of 4
// @param DT_MIN f32
// @param DT_MAX f32
// @param ROWS u32        a multiple of UNROLL
// @param UNROLL u32      rows of the loop's body
// @param Z_STRIDE u32
// @param Z_OFFSET u32
// @param DT_STRIDE u32
// @param DT_OFFSET u32
// @param Y_STRIDE u32
// @param KEEP bool
// @param QUANTIZE bool   for one row, and COLUMNS and HEAD_DIM multiples of 16
// @param NEXT_NORM bool
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;          // [rows][x: HEADS; B, C: GROUPS]
@group(0) @binding(2) var<storage, read> z: array<f32>;                // [rows][HEADS][HEAD_DIM]
@group(0) @binding(3) var<storage, read> dt: array<f32>;               // [rows][HEADS]
@group(0) @binding(4) var<storage, read> heads: array<f32>;            // [a_log, dt_bias, D][HEADS]
@group(0) @binding(5) var<storage, read_write> state: array<Columns>;  // [sequence][HEADS][STATE_DIM][HEAD_DIM]
#if RECENT
@group(0) @binding(6) var<storage, read_write> recent: array<vec4<f32>>;
#let OUTPUT = 7
#else
#let OUTPUT = 6
#endif
#include "next_input.wgsl"

const VALUE_DIM = HEAD_DIM;
const FIRST_VALUE = 0u;
const X_QUADS = (HEADS * HEAD_DIM + 2u * GROUPS * STATE_DIM) / 4u;
const QUADS = STATE_DIM / 4u;
const FOURS = COLUMNS / 4u;
// How much an invocation loads of all rows: vec4 of B and C, values of z.
#let LOADS = (ROWS * STATE_DIM / 2 + COLUMNS / TILE * SPLIT - 1) / (COLUMNS / TILE * SPLIT)
#let Z_LOADS = (ROWS * COLUMNS + COLUMNS / TILE * SPLIT - 1) / (COLUMNS / TILE * SPLIT)

var<workgroup> quads: array<vec4<f32>, ROWS * 2u * QUADS>;  // [ROWS][B, C]
var<workgroup> steps: array<vec2<f32>, ROWS>;               // dt, exp(-dt exp(a_log))
var<workgroup> sums: array<Columns, ROWS * WG>;             // C S, [ROWS][SPLIT][TILES]

struct Rows {  // what an invocation loads of them
#for l in 0..LOADS
  quad$l: vec4<f32>,
#endfor
  values: Values,
  dt: f32,
}

// The column of y and z that belongs to the i-th of [ROWS][COLUMNS].
fn column_of(task: Task, i: u32) -> u32 {
  return task.head * HEAD_DIM + min(task.first_column + i % COLUMNS, HEAD_DIM - 1u);
}

// Rows behind the last one are the last one.
fn load(task: Task, first: u32, tid: u32) -> Rows {
  var rows: Rows;
#for l in 0..LOADS
  {
    let i = tid + $lu * WG;
    let row = min(first + i / (2u * QUADS), task.last_row);
    let group = i / QUADS % 2u * GROUPS + task.head / (HEADS / GROUPS);  // those of B, then of C
    rows.quad$l = input(task, row, HEADS * HEAD_DIM / 4u + group * QUADS + i % QUADS);
  }
#endfor
  rows.values = load_values(task, first, tid);
  let own = min(first + tid % ROWS, task.last_row);
#if RECENT
  if (own < task.behind) {
    rows.dt = recent[recent_at(task, own) + X_QUADS + task.head].x;
    return rows;
  }
#endif
  rows.dt = dt[step_row(task, own) * DT_STRIDE + DT_OFFSET + task.head];
  return rows;
}

// Stores rows in workgroup memory; rows behind the last one leave S as it is.
fn store(task: Task, first: u32, rows: Rows, tid: u32) {
#for l in 0..LOADS
  if (tid + $lu * WG < ROWS * 2u * QUADS) {
    quads[tid + $lu * WG] = rows.quad$l;
#if RECENT
    let i$l = tid + $lu * WG;
    if (task.first_column == 0u && task.head % (HEADS / GROUPS) == 0u) {
      let group$l = i$l / QUADS % 2u * GROUPS + task.head / (HEADS / GROUPS);
      let at$l = HEADS * HEAD_DIM / 4u + group$l * QUADS + i$l % QUADS;
      keep(task, first + i$l / (2u * QUADS), at$l, rows.quad$l);
    }
#endif
  }
#endfor
  store_values(task, first, rows.values, tid);
  let delta = clamp(softplus(rows.dt + task.bias), DT_MIN, DT_MAX);
  let own = vec2<f32>(delta, exp(-delta * task.rate));
  if (tid < ROWS) {
    steps[tid] = select(vec2<f32>(0.0, 1.0), own, first + tid <= task.last_row);
#if RECENT
    if (task.first_column == 0u) {
      keep(task, first + tid, X_QUADS + task.head, vec4<f32>(rows.dt, 0.0, 0.0, 0.0));
    }
#endif
  }
}

// grid (HEAD_DIM / COLUMNS, HEADS); BATCH: (…, …, rows)
@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let head = id.y;
  let rate = exp(heads[head]);
  let bias = heads[HEADS + head];
  let skip = heads[2u * HEADS + head];
#include "scan_task.wgsl"
  let tile = tid % TILES;
  let part = tid / TILES;
  let column = task.first_column + tile * TILE;
#include "scan_read_state.wgsl"
  var rows = load(task, begin, tid);
  for (var first = begin; first <= task.last_row; first += ROWS) {
    store(task, first, rows, tid);
    workgroupBarrier();
    if (first + ROWS <= task.last_row) {
      rows = load(task, first + ROWS, tid);
    }
#for l in 0..Z_LOADS
    let i$l = tid + $lu * WG;
    let row$l = step_row(task, min(first + i$l / COLUMNS, task.last_row));
    let gate$l = z[row$l * Z_STRIDE + Z_OFFSET + column_of(task, i$l)];
    let value$l = values[min(i$l / TILE, ROWS * TILES - 1u)][i$l % TILE];
#if NEXT_NORM
    let norm$l = next_norm[column_of(task, i$l)];
#else
    let norm$l = 0.0;
#endif
#endfor
    for (var base = 0u; base < ROWS; base += UNROLL) {
#if RECENT
      if (first + base > task.last_row) {
        break;
      }
#endif
#for u in 0..UNROLL
      {
        let row = base + $uu;
        let delta = steps[row].x;
        let decay = steps[row].y;
        let value = delta * values[row * TILES + tile];
        var sum = Columns();
#for j in 0..STATE_DIM / (4 * SPLIT)
        let b$j = quads[row * 2u * QUADS + part + $ju * SPLIT];
        let c$j = quads[row * 2u * QUADS + QUADS + part + $ju * SPLIT];
        s$j = add_outer(decay * s$j, b$j, value);
        sum = add_product(sum, c$j, s$j);
#endfor
        sums[row * WG + tid] = sum;
#if RECENT
        if (first + row == task.left && column < VALUE_DIM) {
#for j in 0..STATE_DIM / (4 * SPLIT)
          leave(origin, $ju, s$j);
#endfor
        }
#endif
      }
#endfor
    }
    workgroupBarrier();
#for l in 0..Z_LOADS
    var sum$l = skip * value$l;
    let sums$l = min(i$l / COLUMNS, ROWS - 1u) * WG + i$l % COLUMNS / TILE;
    for (var i = 0u; i < SPLIT; i++) {
      sum$l += sums[sums$l + i * TILES][i$l % TILE];
    }
    if (
      i$l < ROWS * COLUMNS && first + i$l / COLUMNS <= task.last_row
      && task.first_column + i$l % COLUMNS < HEAD_DIM
#if RECENT
      && first + i$l / COLUMNS >= task.behind
#endif
    ) {
      sum$l = sum$l * gate$l / (1.0 + exp(-gate$l));
      store_output(i$l, row$l * Y_STRIDE + column_of(task, i$l), sum$l, norm$l);
    }
#endfor
  }
#if not RECENT
  if (column < VALUE_DIM) {
#for j in 0..STATE_DIM / (4 * SPLIT)
    leave(origin, $ju, s$j);
#endfor
  }
#endif
#if QUANTIZE

  workgroupBarrier();
  if (tid < FOURS && task.first_column + 4u * tid < HEAD_DIM) {
    quantize_outputs(tid, 0u, Y_STRIDE / 32u, (head * HEAD_DIM + task.first_column) / 16u);
  }
#endif
}
