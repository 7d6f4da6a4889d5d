// Eight values of a row of the binding `weight: array<vec4<u32>>`, as f32: load_group, or load_stored and
// widen_group, where they are to wait in fewer registers. Quantised weights need the binding
// `scales: array<u32>`, and some of them a table in workgroup memory: fill_tables, called by all
// invocations of a workgroup, before anything is widened. nf4 is read as it is published: what products
// round of it (table_int8.wgsl) is no part of a value.
#include "weight.wgsl"
#include "scales.wgsl"
#if not CODES
#let COPIES = 1
#include "integers.wgsl"
#endif
// @param K u32                   columns of W
#if SCALES_BOUND
struct Stored {
#if CODES
  values: Packed8,
#else
  values: Integers,  // of the block
#endif
  scale: RawScale,
}

fn load_stored(row: u32, group: u32) -> Stored {
#if CODES
  return Stored(load8(row * W_EIGHTS + group), load_scale(row, group / (GROUP_SIZE / 8u)));
#else
  return Stored(load_integers(row, group / 4u), load_scale(row, group / (GROUP_SIZE / 8u)));
#endif
}

fn widen_group(w: Stored, group: u32) -> array<vec4<f32>, 2> {
  let scale = widen_scale(w.scale, group / (GROUP_SIZE / 8u));
#if CODES
  return array<vec4<f32>, 2>(CODE * scale.x * low4(w.values), CODE * scale.x * high4(w.values));
#else
  var sixteen = low_int8(w.values);
  if (group % 4u >= 2u) {
    sixteen = high_int8(w.values);
  }
  let first = group % 2u * 2u;
  return array<vec4<f32>, 2>(
    INT8_UNIT * scale.x * vec4<f32>(unpack4xI8(sixteen[first])) + scale.y,
    INT8_UNIT * scale.x * vec4<f32>(unpack4xI8(sixteen[first + 1u])) + scale.y);
#endif
}
#else
alias Stored = Packed8;

fn load_stored(row: u32, group: u32) -> Stored {
  return load8(row * W_EIGHTS + group);
}

fn widen_group(w: Stored, group: u32) -> array<vec4<f32>, 2> {
  return array<vec4<f32>, 2>(low4(w), high4(w));
}
#endif

fn load_group(row: u32, group: u32) -> array<vec4<f32>, 2> {
  return widen_group(load_stored(row, group), group);
}

fn fill_tables(i: u32, size: u32) {
#if WEIGHT == iq4nl
  fill_table(i, size);
#elif WEIGHT == nf4
  fill_codes(i);
#endif
}
