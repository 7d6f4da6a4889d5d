// A soft cap on logits or scores (Gemma Team 2024): SOFTCAP * tanh(x / SOFTCAP).
// @param SOFTCAP f32             0: none
#if SOFTCAP > 0

fn capped(x: f32) -> f32 {
  // A driver's tanh may be coarse, or not a number for what is large.
  let e = exp(2.0 * clamp(x / SOFTCAP, -15.0, 15.0));
  return SOFTCAP - 2.0 * SOFTCAP / (e + 1.0);
}
#endif
