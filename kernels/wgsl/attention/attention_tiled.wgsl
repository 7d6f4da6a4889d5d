// y = softmax(SCALE Q K^T) V for each head of many rows (prefill), over the positions that a row attends to; Q
// and y are [rows][heads][HEAD_DIM], K and V the cache's [positions][KV heads][HEAD_DIM]. Tiles of queries of
// one head go against tiles of positions, with an online softmax, so that the score matrix is never written
// (FlashAttention, Dao et al. 2022).
//
// For each tile two products as in matmul.wgsl. S = Q K^T, in slices of DEPTH dimensions, leaves
// M_TILE x N_TILE scores in the registers of an invocation. Their exponentials go through workgroup
// memory, and O += P V, in slices of V_DEPTH positions, adds to M_TILE x D_TILE vec4 in registers, of
// the same rows: so nobody has to ask for a row's scale, and only its maximum is exchanged.
//
// The next slice is in flight while one is used, across both products: a barrier per slice and one
// more per tile. Rows of Q, K and P have odd strides of 16 bytes against bank conflicts.
// SINKS are those of attention_combine.wgsl.
#include "step.wgsl"
#include "kv_read_keys.wgsl"
#include "kv_read_values.wgsl"
#include "attention_range.wgsl"
#include "capped.wgsl"
#include "rolled.wgsl"
#include "z_curve.wgsl"
// @param GROUP u32               query heads per KV head
// @param SCALE f32
// @param Q_STRIDE u32
// @param Q_OFFSET u32
// @param Y_STRIDE u32
// @param M_SIZE u32              invocations of a workgroup along the rows: a multiple of 4
// @param N_SIZE u32              and along the positions: a multiple of 8
// @param M_TILE u32              rows per invocation
// @param N_TILE u32              positions per invocation: a multiple of 4
// @param DEPTH u32               dimensions of a slice of Q and K: a multiple of 8, divides HEAD_DIM
// @param V_DEPTH u32             positions of a slice of V: a multiple of 4, divides a tile's
// @param DOUBLE bool             two buffers of slices: one barrier per slice, not two
// @param SINKS bool
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> pages: array<u32>;
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> keys: array<KvWords>;
@group(0) @binding(4) var<storage, read> values: array<KvWords>;
@group(0) @binding(5) var<storage, read_write> y: array<vec4<f32>>;
#if SINKS
@group(0) @binding(6) var<storage, read> sinks: array<f32>;
#endif

const SIZE = M_SIZE * N_SIZE;
const ROWS = M_SIZE * M_TILE;
const COLUMNS = N_SIZE * N_TILE;          // positions of a tile: they lie in one page
const SLICES = HEAD_DIM / DEPTH;
const V_SLICES = COLUMNS / V_DEPTH;
const STRIDE = DEPTH / 4u + 1u;
const P_STRIDE = COLUMNS / 4u + 1u;
const BUFFER = max((ROWS + COLUMNS) * STRIDE, V_DEPTH * HEAD_DIM / 4u);
const LOWEST = -3.0e38;
const LOG2_E = 1.44269504;                // the GPU's exponential is of base two
// How many values an invocation loads of each slice, and its share of a row's dimensions, both in vec4.
#let Q_LOADS = (M_SIZE * M_TILE * DEPTH / 4 + M_SIZE * N_SIZE - 1) / (M_SIZE * N_SIZE)
#let K_LOADS = (N_SIZE * N_TILE * DEPTH / 8 + M_SIZE * N_SIZE - 1) / (M_SIZE * N_SIZE)
#let V_LOADS = (V_DEPTH * HEAD_DIM / 8 + M_SIZE * N_SIZE - 1) / (M_SIZE * N_SIZE)
#let D_TILE = (HEAD_DIM / 4 + N_SIZE - 1) / N_SIZE

var<workgroup> slices: array<vec4<f32>, $(1 + DOUBLE)u * BUFFER>;  // of Q and K, or of V
var<workgroup> weights: array<vec4<f32>, ROWS * P_STRIDE>;         // P
var<workgroup> exchange: array<f32, ROWS * N_SIZE>;                // a value of each invocation's rows

