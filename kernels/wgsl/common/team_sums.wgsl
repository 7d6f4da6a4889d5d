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

struct Team {  // of an invocation, which is
  index: u32,
  lane: u32,   // so many in the team,
  part: u32,   // in so many of its subgroups,
  parts: u32,  // of which there are so many
}

fn team_of(me: Invocation) -> Team {
#if TEAM == WG and SUBGROUPS
  return Team(0u, me.index, me.subgroup, me.n_subgroups);
#elif TEAM == WG
  return Team(0u, me.index, 0u, 1u);
#else
  // Teams are made of whole subgroups.
  let parts = me.n_subgroups / TEAMS;
  let part = me.subgroup % parts;
  return Team(me.subgroup / parts, part * (WG / me.n_subgroups) + me.lane, part, parts);
#endif
}

// Sum a value over the team, as far as it goes without waiting for the other subgroups.
fn keep(team: Team, value: u32, sum: f32, me: Invocation) {
#if SUBGROUPS
  let whole = subgroupAdd(sum);
  if (me.lane == 0u) {
    partial[team.index][value][team.part] = whole;
  }
#else
  let whole = workgroup_add(sum, me);
  if (me.index == 0u) {
    partial[team.index][value][team.part] = whole;
  }
#endif
}

// The sum of the values that all parts of a team have kept; to be called after a barrier.
fn total(team: u32, value: u32, parts: u32) -> f32 {
  var sum = 0.0;
  for (var i = 0u; i < parts; i++) {
    sum += partial[team][value][i];
  }
  return sum;
}
