// The gated delta rule (Yang et al. 2024): for one row after the other, and for each head,
//
//   S = decay * S;  S = S + k^T (beta * (v - k S));  y = q S
//
// where k and q have length 1, q / sqrt(KEY_DIM) is taken for q, beta = sigmoid(b), and
// decay = exp(-exp(a_log) * softplus(a + dt_bias)). S goes on from the state and is left there.
//
// S stays in registers through all rows: SPLIT invocations share TILE columns. What ROWS rows need is
// put into workgroup memory, while the loads of the next ROWS are in flight. What q and k have to do
// with a column is summed from S as it was before the row, so that there is one sum over the SPLIT for
// a row: with SUBGROUPS over neighbouring lanes, otherwise behind a barrier.
//
//   k (decay S) = decay (k S);  q S' = decay (q S) + (q k) delta
#include "step.wgsl"
#include "softplus.wgsl"
#include "scan_values.wgsl"
// @param KEY_HEADS u32   neighbouring heads share a query and a key
// @param HEADS u32
// @param KEY_DIM u32     a multiple of 4 * SPLIT
// @param VALUE_DIM u32   a multiple of 4
// @param ROWS u32        a multiple of UNROLL
// @param UNROLL u32      rows of the loop's body
// @param LOADERS u32     invocations that load a row's q and k: ROWS * LOADERS are at most a workgroup
// @param SUBGROUPS bool  SPLIT is a power of two and at most a subgroup, and that divides a workgroup
// @param GATES_STRIDE u32
// @param Y_STRIDE u32
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;          // [rows][q, k: KEY_HEADS; v: HEADS]
@group(0) @binding(2) var<storage, read> gates: array<f32>;            // [rows][b, a: HEADS]
@group(0) @binding(3) var<storage, read> a_log: array<f32>;
@group(0) @binding(4) var<storage, read> dt_bias: array<f32>;
@group(0) @binding(5) var<storage, read_write> state: array<Columns>;  // [sequence][HEADS][KEY_DIM][VALUE_DIM]
@group(0) @binding(6) var<storage, read_write> y: array<Columns>;      // [rows][HEADS][VALUE_DIM]
#if RECENT
@group(0) @binding(7) var<storage, read_write> recent: array<vec4<f32>>;
#endif

const QUADS = KEY_DIM / 4u;
const FIRST_VALUE = 2u * KEY_HEADS * KEY_DIM;
const X_QUADS = (FIRST_VALUE + HEADS * VALUE_DIM) / 4u;
const EPS = 1e-6;
// How many vec4 of q, and of k, an invocation loads of each row.
#let LOADS = (KEY_DIM / 4 + LOADERS - 1) / LOADERS

struct Factors {  // of a row
  beta: f32,
  decay: f32,
  qk: f32,
}

var<workgroup> queries: array<vec4<f32>, ROWS * QUADS>;
var<workgroup> keys: array<vec4<f32>, ROWS * QUADS>;
var<workgroup> factors: array<Factors, ROWS>;
var<workgroup> row_sums: array<vec3<f32>, ROWS * LOADERS>;  // k k, q q, q k
#if not SUBGROUPS
// k S and q S, of two rows, so that a row may be written while the one before is still read.
var<workgroup> key_sums: array<Columns, 2u * WG>;
var<workgroup> query_sums: array<Columns, 2u * WG>;
#endif

struct Rows {  // what an invocation loads of them
#for l in 0..LOADS
  q$l: vec4<f32>,
  k$l: vec4<f32>,
#endfor
  values: Values,
  b: f32,
  a: f32,
}

// Rows behind the last one are the last one.
fn load(task: Task, first: u32, tid: u32) -> Rows {
  var rows: Rows;
  if (tid < ROWS * LOADERS) {
    let row = min(first + tid / LOADERS, task.last_row);
    let q_at = task.head / (HEADS / KEY_HEADS) * QUADS;
#for l in 0..LOADS
    let quad$l = min(tid % LOADERS + $lu * LOADERS, QUADS - 1u);
    rows.q$l = input(task, row, q_at + quad$l);
    rows.k$l = input(task, row, q_at + KEY_HEADS * QUADS + quad$l);
#endfor
    let own = step_row(task, row) * GATES_STRIDE + task.head;
    rows.b = gates[own];
    rows.a = gates[own + HEADS];
#if RECENT
    if (row < task.behind) {
      let kept = recent[recent_at(task, row) + X_QUADS + task.head];
      rows.b = kept.x;
      rows.a = kept.y;
    }
#endif
  }
  rows.values = load_values(task, first, tid);
  return rows;
}

