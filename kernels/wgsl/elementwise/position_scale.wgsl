// y = x * (1 + BETA * log(1 + floor(position / INTERVAL))): queries of long contexts (Llama 4).
#include "step.wgsl"
#let X = 1
#include "each.wgsl"
// @param BETA f32
// @param INTERVAL u32
@group(0) @binding(0) var<storage, read> step: Step;

fn result(x: f32, row: u32) -> f32 {
  return (1.0 + BETA * log(1.0 + f32(step.rows[row].position / INTERVAL))) * x;
}
