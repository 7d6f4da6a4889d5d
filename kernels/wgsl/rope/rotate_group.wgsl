// Rotary position embedding of a group of eight dimensions in registers; rotate_head.wgsl does a head in
// workgroup memory. The partners of a group are another whole group (half-split: ROTARY_DIM / 2 is a
// multiple of eight) or in the group itself (INTERLEAVED: ROTARY_DIM is). Needs the struct Group and,
// where anything is rotated, the binding `table: array<vec4<f32>>`, [position][ROTARY_DIM / 2] of
// (cos, sin), two of them in a vec4.
// @param ROTARY_DIM u32          0: nothing is rotated
// @param INTERLEAVED bool
// @param ROTATE_FIRST bool       before the norm, whose weights then multiply what was rotated
// The factors of a group and of its partners. sin has its sign.
struct Rotation {
  cos: Group,
  sin: Group,
}

// The group in which a group has its partners.
fn partner_of(group: u32) -> u32 {
#if INTERLEAVED or ROTARY_DIM == 0
  return group;
#else
  let other = select(group - ROTARY_DIM / 16u, group + ROTARY_DIM / 16u, group < ROTARY_DIM / 16u);
  return select(group, other, group < ROTARY_DIM / 8u);
#endif
}

fn rotation_of(group: u32, position: u32) -> Rotation {
  if (group >= ROTARY_DIM / 8u) {  // it stays
    return Rotation(Group(vec4<f32>(1.0), vec4<f32>(1.0)), Group());
  }
#if ROTARY_DIM == 0
  return Rotation();
#elif INTERLEAVED
  let at = position * (ROTARY_DIM / 4u) + 2u * group;
  let t0 = table[at];
  let t1 = table[at + 1u];
  return Rotation(
    Group(t0.xxzz, t1.xxzz),
    Group(vec4<f32>(-t0.y, t0.y, -t0.w, t0.w), vec4<f32>(-t1.y, t1.y, -t1.w, t1.w)),
  );
#else
  let at = position * (ROTARY_DIM / 4u) + 4u * (group % (ROTARY_DIM / 16u));
  let t0 = table[at];
  let t1 = table[at + 1u];
  let t2 = table[at + 2u];
  let t3 = table[at + 3u];
  let sign = select(1.0, -1.0, group < ROTARY_DIM / 16u);
  return Rotation(
    Group(vec4<f32>(t0.xz, t1.xz), vec4<f32>(t2.xz, t3.xz)),
    Group(sign * vec4<f32>(t0.yw, t1.yw), sign * vec4<f32>(t2.yw, t3.yw)),
  );
#endif
}

// A rotation together with the weights of the norm before it, or after.
fn weighted(rotation: Rotation, weight: Group, partner: Group) -> Rotation {
#if ROTATE_FIRST
  let low = weight.low;
  let high = weight.high;
#elif INTERLEAVED
  let low = weight.low.yxwz;
  let high = weight.high.yxwz;
#else
  let low = partner.low;
  let high = partner.high;
#endif
  return Rotation(
    Group(rotation.cos.low * weight.low, rotation.cos.high * weight.high),
    Group(rotation.sin.low * low, rotation.sin.high * high),
  );
}

fn rotate_group(group: Group, partner: Group, rotation: Rotation) -> Group {
#if INTERLEAVED
  let low = group.low.yxwz;
  let high = group.high.yxwz;
#else
  let low = partner.low;
  let high = partner.high;
#endif
  return Group(
    group.low * rotation.cos.low + low * rotation.sin.low,
    group.high * rotation.cos.high + high * rotation.sin.high,
  );
}
