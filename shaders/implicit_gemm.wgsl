// Implicit GEMM: convolution as a matrix product whose second matrix is never stored.
//
//   y[m, p] = sum over k of A[m, k] * B[k, p]
//
// m counts filters, p output pixels of all images, k (channel, r, s). A is the packed weight.
// B[k, p] is the input element under tap k of pixel p; it is gathered while a tile of B is
// staged, with the help of `taps`: for each k the offset from the pixel's first element and, as
// bits, the tap's row and column. Each pixel has a mask of the rows and columns that lie inside
// of the input, so that the border costs one comparison an element.
//
// A workgroup computes TILE_M x TILE_P outputs, each invocation THREAD_M x THREAD_P of them.
// In the staged tile of B the vec4 at quad q holds the pixels q, q + TILE_P/4, q + 2 TILE_P/4,
// q + 3 TILE_P/4: neighbouring invocations then load and store neighbouring pixels.
//
// Several dispatches with other offsets and strides make up a transposed convolution, one for
// each phase of the stride. SPLIT spreads the sum over k across workgroups; the partial sums
// go to `y` as f32, one slice a split, and reduce_splits.wgsl finishes.

alias Scalar = f32;
alias Out = f32;
const TILE_M: u32 = 64u;
const TILE_P: u32 = 64u;
const TILE_K: u32 = 8u;
const THREAD_M: u32 = 8u;  // a multiple of 4, as THREAD_P
const THREAD_P: u32 = 4u;
const BORDER: bool = true;  // some taps may fall outside of the input
const SPLIT: bool = false;  // several workgroups share the sum of a tile
const UNROLL_K: bool = true;  // write out the steps of a tile
const LAST_BARRIER: bool = true;  // also wait after the last step, where nothing needs it

const FILTER_QUADS = TILE_M / 4u;
const PIXEL_QUADS = TILE_P / 4u;
const LANES_M = TILE_M / THREAD_M;
const LANES_P = TILE_P / THREAD_P;
const WORKGROUP = LANES_M * LANES_P;
const A_LOADS = TILE_K * FILTER_QUADS / WORKGROUP;
const B_LOADS = TILE_K * PIXEL_QUADS / WORKGROUP;
const B_ROWS = WORKGROUP / PIXEL_QUADS;  // rows of the tile that one load covers
const A_FRAGMENTS = THREAD_M / 4u;
const B_FRAGMENTS = THREAD_P / 4u;

struct Params {
  pixels: u32,  // output pixels of this dispatch, over all images
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
  y_base: u32,
  y_g: u32,  // strides of the output over groups, images, filters, rows, columns
  y_n: u32,
  y_m: u32,
  y_h: u32,
  y_w: u32,
  m: u32,  // filters of a group
  m_tiles: u32,
  p_tiles: u32,
  groups: u32,
  k_steps: u32,
  splits: u32,
  y_elements: u32,  // elements of the whole output: the size of one slice of partial sums
  act_a: f32,
  act_b: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<Scalar>;
@group(0) @binding(2) var<storage, read> packed: array<vec4<Scalar>>;
@group(0) @binding(3) var<storage, read> taps: array<vec4<i32>>;
@group(0) @binding(4) var<storage, read> bias: array<Scalar>;
@group(0) @binding(5) var<storage, read_write> y: array<Out>;

var<workgroup> tile_a: array<vec4<f32>, TILE_K * FILTER_QUADS>;
var<workgroup> tile_b: array<vec4<f32>, TILE_K * PIXEL_QUADS>;

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
  let group = index / params.m_tiles / params.p_tiles % params.groups;
  let split = index / params.m_tiles / params.p_tiles / params.groups;
  if (split >= params.splits) {
    return;
  }
  let first_step = split * params.k_steps / params.splits;
  let end_step = (split + 1u) * params.k_steps / params.splits;

  // The four pixels of which this invocation stages elements. Pixels past the end stage the
  // last one again.
  let quad = lane % PIXEL_QUADS;
  let row = lane / PIXEL_QUADS;
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

  let lane_m = lane / LANES_P;
  let lane_p = lane % LANES_P;
  var acc: array<f32, THREAD_M * THREAD_P>;
  for (var i = 0u; i < THREAD_M * THREAD_P; i++) { // @unroll
    acc[i] = 0.0;
  }

