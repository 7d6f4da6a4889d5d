// Small matrices, which a subgroup of LANES invocations multiplies together (on tensor cores where there are
// any): sum += left right, where left is [MATRIX_M][MATRIX_K] and right [MATRIX_K][MATRIX_N], both of f16, and
// sum is [MATRIX_M][MATRIX_N] of f32.
//
// All of them lie in the workgroup variable `pool: array<vec4<u32>>`, an element of which holds eight values
// of f16 or four of f32; places, and strides from one row of a matrix to the next, are counted in elements.
// A matrix for load_right lies by its columns instead: the stride leads from one column to the next.
//
// emulated: for adapters that have no such matrices, and for tests. Left and right are then where they lie, so
// that what lies there must stay until they were multiplied.
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

fn load_left(place: u32, stride: u32) -> Left {
  return subgroupMatrixLoad<Left, row_major>(&pool, place, stride);
}

fn load_right(place: u32, stride: u32) -> Right {
  return subgroupMatrixLoad<Right, col_major>(&pool, place, stride);
}

fn load_right_by_rows(place: u32, stride: u32) -> Right {
  return subgroupMatrixLoad<Right, row_major>(&pool, place, stride);
}

fn load_sum(place: u32, stride: u32, lane: u32) -> Sum {
  return subgroupMatrixLoad<Sum, row_major>(&pool, place, stride);
}

fn store_sum(place: u32, stride: u32, sum: Sum, lane: u32) {
  subgroupMatrixStore<row_major>(&pool, place, sum, stride);
}

fn multiply(left: Left, right: Right, sum: Sum, lane: u32) -> Sum {
  return subgroupMatrixMultiplyAccumulate(left, right, sum);
}
#else
const QUADS = MATRIX_M * MATRIX_N / 4u;  // of a sum, each four neighbours of a row
const LANE_QUADS = (QUADS + LANES - 1u) / LANES;

struct Left {
  place: u32,
  stride: u32,
}

struct Right {
  place: u32,
  stride: u32,
  by_rows: bool,
}

alias Sum = array<vec4<f32>, LANE_QUADS>;

fn load_left(place: u32, stride: u32) -> Left {
  return Left(place, stride);
}

fn load_right(place: u32, stride: u32) -> Right {
  return Right(place, stride, false);
}

fn load_right_by_rows(place: u32, stride: u32) -> Right {
  return Right(place, stride, true);
}

// Where the lane's quad of a sum lies.
fn quad_place(place: u32, stride: u32, quad: u32) -> u32 {
  return place + quad / (MATRIX_N / 4u) * stride + quad % (MATRIX_N / 4u);
}

fn load_sum(place: u32, stride: u32, lane: u32) -> Sum {
  var sum: Sum;
  for (var own = 0u; own < LANE_QUADS; own++) {
    let quad = min(own * LANES + lane, QUADS - 1u);
    sum[own] = bitcast<vec4<f32>>(pool[quad_place(place, stride, quad)]);
  }
  return sum;
}

fn store_sum(place: u32, stride: u32, sum: Sum, lane: u32) {
  for (var own = 0u; own < LANE_QUADS; own++) {
    let quad = own * LANES + lane;
    if (quad < QUADS) {
      pool[quad_place(place, stride, quad)] = bitcast<vec4<u32>>(sum[own]);
    }
  }
}

// Values 2 i and 2 i + 1 of what begins at this place.
fn two_halves(place: u32, i: u32) -> vec2<f32> {
  return unpack2x16float(pool[place + i / 4u][i % 4u]);
}

// Rows 2 i and 2 i + 1 of four columns of right, the first of which is this one.
fn two_rows(right: Right, column: u32, i: u32) -> array<vec4<f32>, 2> {
  if (right.by_rows) {
    let row = right.place + 2u * i * right.stride;
    let next = row + right.stride;
    return array<vec4<f32>, 2>(
      vec4<f32>(two_halves(row, column / 2u), two_halves(row, column / 2u + 1u)),
      vec4<f32>(two_halves(next, column / 2u), two_halves(next, column / 2u + 1u)));
  }
  let first = right.place + column * right.stride;
  let a = two_halves(first, i);
  let b = two_halves(first + right.stride, i);
  let c = two_halves(first + 2u * right.stride, i);
  let d = two_halves(first + 3u * right.stride, i);
  return array<vec4<f32>, 2>(vec4<f32>(a.x, b.x, c.x, d.x), vec4<f32>(a.y, b.y, c.y, d.y));
}

fn multiply(left: Left, right: Right, sum: Sum, lane: u32) -> Sum {
  var result = sum;
  for (var own = 0u; own < LANE_QUADS; own++) {
    let quad = own * LANES + lane;
    if (quad < QUADS) {
      let row = left.place + quad / (MATRIX_N / 4u) * left.stride;
      let column = quad % (MATRIX_N / 4u) * 4u;
      for (var i = 0u; i < MATRIX_K / 2u; i++) {
        let x = two_halves(row, i);
        let two = two_rows(right, column, i);
        result[own] += x.x * two[0] + x.y * two[1];
      }
    }
  }
  return result;
}
#endif
