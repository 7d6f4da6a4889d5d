// Which positions a row attends to: [first_position, position], all before it or a sliding WINDOW.
// @param WINDOW u32              0: none
fn first_position(position: u32) -> u32 {
#if WINDOW > 0
  return select(0u, position - (WINDOW - 1u), position >= WINDOW);
#else
  return 0u;
#endif
}
