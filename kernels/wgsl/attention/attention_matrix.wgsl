// attention_tiled by small matrices of f16 (matrix.wgsl): y = softmax(SCALE Q K^T) V for each head of many rows,
// with an online softmax (FlashAttention, Dao et al. 2022). Queries, keys, values and exponentials are f16, a row
// of queries times a power of two; scores, sums and outputs are f32.
//
// A workgroup has ROWS rows of one head. Each of its subgroups has SUB_ROWS of them and DIMS of the head's
// dimensions, whose queries and outputs stay in registers: it adds up these dimensions' part of the scores S, and
// its outputs O += P V. In between S and P = exp(S) go through workgroup memory, where a few neighbouring lanes
// have a row of them. The keys and values of KEYS positions lie there too, while the next ones are on their way
// into registers.
//
// Outputs can only be scaled through workgroup memory. So the maximum that is taken from scores grows no sooner
// than one is larger by GROWTH: exponentials are up to 2^GROWTH then.
#include "step.wgsl"
#include "kv_read_keys.wgsl"
#if not LATENT
#include "kv_read_values.wgsl"
#endif
#include "attention_range.wgsl"
#include "capped.wgsl"
#include "half_scale.wgsl"
#include "matrix.wgsl"
// @param LATENT bool             values are the keys
// @param GROUP u32               query heads per KV head
// @param SCALE f32
// @param Q_STRIDE u32
// @param Q_OFFSET u32
// @param Y_STRIDE u32
// @param ROWS u32                multiples of SUB_ROWS, which are of MATRIX_M
// @param SUB_ROWS u32
// @param KEYS u32                a multiple of 8, MATRIX_N and MATRIX_K; divides a page
// @param DIMS u32                likewise; divides HEAD_DIM
// @param SINKS bool
#if MATRIX == subgroup
// The condition around barriers is uniform in fact.
#enable chromium_disable_uniformity_analysis
#endif
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> pages: array<u32>;
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> keys: array<KvWords>;
#if not LATENT
@group(0) @binding(4) var<storage, read> values: array<KvWords>;
#endif
@group(0) @binding($(5 - LATENT)) var<storage, read_write> y: array<vec4<f32>>;
#if SINKS
@group(0) @binding($(6 - LATENT)) var<storage, read> sinks: array<f32>;
#endif

#let PARTS = HEAD_DIM / DIMS
#let SIZE = ROWS / SUB_ROWS * PARTS * LANES
#let M_MATRICES = SUB_ROWS / MATRIX_M
#let KEY_MATRICES = KEYS / MATRIX_N
#let DIM_MATRICES = DIMS / MATRIX_N
// Lanes that have a row of scores, and groups of eight keys that each has.
#let ROW_LANES = min(SIZE / ROWS, KEYS / 8)
#let GROUPS = KEYS / 8 / ROW_LANES
// Outputs go through the place of the scores, as many dimensions at a time as there are keys.
#let FOLDS = (DIM_MATRICES + KEY_MATRICES - 1) / KEY_MATRICES
// Groups of eight dimensions of a tile of keys that an invocation loads.
#let LOADS = (KEYS * HEAD_DIM / 8 + SIZE - 1) / SIZE
const ROW_GROUPS = HEAD_DIM / 8u;
const LOWEST = -1.0e38;
const MASKED = -3.0e38;
const LOG2_E = 1.44269504;  // the GPU's exponential is of base two
const GROWTH = 8.0;
// int8 times their scales may be beyond f16 as keys and values in f16 are not.
#if KV == q8
const UNIT = 16.0;
#else
const UNIT = 1.0;
#endif
// Against bank conflicts rows lie further apart than they need to.
const TILE_STRIDE = ROW_GROUPS + 1u;
const SCORE_STRIDE = KEYS / 4u + 2u;
const WEIGHT_STRIDE = KEYS / 8u + 1u;
const SUB_SCORES = SUB_ROWS * SCORE_STRIDE;  // of a subgroup
#if LATENT
const V_PLACE = 0u;
#else
const V_PLACE = KEYS * TILE_STRIDE;
#endif
const S_PLACE = V_PLACE + KEYS * TILE_STRIDE;
const P_PLACE = S_PLACE + ROWS / SUB_ROWS * $(PARTS)u * SUB_SCORES;
const P_END = P_PLACE + ROWS * WEIGHT_STRIDE;
#if MATRIX == emulated
const Q_PLACE = P_END;
#else
const Q_PLACE = 0u;
#endif

