// Sorts rows by expert: the pairs of row and slot that are routed to each, in order, filled up
// to whole tiles. A workgroup per expert counts all pairs, so it knows where its tiles begin.
#include "reduce.wgsl"
#include "routing.wgsl"
#include "step.wgsl"
// @param TILE u32                pairs of a tile
// @param TILES u32               tiles there is room for
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> routing: array<f32>;
@group(0) @binding(2) var<storage, read_write> tile_experts: array<u32>;  // NONE: of nobody
@group(0) @binding(3) var<storage, read_write> tile_pairs: array<u32>;    // NONE: filled up

const NONE = 0xffffffffu;

var<workgroup> counts: array<atomic<u32>, ALL_EXPERTS>;
var<workgroup> before: array<u32, WG>;  // pairs of this expert that earlier invocations have

// grid (experts)
@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) id: vec3<u32>, me: Invocation) {
  let pairs = step.n_rows * ALL_SLOTS;
  let share = (pairs + WG - 1u) / WG;
  let first = min(me.index * share, pairs);
  let end = min(first + share, pairs);
  for (var e = me.index; e < ALL_EXPERTS; e += WG) {
    atomicStore(&counts[e], 0u);
  }
  workgroupBarrier();
  var own = 0u;
  for (var pair = first; pair < end; pair++) {
    let expert = expert_of(pair / ALL_SLOTS, pair % ALL_SLOTS);
    atomicAdd(&counts[expert], 1u);
    own += u32(expert == id.x);
  }
  before[me.index] = own;
  workgroupBarrier();
  var tiles_before = 0.0;
  for (var e = me.index; e < id.x; e += WG) {
    tiles_before += f32((atomicLoad(&counts[e]) + TILE - 1u) / TILE);
  }
  let first_tile = u32(workgroup_add(tiles_before, me));
  let count = atomicLoad(&counts[id.x]);
  let end_tile = first_tile + (count + TILE - 1u) / TILE;
  for (var distance = 1u; distance < WG; distance *= 2u) {
    var sum = before[me.index];
    if (me.index >= distance) {
      sum += before[me.index - distance];
    }
    workgroupBarrier();
    before[me.index] = sum;
    workgroupBarrier();
  }
  var place = first_tile * TILE + before[me.index] - own;
  for (var pair = first; pair < end; pair++) {
    if (expert_of(pair / ALL_SLOTS, pair % ALL_SLOTS) == id.x) {
      tile_pairs[place] = pair;
      place++;
    }
  }
  for (var i = first_tile * TILE + count + me.index; i < end_tile * TILE; i += WG) {
    tile_pairs[i] = NONE;
  }
  for (var tile = first_tile + me.index; tile < end_tile; tile += WG) {
    tile_experts[tile] = id.x;
  }
  if (id.x == ALL_EXPERTS - 1u) {
    for (var tile = end_tile + me.index; tile < TILES; tile += WG) {
      tile_experts[tile] = NONE;
    }
  }
}
