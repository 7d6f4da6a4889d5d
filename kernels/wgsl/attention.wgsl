// Attention of a few rows (decode): scores, softmax and weighted sum of one split of the context,
// for HEADS query heads that share a KV head, so that every key and value is read once for them.
// attention_combine joins the splits (Flash-Decoding, Dao et al. 2023).
#include "step.wgsl"
#include "kv_read_keys.wgsl"
#include "kv_read_values.wgsl"
#include "attention_range.wgsl"
#include "attention_split.wgsl"
// @param WG u32
// @param HEADS u32               query heads per workgroup
// @param GROUP u32               query heads per KV head
// @param SCALE f32
// @param Q_STRIDE u32
// @param Q_OFFSET u32
// @param BATCH u32               positions that a lane loads before it adds up
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> pages: array<u32>;
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> keys: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> values: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read_write> y: array<f32>;              // [row][head][split][HEAD_DIM]
@group(0) @binding(6) var<storage, read_write> weights: array<vec2<f32>>;  // (max, sum) of each split

const CHUNKS = HEAD_DIM / 8u;  // invocations side by side, eight dimensions each
const LANES = WG / CHUNKS;     // positions at once
const SLICES = 16u;            // invocations per head in the softmax
const LOWEST = -3.0e38;

var<workgroup> scores: array<array<f32, MAX_SPLIT>, HEADS>;
var<workgroup> scratch: array<f32, WG * max(HEADS * BATCH, 8u)>;  // parts of scores, then of outputs
var<workgroup> slice_max: array<array<f32, SLICES>, HEADS>;
var<workgroup> slice_sum: array<array<f32, SLICES>, HEADS>;

// grid (splits, KV heads * GROUP / HEADS, rows)
@compute @workgroup_size(WG)
fn main(
  @builtin(workgroup_id) id: vec3<u32>,
  @builtin(num_workgroups) size: vec3<u32>,
  @builtin(local_invocation_index) tid: u32,
) {
  let row = step.rows[id.z];
  let kv_head = id.y * HEADS / GROUP;
  let first_head = id.y * HEADS;
  let first = first_position(row.position);
  let length = split_length(row.position + 1u - first);
  let start = first + id.x * length;
  if (start > row.position) {
    return;
  }
  let count = min(length, row.position + 1u - start);
  let chunk = tid % CHUNKS;
  let lane = tid / CHUNKS;

  // scores: each invocation multiplies eight dimensions, then the chunks of a position are summed
  let query = (id.z * Q_STRIDE + Q_OFFSET + first_head * HEAD_DIM) / 4u + 2u * chunk;
#for h in 0..HEADS
  let q$h_low = SCALE * q[query + $hu * HEAD_DIM / 4u];
  let q$h_high = SCALE * q[query + $hu * HEAD_DIM / 4u + 1u];
#endfor
  for (var base = 0u; base < count; base += LANES * BATCH) {
    if (lane < LANES) {
#for b in 0..BATCH
      let position$b = start + min(base + $bu * LANES + lane, count - 1u);
      let key$b = load_key(kv_index(kv_head, kv_slot(row.sequence, position$b)) + chunk);
#endfor
#for b in 0..BATCH
#for h in 0..HEADS
      scratch[(($hu * BATCH + $bu) * LANES + lane) * CHUNKS + chunk] =
        dot(kv_low(key$b), q$h_low) + dot(kv_high(key$b), q$h_high);
#endfor
#endfor
    }
    workgroupBarrier();
    for (var i = tid; i < HEADS * BATCH * LANES; i += WG) {
      let place = base + i % (BATCH * LANES);
      if (place < count) {
        var score = 0.0;
        for (var c = 0u; c < CHUNKS; c++) {
          score += scratch[i * CHUNKS + (c + i) % CHUNKS];  // rotated: no bank conflicts
        }
        scores[i / (BATCH * LANES)][place] = score;
      }
    }
    workgroupBarrier();
  }

  // softmax numerators, maximum and sum of the split
  if (tid < HEADS * SLICES) {
    var most = LOWEST;
    for (var i = tid % SLICES; i < count; i += SLICES) {
      most = max(most, scores[tid / SLICES][i]);
    }
    slice_max[tid / SLICES][tid % SLICES] = most;
  }
  workgroupBarrier();
  if (tid < HEADS * SLICES) {
    let h = tid / SLICES;
    var most = LOWEST;
    for (var i = 0u; i < SLICES; i++) {
      most = max(most, slice_max[h][i]);
    }
    var sum = 0.0;
    for (var i = tid % SLICES; i < count; i += SLICES) {
      let p = exp(scores[h][i] - most);
      scores[h][i] = p;
      sum += p;
    }
    slice_sum[h][tid % SLICES] = sum;
  }
  workgroupBarrier();

  // weighted sum: each invocation adds up its positions, then the lanes are summed
#for h in 0..HEADS
  var o$h_low = vec4<f32>();
  var o$h_high = vec4<f32>();
#endfor
  if (lane < LANES) {
    for (var i = lane; i < count; i += LANES) {
      let value = load_value(kv_index(kv_head, kv_slot(row.sequence, start + i)) + chunk);
      let value_low = kv_low(value);
      let value_high = kv_high(value);
#for h in 0..HEADS
      o$h_low += scores[$h][i] * value_low;
      o$h_high += scores[$h][i] * value_high;
#endfor
    }
  }
#for h in 0..HEADS
  if (lane < LANES) {
    let out = lane * HEAD_DIM + 8u * chunk;
#for i in 0..4
    scratch[out + $iu] = o$h_low[$i];
    scratch[out + 4u + $iu] = o$h_high[$i];
#endfor
  }
  workgroupBarrier();
  for (var d = tid; d < HEAD_DIM; d += WG) {
    var sum = 0.0;
    for (var i = 0u; i < LANES; i++) {
      sum += scratch[i * HEAD_DIM + d];
    }
    y[((id.z * HEADS * size.y + first_head + $hu) * STORED_SPLITS + id.x) * HEAD_DIM + d] = sum;
  }
  workgroupBarrier();
#endfor
  if (tid < HEADS) {
    var most = LOWEST;
    var sum = 0.0;
    for (var i = 0u; i < SLICES; i++) {
      most = max(most, slice_max[tid][i]);
      sum += slice_sum[tid][i];
    }
    weights[(id.z * HEADS * size.y + first_head + tid) * STORED_SPLITS + id.x] =
      vec2<f32>(most, sum);
  }
}