var<workgroup> pool: array<vec4<u32>, max(P_END, Q_PLACE + ROWS * TILE_STRIDE)>;
var<workgroup> factors: array<f32, ROWS>;          // of the outputs
var<workgroup> grown: array<atomic<u32>, 4>;       // whether any factor is not 1, in every other step; 16 bytes

struct Tile {
  base: u32,    // its first position
  offset: u32,  // from its positions to where they lie
}

fn tile_at(base: u32, sequence: u32, last_place: u32) -> Tile {
  let found = min(base, last_place);
  return Tile(base, kv_slot(sequence, found) - found);
}

// Where a tile's eight dimensions lie in the cache that are group i of the tile. Beyond the last position any: its
// weight is zero.
fn kv_at(kv_head: u32, tile: Tile, last_place: u32, i: u32) -> u32 {
  let place = min(tile.base + min(i / ROW_GROUPS, KEYS - 1u), last_place);
  return kv_index(kv_head, tile.offset + place) + i % ROW_GROUPS;
}

struct Groups {  // of a tile: what an invocation loads
#for l in 0..LOADS
  g$l: Kv8,
#endfor
}

fn load_keys(kv_head: u32, tile: Tile, last_place: u32, tid: u32) -> Groups {
  return Groups(
#for l in 0..LOADS
    load_key(kv_at(kv_head, tile, last_place, tid + $($l * SIZE)u)),
#endfor
  );
}
#if not LATENT

fn load_values(kv_head: u32, tile: Tile, last_place: u32, tid: u32) -> Groups {
  return Groups(
#for l in 0..LOADS
    load_value(kv_at(kv_head, tile, last_place, tid + $($l * SIZE)u)),
#endfor
  );
}
#endif

fn halves(kv: Kv8) -> vec4<u32> {
#if KV == f16
  return kv;
#else
  return eight_halves(kv_low(kv) / UNIT, kv_high(kv) / UNIT);
#endif
}

fn store_tile(place: u32, loaded: Groups, tid: u32) {
#for l in 0..LOADS
#if ($l + 1) * SIZE > KEYS * HEAD_DIM / 8
  if (tid + $($l * SIZE)u < KEYS * ROW_GROUPS)
#endif
  {
    let i = tid + $($l * SIZE)u;
    pool[place + i / ROW_GROUPS * TILE_STRIDE + i % ROW_GROUPS] = halves(loaded.g$l);
  }
#endfor
}

#if SOFTCAP > 0
fn capped_four(x: vec4<f32>) -> vec4<f32> {
  return vec4<f32>(capped(x.x), capped(x.y), capped(x.z), capped(x.w));
}

