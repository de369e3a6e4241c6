// implicit_gemm.wgsl for NHWC: four channels of a pixel are read, and four filters written, at a
// time.
//
//   y[m, p] = sum over k of A[m, k] * B[k, p]
//
// m counts filters, p output pixels of all images, k taps and channels, the fours of channels of
// one tap side by side. A is the packed weight. B[k, p] is the input element under tap k of pixel
// p; it is gathered while a tile of B is staged, with the help of `taps`: for each k the offset
// from the pixel's first element and, as bits, the tap's row and column. Each pixel has a mask of
// the rows and columns that lie inside of the input, so that the border costs one comparison a
// quad. Strides of the input and the output count vec4s (quads).
//
// A workgroup computes TILE_M x TILE_P outputs, each invocation THREAD_M x THREAD_P of them.
// The staged tile of B has a row for each quad of k, of one vec4 a pixel. Lanes next to each other
// load the quads of one pixel, so that a pixel's line is read whole; they would all store to the
// same bank, so row q has its pixels at p ^ (q * SPREAD), which spreads eight lanes over all banks.
//
// Several dispatches with other offsets and strides make up a transposed convolution, one for
// each phase of the stride. SPLIT spreads the sum over k across workgroups; the partial sums
// go to `y` as f32, one slice a split, and reduce_splits.wgsl finishes.

alias Scalar = f32;
alias Out = f32;
const TILE_M: u32 = 64u;
const TILE_P: u32 = 64u;
const TILE_K: u32 = 8u;  // at most 32
const THREAD_M: u32 = 8u;  // a multiple of 4
const THREAD_P: u32 = 4u;
const BORDER: bool = true;  // some taps may fall outside of the input
const SPLIT: bool = false;  // several workgroups share the sum of a tile
const UNROLL_K: bool = true;  // write out the steps of a tile
const LAST_BARRIER: bool = true;  // also wait after the last step, where nothing needs it

const FILTER_QUADS = TILE_M / 4u;
const K_QUADS = TILE_K / 4u;
const SPREAD = 8u / K_QUADS;
const LANES_M = TILE_M / THREAD_M;
const LANES_P = TILE_P / THREAD_P;  // a multiple of 8, so that p ^ (q * SPREAD) stays among them
const WORKGROUP = LANES_M * LANES_P;
const A_LOADS = TILE_K * FILTER_QUADS / WORKGROUP;
const B_LOADS = K_QUADS * TILE_P / WORKGROUP;
const B_PIXELS = WORKGROUP / K_QUADS;  // pixels of the tile that one load covers
const A_FRAGMENTS = THREAD_M / 4u;

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
  y_g: u32,  // strides of the output over groups, images, rows, columns
  y_n: u32,
  y_h: u32,
  y_w: u32,
  m_quads: u32,  // fours of filters of a group
  m_tiles: u32,
  p_tiles: u32,
  groups: u32,
  k_steps: u32,
  splits: u32,
  y_quads: u32,  // the whole output: the size of one slice of partial sums
  act_a: f32,
  act_b: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<Scalar>>;
@group(0) @binding(2) var<storage, read> packed: array<vec4<Scalar>>;
@group(0) @binding(3) var<storage, read> taps: array<vec4<i32>>;
@group(0) @binding(4) var<storage, read> bias: array<vec4<Scalar>>;
@group(0) @binding(5) var<storage, read_write> y: array<vec4<Out>>;

var<workgroup> tile_a: array<vec4<f32>, TILE_K * FILTER_QUADS>;
var<workgroup> tile_b: array<vec4<f32>, K_QUADS * TILE_P>;

