// A matrix S [keys][values] that the invocations of a workgroup keep in registers: of TILE neighbouring
// columns and four neighbouring rows at a time, so that `S * k` is what those rows add to the product
// of a vector k and S, and `outer(k, v)` is what k^T v adds to them.
// @param TILE u32   2 or 4
alias Columns = vec$(TILE)<f32>;
alias Block = mat4x$(TILE)<f32>;

fn outer(k: vec4<f32>, v: Columns) -> Block {
  return Block(k.x * v, k.y * v, k.z * v, k.w * v);
}