#endif
// grid (heads, rows / ROWS), and PROMPTS - 1 more tiles
@compute @workgroup_size($(SIZE))
fn main(
  @builtin(workgroup_id) id: vec3<u32>,
  @builtin(num_workgroups) size: vec3<u32>,
  @builtin(local_invocation_index) tid: u32,
) {
#include "prompt_rows.wgsl"
  let sequence = step.rows[first_row].sequence;
  let first_place = step.rows[first_row].position;
  let last_place = step.rows[last_row].position;
  let kv_head = id.x / GROUP;
  let lane = tid % LANES;
  let part = tid / LANES % $(PARTS)u;
  let sub_row = tid / LANES / $(PARTS)u * SUB_ROWS;
  let sub_scores = S_PLACE + tid / LANES * SUB_SCORES;

  // The row of scores that this lane works on, and the lane's number in it. Some lanes may have no row.
  let row = min(tid / $(ROW_LANES)u, ROWS - 1u);
  let row_lane = tid % $(ROW_LANES)u;
  let has_scores = tid < ROWS * $(ROW_LANES)u;
  let leads_row = has_scores && row_lane == 0u;
  let row_scores =
    S_PLACE + row / SUB_ROWS * $(PARTS)u * SUB_SCORES + row % SUB_ROWS * SCORE_STRIDE;
  let y_row = min(first_row + row, last_row);
  let position = step.rows[y_row].position;
  var most = LOWEST;
  var sum = 0.0;  // of the lane's own weights

  let q_from = (y_row * Q_STRIDE + Q_OFFSET + id.x * HEAD_DIM) / 4u;
  var q_most = 0.0;
  for (var g = row_lane; g < ROW_GROUPS; g += $(ROW_LANES)u) {
    let large = max(abs(q[q_from + 2u * g]), abs(q[q_from + 2u * g + 1u]));
    q_most = max(q_most, max(max(large.x, large.y), max(large.z, large.w)));
  }
#for l in 0..log2(ROW_LANES)
  q_most = max(q_most, subgroupShuffleXor(q_most, $(1 << $l)u));
#endfor
  let q_scale = half_scale(q_most);
#if SOFTCAP > 0
  let row_scale = q_scale.inverse * UNIT * SCALE;
#else
  let row_scale = q_scale.inverse * UNIT * SCALE * LOG2_E;
#endif
  if (has_scores) {
    for (var g = row_lane; g < ROW_GROUPS; g += $(ROW_LANES)u) {
      pool[Q_PLACE + row * TILE_STRIDE + g] = eight_halves(
        q_scale.factor * q[q_from + 2u * g], q_scale.factor * q[q_from + 2u * g + 1u]);
    }
  }
  if (tid < 4u) {
    atomicStore(&grown[tid], 0u);
  }
  workgroupBarrier();
#for i in 0..M_MATRICES
#for k in 0..DIMS / MATRIX_K
  let q$i_$k = load_left(
    Q_PLACE + (sub_row + $iu * MATRIX_M) * TILE_STRIDE + (part * DIMS + $ku * MATRIX_K) / 8u,
    TILE_STRIDE);
#endfor
#for n in 0..DIM_MATRICES
  var o$i_$n = Sum();
#endfor
#endfor
  workgroupBarrier();

  // Before the first tile there are weights of zero, and values of zero.
  for (var i = tid; i < ROWS * WEIGHT_STRIDE; i += $(SIZE)u) {
    pool[P_PLACE + i] = vec4<u32>();
  }
  for (var i = tid; i < KEYS * TILE_STRIDE; i += $(SIZE)u) {
    pool[V_PLACE + i] = vec4<u32>();
  }
  var tile = tile_at(first_position(first_place) / KEYS * KEYS, sequence, last_place);
  var next = tile_at(tile.base + KEYS, sequence, last_place);
#if LATENT
  var next_keys = load_keys(kv_head, tile, last_place, tid);
#else
  store_tile(0u, load_keys(kv_head, tile, last_place, tid), tid);
  var next_keys = load_keys(kv_head, next, last_place, tid);
  var next_values = load_values(kv_head, tile, last_place, tid);
#endif
  workgroupBarrier();
  // Outputs are scaled outside of the loop over tiles: inside, the scaling made the whole loop slower.
  var ended = false;
  var turn = 0u;
  loop {
    loop {
      // O += P V, of the tile before
#for k in 0..KEYS / MATRIX_K
#for i in 0..M_MATRICES
      let weight$k_$i = load_left(
        P_PLACE + (sub_row + $iu * MATRIX_M) * WEIGHT_STRIDE + $ku * MATRIX_K / 8u, WEIGHT_STRIDE);
#endfor
#for n in 0..DIM_MATRICES
      let value$k_$n = load_right_by_rows(
        V_PLACE + $ku * MATRIX_K * TILE_STRIDE + (part * DIMS + $nu * MATRIX_N) / 8u, TILE_STRIDE);
#for i in 0..M_MATRICES
      o$i_$n = multiply(weight$k_$i, value$k_$n, o$i_$n, lane);
#endfor
#endfor
#endfor
#if LATENT
      workgroupBarrier();
      store_tile(0u, next_keys, tid);
      next_keys = load_keys(kv_head, next, last_place, tid);
      workgroupBarrier();
#endif
      ended = tile.base > last_place;
      if (ended) {
        break;
      }

      // S = Q K^T
#for i in 0..M_MATRICES
#for j in 0..KEY_MATRICES
      var s$i_$j = Sum();
#endfor
#endfor
#for k in 0..DIMS / MATRIX_K
#for j in 0..KEY_MATRICES
      let key$k_$j = load_right(
        $ju * MATRIX_N * TILE_STRIDE + (part * DIMS + $ku * MATRIX_K) / 8u, TILE_STRIDE);
#for i in 0..M_MATRICES
      s$i_$j = multiply(q$i_$k, key$k_$j, s$i_$j, lane);
#endfor
#endfor
#endfor
#for i in 0..M_MATRICES
#for j in 0..KEY_MATRICES
      store_sum(
        sub_scores + $iu * MATRIX_M * SCORE_STRIDE + $ju * MATRIX_N / 4u, SCORE_STRIDE, s$i_$j, lane);
#endfor
#endfor
      workgroupBarrier();

      // The values of this tile and the keys of the next take the places of those that were used.
      let after = tile_at(next.base + KEYS, sequence, last_place);
#if not LATENT
      store_tile(V_PLACE, next_values, tid);
      next_values = load_values(kv_head, next, last_place, tid);
      store_tile(0u, next_keys, tid);
      next_keys = load_keys(kv_head, after, last_place, tid);
#endif

      // P = exp(S - most)
      var tile_most = LOWEST;
#for g in 0..GROUPS
      let group$g = $($g * ROW_LANES)u + row_lane;
#for h in 0..2
      // Every other lane has its two fours the other way round, against bank conflicts.
      let four$g_$h = 2u * group$g + (row_lane + $hu) % 2u;
      var score$g_$h = vec4<f32>();
#for c in 0..PARTS
      score$g_$h += bitcast<vec4<f32>>(pool[row_scores + $cu * SUB_SCORES + four$g_$h]);
#endfor
#if SOFTCAP > 0
      score$g_$h = LOG2_E * capped_four(row_scale * score$g_$h);
#else
      score$g_$h *= row_scale;
#endif
#endfor
#endfor
      if (tile.base + KEYS > first_place + 1u || tile.base < first_position(last_place)) {
#for g in 0..GROUPS
#for h in 0..2
        let place$g_$h = vec4<u32>(tile.base + 4u * four$g_$h) + vec4<u32>(0u, 1u, 2u, 3u);
        score$g_$h = select(
          vec4<f32>(MASKED), score$g_$h,
          (place$g_$h <= vec4<u32>(position))
            & (place$g_$h >= vec4<u32>(first_position(position))));
#endfor
#endfor
      }
#for g in 0..GROUPS
      let most$g = max(score$g_0, score$g_1);
      tile_most = max(tile_most, max(max(most$g.x, most$g.y), max(most$g.z, most$g.w)));
#endfor
#for l in 0..log2(ROW_LANES)
      tile_most = max(tile_most, subgroupShuffleXor(tile_most, $(1 << $l)u));
#endfor
      let grows = tile_most > most + GROWTH;
      let factor = select(1.0, exp2(most - tile_most), grows);
      let has_outputs = most > LOWEST;
      most = select(most, tile_most, grows);
      sum *= factor;
#for g in 0..GROUPS
      let p$g_0 = exp2(score$g_0 - most);
      let p$g_1 = exp2(score$g_1 - most);
      let both$g = p$g_0 + p$g_1;
      sum += both$g.x + both$g.y + both$g.z + both$g.w;
      if (has_scores) {
        let odd = row_lane % 2u == 1u;
        pool[P_PLACE + row * WEIGHT_STRIDE + group$g] =
          eight_halves(select(p$g_0, p$g_1, odd), select(p$g_1, p$g_0, odd));
      }
#endfor
      if (leads_row) {
        factors[row] = factor;
        if (grows && has_outputs) {
          atomicStore(&grown[turn], 1u);
        }
      }
      if (tid == 0u) {
        atomicStore(&grown[1u - turn], 0u);
      }
      workgroupBarrier();

      tile = next;
      next = after;
      turn = 1u - turn;
#if MATRIX == emulated
      break;  // always, as compilers do not see that the condition is uniform
#else
      if (atomicLoad(&grown[1u - turn]) == 1u) {
        break;
      }
#endif
    }
    if (ended) {
      break;
    }
#for f in 0..FOLDS
#for i in 0..M_MATRICES
#for j in $f * KEY_MATRICES..min(DIM_MATRICES, ($f + 1) * KEY_MATRICES)
    store_sum(
      sub_scores + $iu * MATRIX_M * SCORE_STRIDE + $($j - $f * KEY_MATRICES)u * MATRIX_N / 4u,
      SCORE_STRIDE, o$i_$j, lane);
#endfor
#endfor
    workgroupBarrier();
    for (var i = lane; i < SUB_ROWS * KEYS / 4u; i += LANES) {
      let at = sub_scores + i / (KEYS / 4u) * SCORE_STRIDE + i % (KEYS / 4u);
      pool[at] = bitcast<vec4<u32>>(
        factors[sub_row + i / (KEYS / 4u)] * bitcast<vec4<f32>>(pool[at]));
    }
    workgroupBarrier();
#for i in 0..M_MATRICES
#for j in $f * KEY_MATRICES..min(DIM_MATRICES, ($f + 1) * KEY_MATRICES)
    o$i_$j = load_sum(
      sub_scores + $iu * MATRIX_M * SCORE_STRIDE + $($j - $f * KEY_MATRICES)u * MATRIX_N / 4u,
      SCORE_STRIDE, lane);
#endfor
#endfor
    workgroupBarrier();
#endfor
  }

#for l in 0..log2(ROW_LANES)
  sum += subgroupShuffleXor(sum, $(1 << $l)u);
#endfor
#if SINKS
  sum += exp2(LOG2_E * sinks[id.x] - most);
#endif
  if (leads_row) {
    factors[row] = UNIT / sum;
  }
  workgroupBarrier();
#for f in 0..FOLDS
#for i in 0..M_MATRICES
#for j in $f * KEY_MATRICES..min(DIM_MATRICES, ($f + 1) * KEY_MATRICES)
  store_sum(
    sub_scores + $iu * MATRIX_M * SCORE_STRIDE + $($j - $f * KEY_MATRICES)u * MATRIX_N / 4u,
    SCORE_STRIDE, o$i_$j, lane);
#endfor
#endfor
  workgroupBarrier();
  for (var i = lane; i < SUB_ROWS * KEYS / 4u; i += LANES) {
    let own = sub_row + i / (KEYS / 4u);
    let dim = $($f * KEYS)u + 4u * (i % (KEYS / 4u));
    if (first_row + own <= last_row && dim < DIMS) {
      let at = sub_scores + i / (KEYS / 4u) * SCORE_STRIDE + i % (KEYS / 4u);
      y[((first_row + own) * Y_STRIDE + id.x * HEAD_DIM + part * DIMS + dim) / 4u] =
        factors[own] * bitcast<vec4<f32>>(pool[at]);
    }
  }
  workgroupBarrier();
#endfor
}