fn activate(v: f32) -> f32 { return v; }
fn add_residual(v: vec4<f32>, at: u32) -> vec4<f32> { return v; }

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

  // The pixels of which this invocation stages a quad. Pixels past the end stage the last one
  // again.
  let quad = lane % K_QUADS;
  let pixel = lane / K_QUADS;
  let staged = quad * TILE_P + (pixel ^ (quad * SPREAD));
  var origin: array<i32, B_LOADS>;
  var inside: array<i32, B_LOADS>;  // bit r: row r of the taps, bit 16 + s: column s
  for (var i = 0u; i < B_LOADS; i++) { // @unroll
    let p = min(p_tile * TILE_P + i * B_PIXELS + pixel, params.pixels - 1u);
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

  let lane_m = lane % LANES_M;  // neighbouring invocations write neighbouring filters
  let lane_p = lane / LANES_M;
  var acc: array<f32, THREAD_M * THREAD_P>;
  for (var i = 0u; i < THREAD_M * THREAD_P; i++) { // @unroll
    acc[i] = 0.0;
  }

  // Each step's tiles are loaded to registers while the step before is computed, and its tap
  // one step before that, since the addresses of B wait for it. The registers hold what was
  // loaded, untouched until it is staged: converting or masking it any earlier would make the
  // arithmetic in between wait for the load.
  var next_a: array<vec4<Scalar>, A_LOADS>;
  var next_b: array<vec4<Scalar>, B_LOADS>;
  var next_mask = 0;
  var a_at = (group * params.m_tiles + m_tile) * params.k_steps * TILE_K * FILTER_QUADS
    + first_step * TILE_K * FILTER_QUADS + lane;
  var tap_at = first_step * TILE_K + quad * 4u;
  var next_tap = taps[tap_at];
  for (var step = first_step; step <= end_step; step++) {
    if (step > first_step) {
      for (var i = 0u; i < A_LOADS; i++) { // @unroll
        tile_a[i * WORKGROUP + lane] = vec4<f32>(next_a[i]);
      }
      for (var i = 0u; i < B_LOADS; i++) { // @unroll
        let v = vec4<f32>(next_b[i]);
        if (BORDER) {
          tile_b[staged + i * B_PIXELS] =
            select(vec4<f32>(0.0), v, (inside[i] & next_mask) == next_mask);
        } else {
          tile_b[staged + i * B_PIXELS] = v;
        }
      }
      workgroupBarrier();  // the tiles are complete before any invocation reads them
    }
    if (step < end_step) {
      for (var i = 0u; i < A_LOADS; i++) { // @unroll
        next_a[i] = packed[a_at + i * WORKGROUP];
      }
      for (var i = 0u; i < B_LOADS; i++) { // @unroll
        // Outside of the input this may read anything, which the mask drops.
        next_b[i] = x[origin[i] + (next_tap.x >> 2u)];
      }
      next_mask = next_tap.y;
      a_at += TILE_K * FILTER_QUADS;
      tap_at += TILE_K;
      next_tap = taps[tap_at];
    }
    if (step > first_step) {
      for (var q = 0u; q < K_QUADS; q++) { // @unroll if UNROLL_K
        var b_q: array<vec4<f32>, THREAD_P>;
        for (var j = 0u; j < THREAD_P; j++) { // @unroll
          b_q[j] = tile_b[q * TILE_P + j * LANES_P + (lane_p ^ (q * SPREAD))];
        }
        for (var k = 0u; k < 4u; k++) { // @unroll if UNROLL_K
          var a_k: array<vec4<f32>, A_FRAGMENTS>;
          for (var i = 0u; i < A_FRAGMENTS; i++) { // @unroll
            a_k[i] = tile_a[(q * 4u + k) * FILTER_QUADS + i * LANES_M + lane_m];
          }
          for (var i = 0u; i < THREAD_M; i++) { // @unroll FMA_ORDER=rows
            for (var j = 0u; j < THREAD_P; j++) {
              acc[i * THREAD_P + j] = fma(a_k[i / 4u][i % 4u], b_q[j][k], acc[i * THREAD_P + j]);
            }
          }
        }
      }
      if (LAST_BARRIER || step < end_step) {
        workgroupBarrier();  // all have read the tiles before the next step overwrites them
      }
    }
  }

  var bias_m: array<vec4<f32>, A_FRAGMENTS>;
  for (var i = 0u; i < A_FRAGMENTS; i++) { // @unroll
    let m_quad = min(m_tile * FILTER_QUADS + i * LANES_M + lane_m, params.m_quads - 1u);
    bias_m[i] = vec4<f32>(bias[group * params.m_quads + m_quad]);
  }
  for (var j = 0u; j < THREAD_P; j++) { // @unroll
    let p = p_tile * TILE_P + j * LANES_P + lane_p;
    if (p < params.pixels) {
      let q = p % params.q_hw;
      let y_pixel = split * params.y_quads + params.y_base + group * params.y_g
        + p / params.q_hw * params.y_n + q / params.q_w * params.y_h + q % params.q_w * params.y_w;
      for (var i = 0u; i < A_FRAGMENTS; i++) { // @unroll
        let m_quad = m_tile * FILTER_QUADS + i * LANES_M + lane_m;
        if (m_quad < params.m_quads) {
          var v: vec4<f32>;
          for (var e = 0u; e < 4u; e++) { // @unroll
            v[e] = acc[(i * 4u + e) * THREAD_P + j];
          }
          if (!SPLIT) {
            v = add_residual(v + bias_m[i], y_pixel + m_quad);
            for (var e = 0u; e < 4u; e++) { // @unroll
              v[e] = activate(v[e]);
            }
          }
          y[y_pixel + m_quad] = vec4<Out>(v);
        }
      }
    }
  }
}