struct Task {  // of a workgroup
  first_row: u32,
  last_row: u32,
  head: u32,
  end: u32,  // of the positions
}

struct Tile {
  base: u32,    // its first position
  offset: u32,  // from its positions to where they lie
}

struct SliceOfQK {
#for l in 0..Q_LOADS
  q$l: vec4<f32>,
#endfor
#for l in 0..K_LOADS
  k$l: Kv8,
#endfor
}

struct SliceOfV {
#for l in 0..V_LOADS
  v$l: Kv8,
#endfor
}

fn load_qk(task: Task, tile: Tile, slice: u32, tid: u32) -> SliceOfQK {
  var loaded: SliceOfQK;
#for l in 0..Q_LOADS
  let q_row$l = min(task.first_row + (tid + $lu * SIZE) / (DEPTH / 4u), task.last_row);
  let q_from$l = (q_row$l * Q_STRIDE + Q_OFFSET + task.head * HEAD_DIM + slice * DEPTH) / 4u;
  loaded.q$l = q[q_from$l + (tid + $lu * SIZE) % (DEPTH / 4u)];
#endfor
#for l in 0..K_LOADS
  // An invocation's N_TILE columns, which are N_SIZE apart in the slice, are four positions in a row
  // (and four more): so its weights are vec4.
  let column$l = (tid + $lu * SIZE) / (DEPTH / 8u) % COLUMNS;
  let j$l = column$l / N_SIZE;
  let place$l = tile.base + (j$l / 4u * N_SIZE + column$l % N_SIZE) * 4u + j$l % 4u;
  let k_slot$l = tile.offset + min(place$l, task.end - 1u);
  loaded.k$l = load_key(
    kv_index(task.head / GROUP, k_slot$l) + slice * (DEPTH / 8u)
      + (tid + $lu * SIZE) % (DEPTH / 8u));
#endfor
  return loaded;
}

fn store_qk(buffer: u32, loaded: SliceOfQK, tid: u32) {
#for l in 0..Q_LOADS
#if ($l + 1) * M_SIZE * N_SIZE > M_SIZE * M_TILE * DEPTH / 4
  if (tid + $lu * SIZE < ROWS * DEPTH / 4u)
#endif
  {
    let i = tid + $lu * SIZE;
    slices[buffer + i / (DEPTH / 4u) * STRIDE + i % (DEPTH / 4u)] = loaded.q$l;
  }
#endfor
#for l in 0..K_LOADS
#if ($l + 1) * M_SIZE * N_SIZE > N_SIZE * N_TILE * DEPTH / 8
  if (tid + $lu * SIZE < COLUMNS * DEPTH / 8u)
#endif
  {
    let i = tid + $lu * SIZE;
    let out = buffer + (ROWS + i / (DEPTH / 8u)) * STRIDE + i % (DEPTH / 8u) * 2u;
    slices[out] = kv_low(loaded.k$l);
    slices[out + 1u] = kv_high(loaded.k$l);
  }
#endfor
}

fn load_v(task: Task, tile: Tile, slice: u32, tid: u32) -> SliceOfV {
  var loaded: SliceOfV;
#for l in 0..V_LOADS
  let row$l = min((tid + $lu * SIZE) / (HEAD_DIM / 8u), V_DEPTH - 1u);
  // Values beyond the end may be anything: their weight is zero.
  let place$l = min(tile.base + slice * V_DEPTH + row$l, task.end - 1u);
  loaded.v$l = load_value(
    kv_index(task.head / GROUP, tile.offset + place$l)
      + (tid + $lu * SIZE) % (HEAD_DIM / 8u));
#endfor
  return loaded;
}

// A row of the slice: the low halves of all groups of eight dimensions, then the high ones.
fn store_v(buffer: u32, loaded: SliceOfV, tid: u32) {
#for l in 0..V_LOADS
#if ($l + 1) * M_SIZE * N_SIZE > V_DEPTH * HEAD_DIM / 8
  if (tid + $lu * SIZE < V_DEPTH * HEAD_DIM / 8u)
#endif
  {
    let i = tid + $lu * SIZE;
    let out = buffer + i / (HEAD_DIM / 8u) * (HEAD_DIM / 4u) + i % (HEAD_DIM / 8u);
    slices[out] = kv_low(loaded.v$l);
    slices[out + HEAD_DIM / 8u] = kv_high(loaded.v$l);
  }
#endfor
}

