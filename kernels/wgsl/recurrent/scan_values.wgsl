// Code that the two scans share: a workgroup has COLUMNS columns of a head's matrix, and in workgroup
// memory the values of ROWS rows in these. Rows are those of the step; with RECENT they are those of a
// sequence, from 0, and before its own come those that its state is behind.
#include "state_matrix.wgsl"
#include "recent.wgsl"
// @param ROWS u32
// @param BATCH bool     each row is of a sequence of its own
// @param COLUMNS u32    a multiple of 4
// @param SPLIT u32      invocations that share TILE columns
// @param X_STRIDE u32
// Needs the bindings `x: array<vec4<f32>>` and `state: array<Columns>`, with RECENT also
// `recent: array<vec4<f32>>`, [sequence][RECENT][a row of x, then four gates of each head], and as constants
// VALUE_DIM, columns of a head (a multiple of 4), FIRST_VALUE, the one of a row of x where the values of the
// first head begin, and X_QUADS, a row of x in vec4.
const TILES = COLUMNS / TILE;
const WG = TILES * SPLIT;
#let VALUE_LOADS = (ROWS * COLUMNS / 4 + COLUMNS / TILE * SPLIT - 1) / (COLUMNS / TILE * SPLIT)

var<workgroup> values: array<Columns, ROWS * TILES>;

struct Task {  // of a workgroup
  head: u32,
  first_column: u32,
  last_row: u32,
  rate: f32,
  bias: f32,
#if RECENT
  first_row: u32,  // of the step
  behind: u32,
  left: u32,       // the row whose state is left
  sequence: u32,
  position: u32,   // of row 0
#endif
}
#if RECENT

const NONE: u32 = 0xffffffff;

// Where a row's inputs are kept.
fn recent_at(task: Task, row: u32) -> u32 {
  return (task.sequence * RECENT + (task.position + row) % RECENT) * (X_QUADS + HEADS);
}

// Keep one, unless the row goes into the state at once.
fn keep(task: Task, row: u32, at: u32, value: vec4<f32>) {
  if (row >= task.behind && row != task.left && row <= task.last_row) {
    recent[recent_at(task, row) + at] = value;
  }
}
#endif

// The number of a row in the step; with RECENT, that of the sequence's first for rows before its own.
fn step_row(task: Task, row: u32) -> u32 {
#if RECENT
  return task.first_row + max(row, task.behind) - task.behind;
#else
  return row;
#endif
}

// Values 4 * at to 4 * at + 3 of a row of x.
fn input(task: Task, row: u32, at: u32) -> vec4<f32> {
#if RECENT
  if (row < task.behind) {
    return recent[recent_at(task, row) + at];
  }
#endif
  return x[step_row(task, row) * (X_STRIDE / 4u) + at];
}

// Fragment j of an invocation's S goes back to the state, where its first came from.
fn leave(origin: u32, j: u32, s: Fragment) {
#for i in 0..4
  state[(origin + (j * 4u * SPLIT + $iu) * VALUE_DIM) / TILE] = s[$i];
#endfor
}

struct Values {  // what an invocation loads of them
#for l in 0..VALUE_LOADS
  value$l: vec4<f32>,
#endfor
}

// Rows behind the last one are the last one.
fn load_values(task: Task, first: u32, tid: u32) -> Values {
  var own: Values;
#for l in 0..VALUE_LOADS
  {
    let i = 4u * (tid + $lu * WG);
    let column = min(task.first_column + i % COLUMNS, VALUE_DIM - 4u);
    let row = min(first + i / COLUMNS, task.last_row);
    own.value$l = input(task, row, (FIRST_VALUE + task.head * VALUE_DIM + column) / 4u);
  }
#endfor
  return own;
}

fn store_values(task: Task, first: u32, own: Values, tid: u32) {
#for l in 0..VALUE_LOADS
  if (tid + $lu * WG < ROWS * COLUMNS / 4u) {
#if TILE == 4
    values[tid + $lu * WG] = own.value$l;
#else
    values[2u * (tid + $lu * WG)] = own.value$l.xy;
    values[2u * (tid + $lu * WG) + 1u] = own.value$l.zw;
#endif
#if RECENT
    let i$l = 4u * (tid + $lu * WG);
    let column$l = task.first_column + i$l % COLUMNS;
    if (column$l < VALUE_DIM) {
      let at$l = (FIRST_VALUE + task.head * VALUE_DIM + column$l) / 4u;
      keep(task, first + i$l / COLUMNS, at$l, own.value$l);
    }
#endif
  }
#endfor
}
