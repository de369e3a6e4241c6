// gemm.wgsl for rows of channels: B is read along k, and y written along m, four at a time.
//
//   y[m, p] = sum over k of A[m, k] * B[k, p]
//
// A is the packed weight (pack_weights.wgsl); k and m come in fours, and lie side by side in a
// pixel of B and of y. p counts pixels of several images. A workgroup computes TILE_M x TILE_P
// outputs, each invocation THREAD_M x THREAD_P of them. Offsets and strides of B and y count
// vec4s (quads).
//
// The staged tile of B has a row for each quad of k, of one vec4 a pixel. Lanes next to each other
// load the quads of one pixel, so that a pixel's line is read whole; they would all store to the
// same bank, so row q has its pixels at p ^ (q * SPREAD), which spreads eight lanes over all banks.

alias Scalar = f32;
alias In = f32;  // the element of B
alias Out = f32;  // the element of y
const TILE_M: u32 = 64u;
const TILE_P: u32 = 64u;
const TILE_K: u32 = 8u;  // at most 32
const THREAD_M: u32 = 8u;  // a multiple of 4
const THREAD_P: u32 = 4u;
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
  pixels: u32,  // columns of B and y, over all images
  image_pixels: u32,  // those of one image
  k_quads: u32,
  b_base: u32,
  b_g: u32,  // strides of B over groups, images, pixels
  b_n: u32,
  b_p: u32,
  y_base: u32,
  y_g: u32,  // strides of y over groups, images, pixels
  y_n: u32,
  y_p: u32,
  m_quads: u32,  // fours of rows of A of a group
  bias_g: u32,  // from the bias of one group to the next's, in fours
  m_tiles: u32,
  p_tiles: u32,
  groups: u32,
  k_steps: u32,
  act_a: f32,
  act_b: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> b: array<vec4<In>>;
@group(0) @binding(2) var<storage, read> packed: array<vec4<Scalar>>;
@group(0) @binding(3) var<storage, read> bias: array<vec4<Scalar>>;
@group(0) @binding(4) var<storage, read_write> y: array<vec4<Out>>;

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
  let group = index / params.m_tiles / params.p_tiles;
  if (group >= params.groups) {
    return;
  }

  // The pixels of which this invocation stages a quad. Pixels past the end stage the last one
  // again.
  let quad = lane % K_QUADS;
  let pixel = lane / K_QUADS;
  let staged = quad * TILE_P + (pixel ^ (quad * SPREAD));
  var origin: array<u32, B_LOADS>;
  for (var i = 0u; i < B_LOADS; i++) { // @unroll
    let p = min(p_tile * TILE_P + i * B_PIXELS + pixel, params.pixels - 1u);
    origin[i] = params.b_base + group * params.b_g + p / params.image_pixels * params.b_n
      + p % params.image_pixels * params.b_p;
  }

  let lane_m = lane % LANES_M;  // neighbouring invocations write neighbouring filters
  let lane_p = lane / LANES_M;
  var acc: array<f32, THREAD_M * THREAD_P>;
  for (var i = 0u; i < THREAD_M * THREAD_P; i++) { // @unroll
    acc[i] = 0.0;
  }

  // Each step's tiles are loaded to registers while the step before is computed. The registers
  // hold what was loaded, untouched until it is staged: converting or masking it any earlier
  // would make the arithmetic in between wait for the load.
  var next_a: array<vec4<Scalar>, A_LOADS>;
  var next_b: array<vec4<In>, B_LOADS>;
  var a_at = (group * params.m_tiles + m_tile) * params.k_steps * TILE_K * FILTER_QUADS + lane;
  var k_at = quad;
  for (var step = 0u; step <= params.k_steps; step++) {
    if (step > 0u) {
      for (var i = 0u; i < A_LOADS; i++) { // @unroll
        tile_a[i * WORKGROUP + lane] = vec4<f32>(next_a[i]);
      }
      // Quads past the end must be zeros: A is zero there, but zero times infinity is NaN.
      let counts = k_at - K_QUADS < params.k_quads;
      for (var i = 0u; i < B_LOADS; i++) { // @unroll
        tile_b[staged + i * B_PIXELS] = select(vec4<f32>(0.0), vec4<f32>(next_b[i]), counts);
      }
      workgroupBarrier();  // the tiles are complete before any invocation reads them
    }
    if (step < params.k_steps) {
      for (var i = 0u; i < A_LOADS; i++) { // @unroll
        next_a[i] = packed[a_at + i * WORKGROUP];
      }
      for (var i = 0u; i < B_LOADS; i++) { // @unroll
        next_b[i] = b[origin[i] + k_at];  // past the end this may read anything
      }
      a_at += TILE_K * FILTER_QUADS;
      k_at += K_QUADS;
    }
    if (step > 0u) {
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
      if (LAST_BARRIER || step < params.k_steps) {
        workgroupBarrier();  // all have read the tiles before the next step overwrites them
      }
    }
  }

  var bias_m: array<vec4<f32>, A_FRAGMENTS>;
  for (var i = 0u; i < A_FRAGMENTS; i++) { // @unroll
    let m_quad = min(m_tile * FILTER_QUADS + i * LANES_M + lane_m, params.m_quads - 1u);
    bias_m[i] = vec4<f32>(bias[group * params.bias_g + m_quad]);
  }
  for (var j = 0u; j < THREAD_P; j++) { // @unroll
    let p = p_tile * TILE_P + j * LANES_P + lane_p;
    if (p < params.pixels) {
      let y_pixel = params.y_base + group * params.y_g + p / params.image_pixels * params.y_n
        + p % params.image_pixels * params.y_p;
      for (var i = 0u; i < A_FRAGMENTS; i++) { // @unroll
        let m_quad = m_tile * FILTER_QUADS + i * LANES_M + lane_m;
        if (m_quad < params.m_quads) {
          var v: vec4<f32>;
          for (var e = 0u; e < 4u; e++) { // @unroll
            v[e] = acc[(i * 4u + e) * THREAD_P + j];
          }
          v = add_residual(v + bias_m[i], y_pixel + m_quad);
          for (var e = 0u; e < 4u; e++) { // @unroll
            v[e] = activate(v[e]);
          }
          y[y_pixel + m_quad] = vec4<Out>(v);
        }
      }
    }
  }
}