// Stores rows in workgroup memory; rows behind the last one leave S as it is. Has two barriers: the rows before
// have been used, and these are there.
fn store(task: Task, first: u32, rows: Rows, tid: u32) {
  let row = tid / LOADERS;
  let loader = tid % LOADERS;
  var sums = vec3<f32>();
#for l in 0..LOADS
  if (loader + $lu * LOADERS < QUADS) {
    sums += vec3<f32>(dot(rows.k$l, rows.k$l), dot(rows.q$l, rows.q$l), dot(rows.q$l, rows.k$l));
  }
#endfor
  if (row < ROWS) {
    row_sums[tid] = sums;
  }
  workgroupBarrier();
  if (row < ROWS) {
    sums = vec3<f32>();
    for (var i = 0u; i < LOADERS; i++) {
      sums += row_sums[row * LOADERS + i];
    }
    let k_scale = inverseSqrt(sums.x + EPS);
    let q_scale = inverseSqrt((sums.y + EPS) * f32(KEY_DIM));
#for l in 0..LOADS
    if (loader + $lu * LOADERS < QUADS) {
      queries[row * QUADS + loader + $lu * LOADERS] = q_scale * rows.q$l;
      keys[row * QUADS + loader + $lu * LOADERS] = k_scale * rows.k$l;
#if RECENT
      if (task.first_column == 0u && task.head % (HEADS / KEY_HEADS) == 0u) {
        let at$l = task.head / (HEADS / KEY_HEADS) * QUADS + loader + $lu * LOADERS;
        keep(task, first + row, at$l, rows.q$l);
        keep(task, first + row, at$l + KEY_HEADS * QUADS, rows.k$l);
      }
#endif
    }
#endfor
    let beta = 1.0 / (1.0 + exp(-rows.b));
    let decay = exp(-task.rate * softplus(rows.a + task.bias));
    let there = first + row <= task.last_row;
    if (loader == 0u) {
      factors[row] =
        Factors(select(0.0, beta, there), select(1.0, decay, there), q_scale * k_scale * sums.z);
#if RECENT
      if (task.first_column == 0u) {
        keep(task, first + row, X_QUADS + task.head, vec4<f32>(rows.b, rows.a, 0.0, 0.0));
      }
#endif
    }
  }
  store_values(task, first, rows.values, tid);
  workgroupBarrier();
}

// grid (VALUE_DIM / COLUMNS, HEADS); BATCH: (…, …, rows)
@compute @workgroup_size(WG)
fn main(
  @builtin(workgroup_id) id: vec3<u32>,
#if SUBGROUPS
  @builtin(subgroup_id) subgroup: u32,
  @builtin(subgroup_size) subgroup_size: u32,
  @builtin(subgroup_invocation_id) lane: u32,
#else
  @builtin(local_invocation_index) tid: u32,
#endif
) {
  let head = id.y;
  let rate = exp(a_log[head]);
  let bias = dt_bias[head];
#include "scan_task.wgsl"
#if SUBGROUPS
  let tid = subgroup * subgroup_size + lane;
  let tile = tid / SPLIT;
  let part = tid % SPLIT;
#else
  let tile = tid % TILES;
  let part = tid / TILES;
#endif
  let column = task.first_column + tile * TILE;
#include "scan_read_state.wgsl"
  var rows = load(task, begin, tid);
  for (var first = begin; first <= task.last_row; first += ROWS) {
    store(task, first, rows, tid);
    if (first + ROWS <= task.last_row) {
      rows = load(task, first + ROWS, tid);
    }
    for (var base = 0u; base < ROWS; base += UNROLL) {
#if RECENT
      if (first + base > task.last_row) {
        break;
      }
#endif
#for u in 0..UNROLL
      {
        let row = base + $uu;
        let own = factors[row];
        let value = values[row * TILES + tile];
        var of_key = Columns();
        var of_query = Columns();
#for j in 0..KEY_DIM / (4 * SPLIT)
        let k$j = keys[row * QUADS + part + $ju * SPLIT];
        of_key = add_product(of_key, k$j, s$j);
        of_query = add_product(of_query, queries[row * QUADS + part + $ju * SPLIT], s$j);
#endfor
#if SUBGROUPS
#for b in 0..5
#if 1 << $b < SPLIT
        of_key += subgroupShuffleXor(of_key, $(1 << $b)u);
        of_query += subgroupShuffleXor(of_query, $(1 << $b)u);
#endif
#endfor
#else
        let half = row % 2u * WG;
        key_sums[half + tid] = of_key;
        query_sums[half + tid] = of_query;
        workgroupBarrier();
        of_key = Columns();
        for (var i = 0u; i < SPLIT; i++) {
          of_key += key_sums[half + i * TILES + tile];
        }
#endif
        let delta = own.beta * (value - own.decay * of_key);
#for j in 0..KEY_DIM / (4 * SPLIT)
        s$j = add_outer(own.decay * s$j, k$j, delta);
#endfor
#if RECENT
        if (first + row == task.left && column < VALUE_DIM) {
#for j in 0..KEY_DIM / (4 * SPLIT)
          leave(origin, $ju, s$j);
#endfor
        }
        let goes_out = first + row >= task.behind && first + row <= task.last_row;
#else
        let goes_out = first + row <= task.last_row;
#endif
        if (part == 0u && column < VALUE_DIM && goes_out) {
#if not SUBGROUPS
          of_query = Columns();
          for (var i = 0u; i < SPLIT; i++) {
            of_query += query_sums[half + i * TILES + tile];
          }
#endif
          y[(step_row(task, first + row) * Y_STRIDE + head * VALUE_DIM + column) / TILE] =
            own.decay * of_query + own.qk * delta;
        }
      }
#endfor
    }
  }
#if not RECENT
  if (column < VALUE_DIM) {
#for j in 0..KEY_DIM / (4 * SPLIT)
    leave(origin, $ju, s$j);
#endfor
  }
#endif
}
