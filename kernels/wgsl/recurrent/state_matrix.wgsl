// A matrix S [keys][values] that the invocations of a workgroup keep in registers, in fragments of four
// neighbouring keys and TILE neighbouring values.
// @param TILE u32   2 or 4
alias Columns = vec$(TILE)<f32>;
alias Fragment = mat4x$(TILE)<f32>;

// sum + k S
fn add_product(sum: Columns, k: vec4<f32>, s: Fragment) -> Columns {
  let first = fma(Columns(k.y), s[1], fma(Columns(k.x), s[0], sum));
  return fma(Columns(k.w), s[3], fma(Columns(k.z), s[2], first));
}

// S + k^T v
fn add_outer(s: Fragment, k: vec4<f32>, v: Columns) -> Fragment {
  return Fragment(
    fma(Columns(k.x), v, s[0]),
    fma(Columns(k.y), v, s[1]),
    fma(Columns(k.z), v, s[2]),
    fma(Columns(k.w), v, s[3]),
  );
}
