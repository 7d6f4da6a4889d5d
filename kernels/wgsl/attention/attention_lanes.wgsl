// How a workgroup of attention.wgsl or attention_decode.wgsl deals out a split of the context, for HEADS
// query heads that share a KV head, so that every key and value is read once for all of them.
//
// CLUSTER neighbouring lanes of a subgroup share a position, and each of them has eight of its
// dimensions (PER_LANE times). Clusters go through positions of their own, without a barrier.
//
// So of every score a lane has a part. For BATCH positions and HEADS heads (rounded up to a power of
// two) these are SCORES parts, numbered head by head. They are added up and dealt out in one go: in
// each step a lane sends half of them away and gets the other half of the sums, until it has KEPT
// whole scores. So it takes one exponential for each, and what the others need of it (the weight of a
// position, the new scale of a head) they get by a shuffle.
#include "step.wgsl"
#include "kv_read_keys.wgsl"
#include "kv_read_values.wgsl"
#include "attention_range.wgsl"
#include "attention_split.wgsl"
#include "capped.wgsl"
// @param WG u32
// @param CLUSTER u32             lanes per position: a power of two, at most a subgroup
// @param PER_LANE u32            groups of eight dimensions per lane
// @param BATCH u32               positions that a cluster loads at once
// @param HEADS u32               query heads per workgroup
// @param GROUP u32               query heads per KV head
// @param SUBGROUPS u32           subgroups of a workgroup, at most
// @param MERGED u32              heads for which workgroup memory has room at once
// @param SCALE f32
// @param X_STRIDE u32
// @param X_OFFSET u32
@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> pages: array<u32>;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;

#let SCORES = BATCH * (1 << log2(2 * HEADS - 1))
#let KEPT = max(1, SCORES / CLUSTER)
#let KEPT_HEADS = max(1, KEPT / BATCH)  // that a lane has scores of
#let FOLDS = log2(SCORES / KEPT)  // steps to whole scores
#let CLUSTER_BITS = log2(CLUSTER)
#let HEAD_BITS = log2(BATCH * KEPT_HEADS / KEPT)  // of the number of lanes that share a head's scores

struct Group {  // eight dimensions of a head
  low: vec4<f32>,
  high: vec4<f32>,
}

const CLUSTERS = WG / CLUSTER;
const KEPT = $(KEPT)u;
const COPIES = CLUSTER * KEPT / $(SCORES)u;  // lanes that have the same scores
const GROUPS = HEAD_DIM / 8u;  // groups of eight dimensions in a head
const LOWEST = -3.0e38;
const LOG2_E = 1.44269504;  // the GPU's exponential is of base two
#if SOFTCAP > 0
const Q_SCALE: f32 = SCALE;  // the factor comes after the cap
#else
const Q_SCALE: f32 = SCALE * LOG2_E;
#endif

var<workgroup> parts: array<vec2<f32>, HEADS * SUBGROUPS>;  // (max, sum) of each subgroup
var<workgroup> outputs: array<vec4<f32>, MERGED * SUBGROUPS * GROUPS * 2u>;

fn load_group(heads: u32, group: u32) -> Group {
  return Group(x[heads + 2u * group], x[heads + 2u * group + 1u]);
}
