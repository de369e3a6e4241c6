// gemm.wgsl for pixels that lie side by side and number a multiple of 4 an image: B and y are
// read and written four pixels at a time.
//
//   y[m, p] = sum over k of A[m, k] * B[k, p]
//
// A is the packed weight (pack_weights.wgsl). A workgroup computes TILE_M x TILE_P outputs, each
// invocation THREAD_M x THREAD_P of them. p counts pixels of several images; offsets and strides
// of B and y count vec4s (quads).

alias Scalar = f32;
alias In = f32;  // the element of B
alias Out = f32;  // the element of y
const TILE_M: u32 = 64u;
const TILE_P: u32 = 64u;
const TILE_K: u32 = 8u;
const THREAD_M: u32 = 8u;  // a multiple of 4, as THREAD_P
const THREAD_P: u32 = 4u;
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
  quads: u32,  // fours of columns of B and y, over all images
  image_quads: u32,  // those of one image
  reduction: u32,
  b_base: u32,
  b_g: u32,  // strides of B over groups, images, k
  b_n: u32,
  b_k: u32,
  y_base: u32,
  y_g: u32,  // strides of y over groups, images, rows
  y_n: u32,
  y_m: u32,
  m: u32,  // rows of A of a group
  bias_g: u32,  // from the bias of one group to the next's
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
@group(0) @binding(3) var<storage, read> bias: array<Scalar>;
@group(0) @binding(4) var<storage, read_write> y: array<vec4<Out>>;

var<workgroup> tile_a: array<vec4<f32>, TILE_K * FILTER_QUADS>;
var<workgroup> tile_b: array<vec4<f32>, TILE_K * PIXEL_QUADS>;

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

  // The quad of which this invocation stages elements. Quads past the end stage the last one
  // again.
  let row = lane / PIXEL_QUADS;
  let staged = min(p_tile * PIXEL_QUADS + lane % PIXEL_QUADS, params.quads - 1u);
  let origin = params.b_base + group * params.b_g + staged / params.image_quads * params.b_n
    + staged % params.image_quads;

  let lane_m = lane / LANES_P;
  let lane_p = lane % LANES_P;
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
  var k_at = row;
  for (var step = 0u; step <= params.k_steps; step++) {
    if (step > 0u) {
      for (var i = 0u; i < A_LOADS; i++) { // @unroll
        tile_a[i * WORKGROUP + lane] = vec4<f32>(next_a[i]);
      }
      for (var i = 0u; i < B_LOADS; i++) { // @unroll
        // Rows past the end must be zeros: A is zero there, but zero times infinity is NaN.
        let counts = k_at - TILE_K + i * B_ROWS < params.reduction;
        tile_b[i * WORKGROUP + lane] = select(vec4<f32>(0.0), vec4<f32>(next_b[i]), counts);
      }
      workgroupBarrier();  // the tiles are complete before any invocation reads them
    }
    if (step < params.k_steps) {
      for (var i = 0u; i < A_LOADS; i++) { // @unroll
        next_a[i] = packed[a_at + i * WORKGROUP];
      }
      for (var i = 0u; i < B_LOADS; i++) { // @unroll
        // Past the end this may read anything, which staging drops.
        next_b[i] = b[origin + (k_at + i * B_ROWS) * params.b_k];
      }
      a_at += TILE_K * FILTER_QUADS;
      k_at += TILE_K;
    }
    if (step > 0u) {
      for (var k = 0u; k < TILE_K; k++) { // @unroll if UNROLL_K
        var a_k: array<vec4<f32>, A_FRAGMENTS>;
        var b_k: array<vec4<f32>, B_FRAGMENTS>;
        for (var i = 0u; i < A_FRAGMENTS; i++) { // @unroll
          a_k[i] = tile_a[k * FILTER_QUADS + i * LANES_M + lane_m];
        }
        for (var j = 0u; j < B_FRAGMENTS; j++) { // @unroll
          b_k[j] = tile_b[k * PIXEL_QUADS + j * LANES_P + lane_p];
        }
        for (var i = 0u; i < THREAD_M; i++) { // @unroll FMA_ORDER=rows
          for (var j = 0u; j < THREAD_P; j++) {
            acc[i * THREAD_P + j] =
              fma(a_k[i / 4u][i % 4u], b_k[j / 4u][j % 4u], acc[i * THREAD_P + j]);
          }
        }
      }
      if (LAST_BARRIER || step < params.k_steps) {
        workgroupBarrier();  // all have read the tiles before the next step overwrites them
      }
    }
  }

  // Loaded at once, as a residual is below: one after the other, each in its branch, would take
  // longer than to store.
  var bias_m: array<f32, THREAD_M>;
  for (var i = 0u; i < THREAD_M; i++) { // @unroll
    let m = m_tile * TILE_M + (i / 4u) * LANES_M * 4u + lane_m * 4u + i % 4u;
    bias_m[i] = f32(bias[group * params.bias_g + min(m, params.m - 1u)]);
  }
  for (var j = 0u; j < B_FRAGMENTS; j++) { // @unroll
    let quad = p_tile * PIXEL_QUADS + j * LANES_P + lane_p;
    if (quad < params.quads) {
      let y_quad = params.y_base + group * params.y_g + quad / params.image_quads * params.y_n
        + quad % params.image_quads;
      for (var i = 0u; i < THREAD_M; i++) { // @unroll
        let m = min(m_tile * TILE_M + (i / 4u) * LANES_M * 4u + lane_m * 4u + i % 4u, params.m - 1u);
        var v: vec4<f32>;
        for (var q = 0u; q < 4u; q++) { // @unroll
          v[q] = acc[i * THREAD_P + j * 4u + q];
        }
        v = add_residual(v + bias_m[i], y_quad + m * params.y_m);
        for (var q = 0u; q < 4u; q++) { // @unroll
          acc[i * THREAD_P + j * 4u + q] = v[q];
        }
      }
      for (var i = 0u; i < THREAD_M; i++) { // @unroll
        let m = m_tile * TILE_M + (i / 4u) * LANES_M * 4u + lane_m * 4u + i % 4u;
        if (m < params.m) {
          var v: vec4<f32>;
          for (var q = 0u; q < 4u; q++) { // @unroll
            v[q] = activate(acc[i * THREAD_P + j * 4u + q]);
          }
          y[y_quad + m * params.y_m] = vec4<Out>(v);
        }
      }
    }
  }
}
