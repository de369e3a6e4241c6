// Transforms the weight for Winograd's convolution, U = G g G^T, and packs it as pack_weights.wgsl
// does for the GEMM kernels: for each of the ALPHA_H * ALPHA_W points and each group a matrix of
// filters by channels, in tiles of TILE_M filters. Filters and channels past the end become zeros.
//
// With a stride, each of the stride_h * stride_w phases of the input meets every stride-th tap.

alias Scalar = f32;
const WORKGROUP: u32 = 64u;
const TILE_M: u32 = 64u;
const ALPHA_H: u32 = 4u;
const ALPHA_W: u32 = 4u;
const TAPS_H: u32 = 3u;  // of one phase, rounded up
const TAPS_W: u32 = 3u;
// The rows of G, here of F(2, 3).
const G_H = array<f32, 12>(1.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5, -0.5, 0.5, 0.0, 0.0, 1.0);
const G_W = array<f32, 12>(1.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5, -0.5, 0.5, 0.0, 0.0, 1.0);

struct Params {
  m: u32,  // filters of a group
  m_tiles: u32,
  c_group: u32,
  k_padded: u32,  // c_group * phases, rounded up to whole steps of the product
  groups: u32,
  r: u32,
  s: u32,
  stride_h: u32,
  stride_w: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> weight: array<Scalar>;
@group(0) @binding(2) var<storage, read_write> packed: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) lane: u32,
) {
  let index = (workgroup.x + workgroup.y * workgroups.x) * WORKGROUP + lane;
  let rows = params.m_tiles * TILE_M;
  let m = index % rows;  // neighbouring invocations write neighbouring filters
  let k = index / rows % params.k_padded;
  let group = index / rows / params.k_padded;
  if (group >= params.groups) {
    return;
  }
  let phase = k / params.c_group;
  let phase_h = phase / params.stride_w;
  let phase_w = phase % params.stride_w;
  let counts = m < params.m && phase < params.stride_h * params.stride_w;
  let filter_at = ((group * params.m + min(m, params.m - 1u)) * params.c_group
    + k % params.c_group) * params.r * params.s;

  var u: array<f32, ALPHA_H * ALPHA_W>;
  for (var i = 0u; i < ALPHA_H * ALPHA_W; i++) { // @unroll
    u[i] = 0.0;
  }
  for (var i = 0u; i < TAPS_H; i++) { // @unroll
    let r = phase_h + i * params.stride_h;
    var g: array<f32, TAPS_W>;
    for (var j = 0u; j < TAPS_W; j++) { // @unroll
      let s = phase_w + j * params.stride_w;
      let value = f32(weight[filter_at + min(r, params.r - 1u) * params.s + min(s, params.s - 1u)]);
      g[j] = select(0.0, value, counts && r < params.r && s < params.s);
    }
    for (var b = 0u; b < ALPHA_W; b++) { // @unroll
      var sum = 0.0;
      for (var j = 0u; j < TAPS_W; j++) { // @unroll
        if (G_W[b * TAPS_W + j] != 0.0) { sum = fma(G_W[b * TAPS_W + j], g[j], sum); }
      }
      for (var a = 0u; a < ALPHA_H; a++) { // @unroll
        if (G_H[a * TAPS_H + i] != 0.0) { u[a * ALPHA_W + b] = fma(G_H[a * TAPS_H + i], sum, u[a * ALPHA_W + b]); }
      }
    }
  }

  for (var i = 0u; i < ALPHA_H * ALPHA_W; i++) { // @unroll
    let tile = (i * params.groups + group) * params.m_tiles + m / TILE_M;
    packed[(tile * params.k_padded + k) * TILE_M + m % TILE_M] = u[i];
  }
}
