// Sum and maximum over a workgroup of WG invocations (a power of two). Every invocation gets it.
// @param WG u32
// @param SUBGROUPS bool
struct Invocation {
  @builtin(local_invocation_index) index: u32,
#if SUBGROUPS
  @builtin(subgroup_id) subgroup: u32,
  @builtin(num_subgroups) n_subgroups: u32,
  @builtin(subgroup_invocation_id) lane: u32,
#endif
}

#if SUBGROUPS
var<workgroup> reduced: array<f32, WG / 4u>;  // no subgroup has fewer than 4 lanes

fn workgroup_add(value: f32, me: Invocation) -> f32 {
  let sum = subgroupAdd(value);
  workgroupBarrier();  // the result of an earlier reduction may still be read
  if (me.lane == 0u) {
    reduced[me.subgroup] = sum;
  }
  workgroupBarrier();
  var total = 0.0;
  for (var i = 0u; i < me.n_subgroups; i++) {
    total += reduced[i];
  }
  return total;
}

fn workgroup_max(value: f32, me: Invocation) -> f32 {
  let most = subgroupMax(value);
  workgroupBarrier();
  if (me.lane == 0u) {
    reduced[me.subgroup] = most;
  }
  workgroupBarrier();
  var result = reduced[0];
  for (var i = 1u; i < me.n_subgroups; i++) {
    result = max(result, reduced[i]);
  }
  return result;
}
#else
var<workgroup> reduced: array<f32, WG>;

fn workgroup_add(value: f32, me: Invocation) -> f32 {
  workgroupBarrier();  // the result of an earlier reduction may still be read
  reduced[me.index] = value;
  for (var half = WG / 2u; half > 0u; half /= 2u) {
    workgroupBarrier();
    if (me.index < half) {
      reduced[me.index] += reduced[me.index + half];
    }
  }
  workgroupBarrier();
  return reduced[0];
}

fn workgroup_max(value: f32, me: Invocation) -> f32 {
  workgroupBarrier();
  reduced[me.index] = value;
  for (var half = WG / 2u; half > 0u; half /= 2u) {
    workgroupBarrier();
    if (me.index < half) {
      reduced[me.index] = max(reduced[me.index], reduced[me.index + half]);
    }
  }
  workgroupBarrier();
  return reduced[0];
}
#endif
