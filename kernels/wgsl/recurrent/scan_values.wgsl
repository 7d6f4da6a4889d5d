// What the two scans have in common: a workgroup has COLUMNS columns of a head's matrix, and in workgroup
// memory the values of ROWS rows in these.
#include "state_matrix.wgsl"
// @param ROWS u32
// @param BATCH bool     each row is of a sequence of its own
// @param COLUMNS u32    a multiple of 4
// @param SPLIT u32      invocations that share TILE columns
// @param X_STRIDE u32
// Needs the binding `x: array<vec4<f32>>`, and as constants VALUE_DIM, columns of a head (a multiple of 4),
// and FIRST_VALUE, the one of a row of x where the values of the first head begin.
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
    own.value$l = x[(row * X_STRIDE + FIRST_VALUE + task.head * VALUE_DIM + column) / 4u];
  }
#endfor
  return own;
}

fn store_values(own: Values, tid: u32) {
#for l in 0..VALUE_LOADS
  if (tid + $lu * WG < ROWS * COLUMNS / 4u) {
#if TILE == 4
    values[tid + $lu * WG] = own.value$l;
#else
    values[2u * (tid + $lu * WG)] = own.value$l.xy;
    values[2u * (tid + $lu * WG) + 1u] = own.value$l.zw;
#endif
  }
#endfor
}
