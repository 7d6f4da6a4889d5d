// Where an invocation of a tile stands: (column, row). Neighbours, in parts of 4 rows by 8 columns, go along
// a Z curve, so that they share what they load.
// @param N_SIZE u32              invocations of a tile along its columns: a multiple of 8
fn z_curve(tid: u32) -> vec2<u32> {
  let lane = tid % 32u;
  let part = tid / 32u;
  return vec2<u32>(
    part % (N_SIZE / 8u) * 8u + ((lane & 1u) | ((lane >> 1u) & 2u) | ((lane >> 2u) & 4u)),
    part / (N_SIZE / 8u) * 4u + (((lane >> 1u) & 1u) | ((lane >> 2u) & 2u)));
}
