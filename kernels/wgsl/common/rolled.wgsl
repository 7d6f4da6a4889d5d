// The bound of a loop that stays one on software adapters. Their compilers unroll a loop whose bound
// they know, which gains a CPU little and takes about three times as long to compile.
// @param SOFTWARE bool
fn rolled(bound: u32, small: u32) -> u32 {  // small: anything below 2^31 that a workgroup agrees on
#if SOFTWARE
  return bound + (small >> 31u);
#else
  return bound;
#endif
}