// grid (heads, rows / ROWS), and PROMPTS - 1 more tiles
@compute @workgroup_size(SIZE)
fn main(
  @builtin(workgroup_id) id: vec3<u32>,
  @builtin(num_workgroups) size: vec3<u32>,
  @builtin(local_invocation_index) tid: u32,
) {
#include "prompt_rows.wgsl"
  let sequence = step.rows[first_row].sequence;
  let first_place = step.rows[first_row].position;
  let last_place = step.rows[last_row].position;
  let task = Task(first_row, last_row, id.x, last_place + 1u);

  let place = z_curve(tid);
  let tx = place.x;
  let ty = place.y;

#for i in 0..M_TILE
  let position$i = step.rows[min(first_row + ty + $iu * M_SIZE, last_row)].position;
#if SINKS
  var most$i = LOG2_E * sinks[id.x];
  var sum$i = select(0.0, 1.0, tx == 0u);
#else
  var most$i = LOWEST;
  var sum$i = 0.0;  // of the invocation's own weights
#endif
#for j in 0..D_TILE
  var o$i_$j = vec4<f32>();
#endfor
#endfor
#for j in 0..D_TILE
  let d$j = min(tx + $ju * N_SIZE, HEAD_DIM / 4u - 1u);
#endfor

  var buffer = 0u;
  let begin = first_position(first_place) / COLUMNS * COLUMNS;
  var tile = Tile(begin, kv_slot(sequence, begin) - begin);
  var qk = load_qk(task, tile, 0u, tid);
  store_qk(buffer, qk, tid);
  workgroupBarrier();
  loop {
    let next_base = tile.base + COLUMNS;
    let next_found = min(next_base, last_place);
    let next = Tile(next_base, kv_slot(sequence, next_found) - next_found);
    var v: SliceOfV;

    // S = Q K^T
#for i in 0..M_TILE
#for j in 0..N_TILE
    var s$i_$j = 0.0;
#endfor
#endfor
    for (var slice = 0u; slice < rolled(SLICES, id.z); slice++) {
      if (slice + 1u < SLICES) {
        qk = load_qk(task, tile, slice + 1u, tid);
      } else {
        v = load_v(task, tile, 0u, tid);
      }
      let a = buffer + ty * STRIDE;
      let b = buffer + (ROWS + tx) * STRIDE;
      for (var k = 0u; k < rolled(DEPTH / 4u, id.z); k++) {
#for j in 0..N_TILE
      let b$j = slices[b + $ju * N_SIZE * STRIDE + k];
#endfor
#for i in 0..M_TILE
      let a$i = slices[a + $iu * M_SIZE * STRIDE + k];
#for j in 0..N_TILE
      s$i_$j = fma(a$i.x, b$j.x, s$i_$j);
      s$i_$j = fma(a$i.y, b$j.y, s$i_$j);
      s$i_$j = fma(a$i.z, b$j.z, s$i_$j);
      s$i_$j = fma(a$i.w, b$j.w, s$i_$j);
#endfor
#endfor
      }
#if DOUBLE
      buffer = BUFFER - buffer;
#else
      workgroupBarrier();
#endif
      if (slice + 1u < SLICES) {
        store_qk(buffer, qk, tid);
        workgroupBarrier();
      }
    }
    store_v(buffer, v, tid);

    // The maximum of each row, of all invocations that have scores of it.
#for i in 0..M_TILE
#for j in 0..N_TILE
#if SOFTCAP > 0
    s$i_$j = LOG2_E * capped(SCALE * s$i_$j);
#else
    s$i_$j *= SCALE * LOG2_E;
#endif
#endfor
#endfor
    if (tile.base + COLUMNS > first_place + 1u || tile.base < first_position(last_place)) {
#for j in 0..N_TILE
      let place$j = tile.base + ($($j / 4)u * N_SIZE + tx) * 4u + $($j % 4)u;
#for i in 0..M_TILE
      s$i_$j = select(
        LOWEST, s$i_$j, place$j <= position$i && place$j >= first_position(position$i));
#endfor
#endfor
    }
#for i in 0..M_TILE
    var tile_most$i = s$i_0;
#for j in 1..N_TILE
    tile_most$i = max(tile_most$i, s$i_$j);
#endfor
    exchange[(ty + $iu * M_SIZE) * N_SIZE + tx] = tile_most$i;
#endfor
    workgroupBarrier();

    // P = exp(S - maximum)
#for i in 0..M_TILE
    let before$i = most$i;
    for (var n = 0u; n < rolled(N_SIZE, id.z); n++) {
      most$i = max(most$i, exchange[(ty + $iu * M_SIZE) * N_SIZE + n]);
    }
    let factor$i = exp2(before$i - most$i);
    sum$i *= factor$i;
#for j in 0..D_TILE
    o$i_$j *= factor$i;
#endfor
#for j in 0..N_TILE
    s$i_$j = exp2(s$i_$j - most$i);
    sum$i += s$i_$j;
#endfor
#for g in 0..N_TILE / 4
    weights[(ty + $iu * M_SIZE) * P_STRIDE + tx + $gu * N_SIZE] = vec4<f32>(
      s$i_$($g * 4), s$i_$($g * 4 + 1), s$i_$($g * 4 + 2), s$i_$($g * 4 + 3));
#endfor
#endfor
    workgroupBarrier();

    // O += P V
    for (var slice = 0u; slice < rolled(V_SLICES, id.z); slice++) {
      if (slice + 1u < V_SLICES) {
        v = load_v(task, tile, slice + 1u, tid);
      } else if (next.base < task.end) {
        qk = load_qk(task, next, 0u, tid);
      }
      let p = ty * P_STRIDE + slice * (V_DEPTH / 4u);
      for (var k = 0u; k < rolled(V_DEPTH / 4u, id.z); k++) {
#for j in 0..D_TILE
#for c in 0..4
      let v$c_$j = slices[buffer + (4u * k + $cu) * (HEAD_DIM / 4u) + d$j];
#endfor
#endfor
#for i in 0..M_TILE
      let p$i = weights[p + $iu * M_SIZE * P_STRIDE + k];
#for j in 0..D_TILE
      o$i_$j = fma(vec4<f32>(p$i.x), v0_$j, o$i_$j);
      o$i_$j = fma(vec4<f32>(p$i.y), v1_$j, o$i_$j);
      o$i_$j = fma(vec4<f32>(p$i.z), v2_$j, o$i_$j);
      o$i_$j = fma(vec4<f32>(p$i.w), v3_$j, o$i_$j);
#endfor
#endfor
      }
#if DOUBLE
      buffer = BUFFER - buffer;
#else
      workgroupBarrier();
#endif
      if (slice + 1u < V_SLICES) {
        store_v(buffer, v, tid);
        workgroupBarrier();
      }
    }
    if (next.base >= task.end) {
      break;
    }
    store_qk(buffer, qk, tid);
    workgroupBarrier();
    tile = next;
  }

#for i in 0..M_TILE
  exchange[(ty + $iu * M_SIZE) * N_SIZE + tx] = sum$i;
#endfor
  workgroupBarrier();
#for i in 0..M_TILE
  var total$i = 0.0;
  for (var n = 0u; n < rolled(N_SIZE, id.z); n++) {
    total$i += exchange[(ty + $iu * M_SIZE) * N_SIZE + n];
  }
  if (first_row + ty + $iu * M_SIZE <= last_row) {
    let out = ((first_row + ty + $iu * M_SIZE) * Y_STRIDE + id.x * HEAD_DIM) / 4u;
#for j in 0..D_TILE
    if (tx + $ju * N_SIZE < HEAD_DIM / 4u) {
      y[out + d$j % (HEAD_DIM / 8u) * 2u + d$j / (HEAD_DIM / 8u)] = o$i_$j / total$i;
    }
#endfor
  }
#endfor
}
