// y = SCALE x B^T + residual, [rows][N], where each row has the B of its adapter, and without one the
// residual alone: the second half of LoRA (Hu et al. 2021), whose x, lora_down's, has few columns. An
// invocation has an output of ROWS rows, and loads weights where a row has another adapter than the one before.
#let X = 1
#include "chunk_float.wgsl"
#include "lora_adapters.wgsl"
// @param WG u32
// @param Y_STRIDE u32
// @param SCALE f32
// @param RESIDUAL bool
@group(0) @binding(0) var<storage, read> weight: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> step: Step;
#if RESIDUAL
@group(0) @binding(3) var<storage, read> residual: array<f32>;
#endif
@group(0) @binding($(3 + RESIDUAL)) var<storage, read_write> y: array<f32>;

// grid (N / WG, rows / ROWS)
@compute @workgroup_size(WG)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let n = id.x;
  if (n >= N) {
    return;
  }
  let first_row = id.y * ROWS;
#for m in 0..ROWS
  let adapter$m = adapter_of(first_row + $mu);
  var sum$m = 0.0;
#endfor
  for (var i = 0u; i < CHUNKS; i++) {
    var w = load_stacked(adapter0, n, i);
#for m in 0..ROWS
#if $m > 0
    if (adapter$m != adapter$($m - 1)) {
      w = load_stacked(adapter$m, n, i);
    }
#endif
    sum$m += multiply(w, load_activations(first_row + $mu, i, true));
#endfor
  }
#for m in 0..ROWS
  if (is_own(adapter$m, n)) {
    let at = (first_row + $mu) * Y_STRIDE + n;
    var value = select(SCALE * sum$m, 0.0, adapter$m == 0u);
#if RESIDUAL
    value += residual[at];
#endif
    y[at] = value;
  }
#endfor
}