  // Each step's tiles are loaded to registers while the step before is computed, and its taps
  // one step before that, since the addresses of B wait for them. The registers hold what was
  // loaded, untouched until it is staged: converting or masking it any earlier would make the
  // arithmetic in between wait for the load.
  var next_a: array<vec4<Scalar>, A_LOADS>;
  var next_b: array<vec4<Scalar>, B_LOADS>;
  var next_mask: array<i32, B_LOADS>;
  var next_tap: array<vec4<i32>, B_LOADS>;
  var a_at = (group * params.m_tiles + m_tile) * params.k_steps * TILE_K * FILTER_QUADS
    + first_step * TILE_K * FILTER_QUADS + lane;
  var tap_at = first_step * TILE_K + row;
  for (var i = 0u; i < B_LOADS; i++) { // @unroll
    next_tap[i] = taps[tap_at + i * B_ROWS];
  }
  for (var step = first_step; step <= end_step; step++) {
    if (step > first_step) {
      for (var i = 0u; i < A_LOADS; i++) { // @unroll
        tile_a[i * WORKGROUP + lane] = vec4<f32>(next_a[i]);
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
    if (step < end_step) {
      for (var i = 0u; i < A_LOADS; i++) { // @unroll
        next_a[i] = packed[a_at + i * WORKGROUP];
      }
      for (var i = 0u; i < B_LOADS; i++) { // @unroll
        let tap = next_tap[i];
        next_mask[i] = tap.y;
        for (var j = 0u; j < 4u; j++) { // @unroll
          // Outside of the input this may read anything, which the mask drops.
          next_b[i][j] = x[origin[j] + tap.x];
        }
      }
      a_at += TILE_K * FILTER_QUADS;
      tap_at += TILE_K;
      for (var i = 0u; i < B_LOADS; i++) { // @unroll
        next_tap[i] = taps[tap_at + i * B_ROWS];
      }
    }
    if (step > first_step) {
      for (var k = 0u; k < TILE_K; k++) { // @unroll if UNROLL_K
        var a: array<vec4<f32>, A_FRAGMENTS>;
        var b: array<vec4<f32>, B_FRAGMENTS>;
        for (var i = 0u; i < A_FRAGMENTS; i++) { // @unroll
          a[i] = tile_a[k * FILTER_QUADS + i * LANES_M + lane_m];
        }
        for (var j = 0u; j < B_FRAGMENTS; j++) { // @unroll
          b[j] = tile_b[k * PIXEL_QUADS + j * LANES_P + lane_p];
        }
        for (var i = 0u; i < THREAD_M; i++) { // @unroll FMA_ORDER=rows
          for (var j = 0u; j < THREAD_P; j++) {
            acc[i * THREAD_P + j] = fma(a[i / 4u][i % 4u], b[j / 4u][j % 4u], acc[i * THREAD_P + j]);
          }
        }
      }
      if (LAST_BARRIER || step < end_step) {
        workgroupBarrier();  // all have read the tiles before the next step overwrites them
      }
    }
  }

  // Loaded at once: one after the other, each in its branch, would take longer than to store. (For
  // a residual the same costs more than it gains: 2 % of all sums without one.)
  var bias_m: array<f32, THREAD_M>;
  for (var i = 0u; i < THREAD_M; i++) { // @unroll
    let m = m_tile * TILE_M + (i / 4u) * LANES_M * 4u + lane_m * 4u + i % 4u;
    bias_m[i] = f32(bias[group * params.m + min(m, params.m - 1u)]);
  }
  for (var j = 0u; j < THREAD_P; j++) { // @unroll
    let p = p_tile * TILE_P + (j % 4u) * PIXEL_QUADS + (j / 4u) * LANES_P + lane_p;
    if (p < params.pixels) {
      let q = p % params.q_hw;
      let y_pixel = params.y_base + group * params.y_g + p / params.q_hw * params.y_n
        + q / params.q_w * params.y_h + q % params.q_w * params.y_w;
      for (var i = 0u; i < THREAD_M; i++) { // @unroll
        let m = m_tile * TILE_M + (i / 4u) * LANES_M * 4u + lane_m * 4u + i % 4u;
        if (m < params.m) {
          let at = y_pixel + m * params.y_m;
          if (SPLIT) {
            y[split * params.y_elements + at] = Out(acc[i * THREAD_P + j]);
          } else {
            y[at] = Out(activate(add_residual(acc[i * THREAD_P + j] + bias_m[i], at)));
          }
        }
      }
    }
  }
}
