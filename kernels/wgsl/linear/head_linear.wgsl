// y_h = x_h W_h^T for each head h, where x_h is the last K of its X_HEAD values, and W_h [N][K]. KEPT of
// those before them go in front of the result as they are or, with ROPE, rotated: workgroups of their
// own do that. QUANTIZE: the result goes out as int8. LATENT: one workgroup more writes a key that has
// nothing to do with these. For a few rows; matmul.wgsl does many.
//
// A workgroup has OUTPUTS outputs of a head, for ROWS rows, so that weights are read once for all of
// these; TEAM invocations share an output.
#include "step.wgsl"
#include "weight_group.wgsl"
#include "int8.wgsl"
#include "reduce.wgsl"
#if ROPE
#include "rotate_pair.wgsl"
#endif
#if LATENT
#include "latent.wgsl"
#endif
// @param ROPE bool
// @param LATENT bool             with ROPE, for one row
// @param N u32                   outputs of a head
// @param KEPT u32                all values before the last K, or 0
// @param X_HEAD u32
// @param X_STRIDE u32
// @param X_OFFSET u32
// @param Y_STRIDE u32
// @param FIRST_HEAD u32          of the shard
// @param ROWS u32
// @param WG u32
// @param TEAM u32
// @param QUANTIZE bool           for one row, KEPT = 0, and OUTPUTS a multiple of 16 that divides N
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> weight: array<vec4<u32>>;
#if SCALES_BOUND
@group(0) @binding(2) var<storage, read> scales: array<u32>;
#endif
@group(0) @binding($(2 + SCALES_BOUND)) var<storage, read> x: array<f32>;
#let KEEP = not QUANTIZE
#let NEXT_NORM = 0
#let OUTPUT = 3 + SCALES_BOUND
#include "next_input.wgsl"
#if ROPE
@group(0) @binding($(4 + SCALES_BOUND)) var<storage, read> table: array<vec2<f32>>;
#endif
#if LATENT
@group(0) @binding($(5 + SCALES_BOUND)) var<storage, read> latent: array<f32>;
@group(0) @binding($(6 + SCALES_BOUND)) var<storage, read> latent_norm: array<f32>;
@group(0) @binding($(7 + SCALES_BOUND)) var<storage, read_write> keys: array<KvWord>;
#if PAGED
@group(0) @binding($(8 + SCALES_BOUND)) var<storage, read> pages: array<u32>;
#endif
#endif

const OUTPUTS = WG / TEAM;
const FOURS = OUTPUTS / 4u;
const TILES = (N + OUTPUTS - 1u) / OUTPUTS;  // of a head
const EIGHTS = (K + 7u) / 8u;  // groups of eight columns
const STRIDE = TEAM + 1u;  // one more against bank conflicts
#let ROUNDS = (K + 8 * TEAM - 1) / (8 * TEAM)

var<workgroup> inputs: array<vec4<f32>, ROWS * EIGHTS * 2u>;
var<workgroup> partial: array<f32, ROWS * OUTPUTS * STRIDE>;

// grid (TILES + (KEPT > 0) + LATENT, rows / ROWS, heads of the shard)
@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) id: vec3<u32>, me: Invocation) {
  let tid = me.index;
#if LATENT
  if (id.x > TILES) {
    if (id.z == 0u) {
      write_latent(0u, me);
    }
    return;
  }
#endif
  let first_row = id.y * ROWS;
  let number = FIRST_HEAD + id.z;
  let x_head = X_OFFSET + number * X_HEAD;
  let y_head = number * (KEPT + N);
#if KEPT > 0
  if (id.x == TILES) {
    for (var i = tid; i < ROWS * KEPT; i += WG) {
      let row = first_row + i / KEPT;
      let d = i % KEPT;
      if (row < step.n_rows) {
        let first = row * X_STRIDE + x_head;
#if ROPE
        let value = rotate_pair(d, x[first + d], x[first + partner(d)], step.rows[row].position);
#else
        let value = x[first + d];
#endif
        y[row * Y_STRIDE + y_head + d] = value;
      }
    }
    return;
  }
#endif
  // Weights are on their way while x is.
  let w_row = id.z * N + min(id.x * OUTPUTS + tid / TEAM, N - 1u);
#for i in 0..ROUNDS
  let group$i = tid % TEAM + $iu * TEAM;
  let w$i = load_stored(w_row, min(group$i, EIGHTS - 1u));
#endfor
  fill_tables(tid, WG);
  for (var i = tid; i < ROWS * EIGHTS * 2u; i += WG) {
    let row = min(first_row + i / (EIGHTS * 2u), step.n_rows - 1u);
    let at = row * X_STRIDE + x_head + X_HEAD - K;
    let k = i % (EIGHTS * 2u) * 4u + vec4<u32>(0u, 1u, 2u, 3u);
    let places = at + min(k, vec4<u32>(K - 1u));
    let four = vec4<f32>(x[places.x], x[places.y], x[places.z], x[places.w]);
    inputs[i] = select(vec4<f32>(), four, k < vec4<u32>(K));
  }
  workgroupBarrier();
#for r in 0..ROWS
  var sum$r = 0.0;
#endfor
#for i in 0..ROUNDS
  if (group$i < EIGHTS) {
    let wide$i = widen_group(w$i, group$i);
#for r in 0..ROWS
    sum$r += dot(wide$i[0], inputs[2u * ($ru * EIGHTS + group$i)]);
    sum$r += dot(wide$i[1], inputs[2u * ($ru * EIGHTS + group$i) + 1u]);
#endfor
  }
#endfor
#for r in 0..ROWS
  partial[($ru * OUTPUTS + tid / TEAM) * STRIDE + tid % TEAM] = sum$r;
#endfor
  workgroupBarrier();
  for (var i = tid; i < ROWS * OUTPUTS; i += WG) {
    let row = first_row + i / OUTPUTS;
    let n = id.x * OUTPUTS + i % OUTPUTS;
    var sum = 0.0;
#for j in 0..TEAM
    sum += partial[i * STRIDE + $ju];
#endfor
    if (QUANTIZE || (row < step.n_rows && n < N)) {
      store_output(i, row * Y_STRIDE + y_head + KEPT + n, sum, 0.0);
    }
  }
#if QUANTIZE
  workgroupBarrier();
  if (tid < FOURS) {
    quantize_outputs(tid, 0u, Y_STRIDE / 32u, (y_head + id.x * OUTPUTS) / 16u);
  }
#endif
}
