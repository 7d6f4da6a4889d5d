// Attention of many rows (prefill): 64 queries against tiles of 32 positions with an online softmax,
// so that the score matrix is never written (FlashAttention, Dao et al. 2022).
#include "step.wgsl"
#include "kv_read_keys.wgsl"
#include "kv_read_values.wgsl"
#include "attention_range.wgsl"
// @param GROUP u32               query heads per KV head
// @param SCALE f32
// @param Q_STRIDE u32
// @param Q_OFFSET u32
// @param Y_STRIDE u32
// @param ROWS_PER_LANE u32       rows of 64 that an invocation sums: as HEAD_DIM asks
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> pages: array<u32>;
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> keys: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> values: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read_write> y: array<vec4<f32>>;

const ROWS = 64u;
const COLUMNS = 32u;
const WG = 256u;
const CHUNKS = HEAD_DIM / 8u;
const LANES = min(ROWS, WG / CHUNKS);               // rows at once in the weighted sum
const STRIDE = COLUMNS + 1u;                        // odd: no bank conflicts
const LOWEST = -3.0e38;

var<workgroup> scores: array<f32, ROWS * STRIDE>;
var<workgroup> partial: array<array<f32, 4>, ROWS>;
var<workgroup> rescale: array<f32, ROWS>;

// grid (rows / 64, heads)
@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let first_row = id.x * ROWS;
  let last_row = min(first_row + ROWS, step.n_rows) - 1u;
  let sequence = step.rows[first_row].sequence;
  let kv_head = id.y / GROUP;

  // scores: an invocation has four rows and two positions
  let tile_row = first_row + tid / 16u * 4u;
  let column = tid % 16u;
#for i in 0..4
  let row$i = min(tile_row + $iu, last_row);
  let position$i = step.rows[row$i].position;
  let q$i = (row$i * Q_STRIDE + Q_OFFSET + id.y * HEAD_DIM) / 4u;
#endfor

  // softmax: four invocations share a row
  let softmax_row = tid / 4u;
  let quarter = tid % 4u;
  var most = LOWEST;
  var sum = 0.0;

  // weighted sum: an invocation has eight dimensions of ROWS_PER_LANE rows
  let chunk = tid % CHUNKS;
  let lane = tid / CHUNKS;
#for r in 0..ROWS_PER_LANE
  var o$r_low = vec4<f32>();
  var o$r_high = vec4<f32>();
#endfor

  let end = step.rows[last_row].position + 1u;
  let begin = first_position(step.rows[first_row].position) / COLUMNS * COLUMNS;
  for (var base = begin; base < end; base += COLUMNS) {
#for j in 0..2
    let place$j = base + column + $ju * 16u;
    let k$j = kv_index(kv_head, kv_slot(sequence, min(place$j, end - 1u)));
#endfor
#for i in 0..4
#for j in 0..2
    var s$i$j = 0.0;
#endfor
#endfor
    for (var c = 0u; c < CHUNKS; c++) {
#for j in 0..2
      let key$j = load_key(k$j + c);
      let low$j = kv_low(key$j);
      let high$j = kv_high(key$j);
#endfor
#for i in 0..4
      let a$i = q[q$i + 2u * c];
      let b$i = q[q$i + 2u * c + 1u];
#for j in 0..2
      s$i$j += dot(a$i, low$j) + dot(b$i, high$j);
#endfor
#endfor
    }
    workgroupBarrier();  // the last tile's scores have been used
#for i in 0..4
#for j in 0..2
    scores[(tid / 16u * 4u + $iu) * STRIDE + column + $ju * 16u] = select(
      LOWEST, SCALE * s$i$j, place$j <= position$i && place$j >= first_position(position$i));
#endfor
#endfor
    workgroupBarrier();

    let mine = softmax_row * STRIDE + quarter * 8u;
    var tile_max = scores[mine];
    for (var i = 1u; i < 8u; i++) {
      tile_max = max(tile_max, scores[mine + i]);
    }
    partial[softmax_row][quarter] = tile_max;
    workgroupBarrier();
    let before = most;
    for (var i = 0u; i < 4u; i++) {
      most = max(most, partial[softmax_row][i]);
    }
    let factor = exp(before - most);
    sum *= factor;
    for (var i = 0u; i < 8u; i++) {
      let p = exp(scores[mine + i] - most);
      scores[mine + i] = p;
      sum += p;
    }
    if (quarter == 0u) {
      rescale[softmax_row] = factor;
    }
    workgroupBarrier();

    if (lane < LANES) {
#for r in 0..ROWS_PER_LANE
      let tile_row$r = min(lane + $ru * LANES, ROWS - 1u);
      o$r_low *= rescale[tile_row$r];
      o$r_high *= rescale[tile_row$r];
#endfor
      for (var i = 0u; i < min(COLUMNS, end - base); i++) {
        let value = load_value(kv_index(kv_head, kv_slot(sequence, base + i)) + chunk);
        let low = kv_low(value);
        let high = kv_high(value);
#for r in 0..ROWS_PER_LANE
        o$r_low += scores[tile_row$r * STRIDE + i] * low;
        o$r_high += scores[tile_row$r * STRIDE + i] * high;
#endfor
      }
    }
  }

  partial[softmax_row][quarter] = sum;
  workgroupBarrier();
#for r in 0..ROWS_PER_LANE
  let out_row$r = lane + $ru * LANES;
  if (lane < LANES && out_row$r < ROWS && first_row + out_row$r <= last_row) {
    let sums = partial[out_row$r];
    let inverse = 1.0 / (sums[0] + sums[1] + sums[2] + sums[3]);
    let out = ((first_row + out_row$r) * Y_STRIDE + id.y * HEAD_DIM) / 4u + 2u * chunk;
    y[out] = inverse * o$r_low;
    y[out + 1u] = inverse * o$r_high;
  }
#endfor
}
