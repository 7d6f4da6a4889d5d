// Small matrices, which a subgroup of LANES invocations multiplies together (on tensor cores where there are
// any): sum += left right, where left is [MATRIX_M][MATRIX_K] and right [MATRIX_K][MATRIX_N], both of f16, and
// sum is [MATRIX_M][MATRIX_N] of f32.
//
// All of them lie in the workgroup variable `pool: array<vec4<u32>>`, an element of which holds eight values
// of f16 or four of f32; places and strides are counted in elements. Left lies by its rows, and right by its
// columns, so many elements apart as the const POOL_STRIDE says.
//
// emulated: for adapters that have no such matrices, and for tests. Left and right are then their places.
// No workgroup variable of a kernel with matrices may have a size that is no multiple of 16 bytes: Dawn would
// read and write matrices at a wrong place.
// @param MATRIX subgroup|emulated
// @param MATRIX_M u32
// @param MATRIX_N u32
// @param MATRIX_K u32
// @param LANES u32
#if MATRIX == subgroup
#enable f16
#enable chromium_experimental_subgroup_matrix
alias Left = subgroup_matrix_left<f16, MATRIX_K, MATRIX_M>;  // columns first
alias Right = subgroup_matrix_right<f16, MATRIX_N, MATRIX_K>;
alias Sum = subgroup_matrix_result<f32, MATRIX_N, MATRIX_M>;

fn load_left(place: u32) -> Left {
  return subgroupMatrixLoad<Left, row_major>(&pool, place, POOL_STRIDE);
}

fn load_right(place: u32) -> Right {
  return subgroupMatrixLoad<Right, col_major>(&pool, place, POOL_STRIDE);
}

fn multiply(left: Left, right: Right, sum: Sum, lane: u32) -> Sum {
  return subgroupMatrixMultiplyAccumulate(left, right, sum);
}

// Rows of the sum lie SUM_STRIDE elements apart.
fn store_sum(place: u32, sum: Sum, lane: u32) {
  subgroupMatrixStore<row_major>(&pool, place, sum, SUM_STRIDE);
}
#else
const QUADS = MATRIX_M * MATRIX_N / 4u;  // of a sum, each four neighbours of a row
const LANE_QUADS = (QUADS + LANES - 1u) / LANES;

alias Left = u32;
alias Right = u32;
alias Sum = array<vec4<f32>, LANE_QUADS>;

fn load_left(place: u32) -> Left {
  return place;
}

fn load_right(place: u32) -> Right {
  return place;
}

// Values 2 i and 2 i + 1 of a row that begins at this place.
fn two_halves(place: u32, i: u32) -> vec2<f32> {
  return unpack2x16float(pool[place + i / 4u][i % 4u]);
}

fn multiply(left: Left, right: Right, sum: Sum, lane: u32) -> Sum {
  var result = sum;
  for (var own = 0u; own < LANE_QUADS; own++) {
    let quad = own * LANES + lane;
    if (quad < QUADS) {
      let row = left + quad / (MATRIX_N / 4u) * POOL_STRIDE;
      let column = right + quad % (MATRIX_N / 4u) * 4u * POOL_STRIDE;
      for (var i = 0u; i < MATRIX_K / 2u; i++) {
        let x = two_halves(row, i);
        result[own] += vec4<f32>(
          dot(x, two_halves(column, i)),
          dot(x, two_halves(column + POOL_STRIDE, i)),
          dot(x, two_halves(column + 2u * POOL_STRIDE, i)),
          dot(x, two_halves(column + 3u * POOL_STRIDE, i)));
      }
    }
  }
  return result;
}

fn store_sum(place: u32, sum: Sum, lane: u32) {
  for (var own = 0u; own < LANE_QUADS; own++) {
    let quad = own * LANES + lane;
    if (quad < QUADS) {
      let row = place + quad / (MATRIX_N / 4u) * SUM_STRIDE;
      pool[row + quad % (MATRIX_N / 4u)] = bitcast<vec4<u32>>(sum[own]);
    }
  }
}
#endif
