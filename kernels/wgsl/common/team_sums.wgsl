// Sums of matmul_vec.wgsl and expert_matmul_vec.wgsl: a workgroup consists of teams of TEAM invocations,
// each of which makes VALUES (a const) sums over its invocations.
#include "reduce.wgsl"
// @param TEAM u32                a multiple of the subgroups' size, or WG
const TEAMS = WG / TEAM;
#if SUBGROUPS
const PARTS = TEAM / 4u;  // of each sum at most: no subgroup has fewer lanes
#else
const PARTS = 1u;
#endif

var<workgroup> partial: array<array<array<f32, PARTS>, VALUES>, TEAMS>;

// Sum a value over the team, as far as it goes without waiting for the other subgroups.
fn keep(team: u32, part: u32, value: u32, sum: f32, me: Invocation) {
#if SUBGROUPS
  let whole = subgroupAdd(sum);
  if (me.lane == 0u) {
    partial[team][value][part] = whole;
  }
#else
  let whole = workgroup_add(sum, me);
  if (me.index == 0u) {
    partial[team][value][part] = whole;
  }
#endif
}

// What all of them have kept; after a barrier.
fn total(team: u32, value: u32, parts: u32) -> f32 {
  var sum = 0.0;
  for (var i = 0u; i < parts; i++) {
    sum += partial[team][value][i];
  }
  return sum;
}
