// Implicit GEMM in one dispatch, for small problems: the weight is read as it lies, and the lanes of
// a workgroup share the sum over k ("sliced K"), where implicit_gemm.wgsl packs weights first,
// spreads the sum over workgroups and adds it up in a pass of its own.
//
//   y[m, p] = sum over k of A[m, k] * B[k, p]
//
// m counts filters, p output pixels of all images, k (channel, r, s) as the weight has them. B is
// gathered as in implicit_gemm.wgsl: `taps` holds for each k the offset from the pixel's first
// element and, as bits, the tap's row and column; `inside` those that lie inside of the input.
//
// A workgroup computes TILE_M x TILE_P outputs. Each of its SLICES computes all of them, for
// SLICE_K of the TILE_K products of a step; in the end the slices' sums are added.

alias Scalar = f32;
const TILE_M: u32 = 32u;
const TILE_P: u32 = 32u;
const SLICES: u32 = 4u;  // a power of two
const THREAD_M: u32 = 4u;  // multiples of 4
const THREAD_P: u32 = 4u;
const BORDER: bool = true;  // some taps may fall outside of the input
const UNROLL_K: bool = true;  // write out the products of a slice

const SLICE_K = 8u;
const TILE_K = SLICES * SLICE_K;
const FILTER_QUADS = TILE_M / 4u;
const PIXEL_QUADS = TILE_P / 4u;
const LANES_M = TILE_M / THREAD_M;
const LANES_P = TILE_P / THREAD_P;
const LANES = LANES_M * LANES_P;  // of a slice
const WORKGROUP = SLICES * LANES;
const A_LOADS = TILE_K * FILTER_QUADS / WORKGROUP;
const A_QUADS = WORKGROUP / TILE_K;  // quads of filters that one load covers
const B_LOADS = TILE_K * PIXEL_QUADS / WORKGROUP;
const B_ROWS = WORKGROUP / PIXEL_QUADS;  // rows of the tile that one load covers
const A_FRAGMENTS = THREAD_M / 4u;
const B_FRAGMENTS = THREAD_P / 4u;
const SUM_QUADS = THREAD_M * THREAD_P / 4u;
// Lanes next to each other store rows of A: row k has its quads at q ^ (k % SPREAD), on other banks.
const SPREAD = 4u;

