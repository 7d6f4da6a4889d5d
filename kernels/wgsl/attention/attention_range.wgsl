// The positions that a row attends to: [first_position, position], all before it or a sliding WINDOW.
// @param WINDOW u32              0: none
// @param FIRST u32               no other row attends to what is before it
fn first_position(position: u32) -> u32 {
  let first = min(position, FIRST);
#if WINDOW > 0
  return select(first, max(first, position - (WINDOW - 1u)), position >= WINDOW);
#else
  return first;
#endif
}
