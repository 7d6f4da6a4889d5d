// Rotary position embedding of a group of eight dimensions in registers; rotate.wgsl does a head in
// workgroup memory. The partners of a group are another whole group (half-split: ROTARY_DIM / 2 is a
// multiple of eight) or in the group itself (INTERLEAVED: ROTARY_DIM is). Needs the struct Group and,
// where anything turns, the binding `table: array<vec4<f32>>`, [position][ROTARY_DIM / 2] of
// (cos, sin), two of them in a vec4.
// @param ROTARY_DIM u32          0: nothing turns
// @param INTERLEAVED bool
// @param TURN_FIRST bool         before the norm, whose weights then multiply what was turned
// What a group and its partners are multiplied by. sin has its sign.
struct Turn {
  cos: Group,
  sin: Group,
}

// The group in which a group has its partners.
fn partner_of(group: u32) -> u32 {
#if INTERLEAVED or ROTARY_DIM == 0
  return group;
#else
  let turned = select(group - ROTARY_DIM / 16u, group + ROTARY_DIM / 16u, group < ROTARY_DIM / 16u);
  return select(group, turned, group < ROTARY_DIM / 8u);
#endif
}

fn turn_of(group: u32, position: u32) -> Turn {
  if (group >= ROTARY_DIM / 8u) {  // it stays
    return Turn(Group(vec4<f32>(1.0), vec4<f32>(1.0)), Group());
  }
#if ROTARY_DIM == 0
  return Turn();
#elif INTERLEAVED
  let at = position * (ROTARY_DIM / 4u) + 2u * group;
  let t0 = table[at];
  let t1 = table[at + 1u];
  return Turn(
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
  return Turn(
    Group(vec4<f32>(t0.xz, t1.xz), vec4<f32>(t2.xz, t3.xz)),
    Group(sign * vec4<f32>(t0.yw, t1.yw), sign * vec4<f32>(t2.yw, t3.yw)),
  );
#endif
}

// A turn together with the weights of the norm before it, or after.
fn weighted(turn: Turn, weight: Group, partner: Group) -> Turn {
#if TURN_FIRST
  let low = weight.low;
  let high = weight.high;
#elif INTERLEAVED
  let low = weight.low.yxwz;
  let high = weight.high.yxwz;
#else
  let low = partner.low;
  let high = partner.high;
#endif
  return Turn(
    Group(turn.cos.low * weight.low, turn.cos.high * weight.high),
    Group(turn.sin.low * low, turn.sin.high * high),
  );
}

fn turned(group: Group, partner: Group, turn: Turn) -> Group {
#if INTERLEAVED
  let low = group.low.yxwz;
  let high = group.high.yxwz;
#else
  let low = partner.low;
  let high = partner.high;
#endif
  return Group(
    group.low * turn.cos.low + low * turn.sin.low,
    group.high * turn.cos.high + high * turn.sin.high,
  );
}
