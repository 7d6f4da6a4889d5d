// log(1 + exp(x)). Where exp(x) is small, 1 + exp(x) keeps few of its bits, and the series takes its place.
fn softplus(x: f32) -> f32 {
  let e = exp(-abs(x));
  return max(x, 0.0) + select(log(1.0 + e), e * (1.0 - e * (0.5 - e / 3.0)), e < 0.01);
}