struct Params {
  pixels: u32,  // output pixels over all images
  q_hw: u32,  // those of one image
  q_w: u32,  // those of one row
  in_h: u32,
  in_w: u32,
  in_stride_h: u32,  // input pixels from one output pixel to the next
  in_stride_w: u32,
  tap_rows: u32,  // rows and columns of taps, at most 16 and 15
  tap_columns: u32,
  tap_h: i32,  // input pixels from an output pixel's place to its first tap
  tap_w: i32,
  tap_step_h: i32,  // from one row of taps to the next
  tap_step_w: i32,
  x_g: u32,  // strides of the input over groups, images, rows, columns
  x_n: u32,
  x_h: u32,
  x_w: u32,
  y_g: u32,  // strides of the output over groups, images, filters, rows, columns
  y_n: u32,
  y_m: u32,
  y_h: u32,
  y_w: u32,
  m: u32,  // filters of a group
  m_tiles: u32,
  p_tiles: u32,
  groups: u32,
  reduction: u32,
  act_a: f32,
  act_b: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<Scalar>;
@group(0) @binding(2) var<storage, read> weight: array<Scalar>;
@group(0) @binding(3) var<storage, read> taps: array<vec4<i32>>;
@group(0) @binding(4) var<storage, read> bias: array<Scalar>;
@group(0) @binding(5) var<storage, read_write> y: array<Scalar>;

var<workgroup> tile_a: array<vec4<f32>, TILE_K * FILTER_QUADS>;
var<workgroup> tile_b: array<vec4<f32>, TILE_K * PIXEL_QUADS>;
var<workgroup> sums: array<vec4<f32>, SLICES / 2u * LANES * SUM_QUADS>;

fn activate(v: f32) -> f32 { return v; }
fn add_residual(v: f32, at: u32) -> f32 { return v; }

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) lane: u32,
) {
  let index = workgroup.x + workgroup.y * workgroups.x;
  let m_tile = index % params.m_tiles;
  let p_tile = index / params.m_tiles % params.p_tiles;
  let group = index / params.m_tiles / params.p_tiles;
  if (group >= params.groups) {
    return;
  }

  // The four pixels of which this invocation stages elements. Pixels past the end stage the
  // last one again.
  let quad = lane % PIXEL_QUADS;
  let b_row = lane / PIXEL_QUADS;
  var origin: array<i32, 4>;
  var inside: vec4<i32>;  // bit r: row r of the taps, bit 16 + s: column s
  for (var i = 0u; i < 4u; i++) { // @unroll
    let p = min(p_tile * TILE_P + i * PIXEL_QUADS + quad, params.pixels - 1u);
    let q = p % params.q_hw;
    let h = q / params.q_w * params.in_stride_h;
    let w = q % params.q_w * params.in_stride_w;
    origin[i] = i32(group * params.x_g + p / params.q_hw * params.x_n
      + h * params.x_h + w * params.x_w);
    inside[i] = 0;
    if (BORDER) {
      // Before the border these wrap to huge numbers: one comparison checks both sides.
      for (var r = 0u; r < params.tap_rows; r++) {
        let row_inside = h + u32(params.tap_h + i32(r) * params.tap_step_h) < params.in_h;
        inside[i] |= select(0, 1, row_inside) << r;
      }
      for (var s = 0u; s < params.tap_columns; s++) {
        let column_inside = w + u32(params.tap_w + i32(s) * params.tap_step_w) < params.in_w;
        inside[i] |= select(0, 1 << 16u, column_inside) << s;
      }
    }
  }
  // The filters of which this invocation stages weights, four at a time of one k. Filters past the
  // end stage the last one again.
  let a_row = lane % TILE_K;
  let a_quad = lane / TILE_K;
  var filter_at: array<vec4<u32>, A_LOADS>;
  for (var i = 0u; i < A_LOADS; i++) { // @unroll
    for (var j = 0u; j < 4u; j++) { // @unroll
      let m = min(m_tile * TILE_M + (i * A_QUADS + a_quad) * 4u + j, params.m - 1u);
      filter_at[i][j] = (group * params.m + m) * params.reduction;
    }
  }

  let slice = lane / LANES;
  let lane_m = lane % LANES / LANES_P;
  let lane_p = lane % LANES_P;
  var acc: array<f32, THREAD_M * THREAD_P>;
  for (var i = 0u; i < THREAD_M * THREAD_P; i++) { // @unroll
    acc[i] = 0.0;
  }

  // Each step's tiles are loaded to registers while the step before is computed, and its taps one
  // step before that, since the addresses of B wait for them.
  var next_a: array<vec4<Scalar>, A_LOADS>;
  var next_b: array<vec4<Scalar>, B_LOADS>;
  var next_mask: array<i32, B_LOADS>;
  var next_tap: array<vec4<i32>, B_LOADS>;
  for (var i = 0u; i < B_LOADS; i++) { // @unroll
    next_tap[i] = taps[b_row + i * B_ROWS];
  }
  let steps = (params.reduction + TILE_K - 1u) / TILE_K;
  for (var step = 0u; step <= steps; step++) {
    if (step > 0u) {
      // Weights past the end must be zeros: B is zero there, but zero times infinity is NaN.
      let counts = (step - 1u) * TILE_K + a_row < params.reduction;
      for (var i = 0u; i < A_LOADS; i++) { // @unroll
        tile_a[a_row * FILTER_QUADS + ((i * A_QUADS + a_quad) ^ (a_row % SPREAD))] =
          select(vec4<f32>(0.0), vec4<f32>(next_a[i]), counts);
      }
      for (var i = 0u; i < B_LOADS; i++) { // @unroll
        let v = vec4<f32>(next_b[i]);
        if (BORDER) {
          let mask = vec4<i32>(next_mask[i]);
          tile_b[i * WORKGROUP + lane] = select(vec4<f32>(0.0), v, (inside & mask) == mask);
        } else {
          tile_b[i * WORKGROUP + lane] = v;
        }
      }
      workgroupBarrier();  // the tiles are complete before any invocation reads them
    }
    if (step < steps) {
      let k = min(step * TILE_K + a_row, params.reduction - 1u);
      for (var i = 0u; i < A_LOADS; i++) { // @unroll
        for (var j = 0u; j < 4u; j++) { // @unroll
          next_a[i][j] = weight[filter_at[i][j] + k];
        }
      }
      for (var i = 0u; i < B_LOADS; i++) { // @unroll
        let tap = next_tap[i];
        next_mask[i] = tap.y;
        for (var j = 0u; j < 4u; j++) { // @unroll
          // Outside of the input this may read anything, which the mask drops.
          next_b[i][j] = x[origin[j] + tap.x];
        }
        next_tap[i] = taps[(step + 1u) * TILE_K + b_row + i * B_ROWS];
      }
    }
    if (step > 0u) {
      for (var k = 0u; k < SLICE_K; k++) { // @unroll if UNROLL_K
        let row = slice * SLICE_K + k;
        var a: array<vec4<f32>, A_FRAGMENTS>;
        var b: array<vec4<f32>, B_FRAGMENTS>;
        for (var i = 0u; i < A_FRAGMENTS; i++) { // @unroll
          a[i] = tile_a[row * FILTER_QUADS + ((i * LANES_M + lane_m) ^ (k % SPREAD))];
        }
        for (var j = 0u; j < B_FRAGMENTS; j++) { // @unroll
          b[j] = tile_b[row * PIXEL_QUADS + j * LANES_P + lane_p];
        }
        for (var i = 0u; i < THREAD_M; i++) { // @unroll
          for (var j = 0u; j < THREAD_P; j++) { // @unroll
            acc[i * THREAD_P + j] = fma(a[i / 4u][i % 4u], b[j / 4u][j % 4u], acc[i * THREAD_P + j]);
          }
        }
      }
      workgroupBarrier();  // all have read the tiles before the next step overwrites them
    }
  }

  // The upper half of the slices hands its sums to the lower one, until one is left.
  for (var half = SLICES / 2u; half > 0u; half /= 2u) {
    let place = slice % half * LANES * SUM_QUADS + lane % LANES;
    if (slice >= half && slice < 2u * half) {
      for (var i = 0u; i < SUM_QUADS; i++) { // @unroll
        sums[place + i * LANES] =
          vec4<f32>(acc[i * 4u], acc[i * 4u + 1u], acc[i * 4u + 2u], acc[i * 4u + 3u]);
      }
    }
    workgroupBarrier();  // the sums are there before the lower half reads them
    if (slice < half) {
      for (var i = 0u; i < SUM_QUADS; i++) { // @unroll
        let four = sums[place + i * LANES];
        for (var j = 0u; j < 4u; j++) { // @unroll
          acc[i * 4u + j] += four[j];
        }
      }
    }
    workgroupBarrier();  // all have been read before the next half overwrites them
  }
  if (slice > 0u) {
    return;
  }

  // Loaded at once, as a residual is below: one after the other, each in its branch, would take
  // longer than to store.
  var bias_m: array<f32, THREAD_M>;
  for (var i = 0u; i < THREAD_M; i++) { // @unroll
    let m = m_tile * TILE_M + (i / 4u) * LANES_M * 4u + lane_m * 4u + i % 4u;
    bias_m[i] = f32(bias[group * params.m + min(m, params.m - 1u)]);
  }
  for (var j = 0u; j < THREAD_P; j++) { // @unroll
    let p = p_tile * TILE_P + (j % 4u) * PIXEL_QUADS + (j / 4u) * LANES_P + lane_p;
    if (p < params.pixels) {
      let q = p % params.q_hw;
      let y_pixel = group * params.y_g + p / params.q_hw * params.y_n
        + q / params.q_w * params.y_h + q % params.q_w * params.y_w;
      for (var i = 0u; i < THREAD_M; i++) { // @unroll
        let m = min(m_tile * TILE_M + (i / 4u) * LANES_M * 4u + lane_m * 4u + i % 4u, params.m - 1u);
        let sum = acc[i * THREAD_P + j] + bias_m[i];
        acc[i * THREAD_P + j] = add_residual(sum, y_pixel + m * params.y_m);
      }
      for (var i = 0u; i < THREAD_M; i++) { // @unroll
        let m = m_tile * TILE_M + (i / 4u) * LANES_M * 4u + lane_m * 4u + i % 4u;
        if (m < params.m) {
          y[y_pixel + m * params.y_m] = Scalar(activate(acc[i * THREAD_P + j]));
        }
      }
    }
  }
}
