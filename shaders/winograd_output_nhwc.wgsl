// winograd_output.wgsl for NHWC: Y = A^T M A of each tile, bias, residual, activation.
//
// M holds, for each of the ALPHA_H * ALPHA_W points, the product as tiles by filters. Each
// invocation transforms one tile of one filter into OUT_H x OUT_W outputs; neighbouring
// invocations take neighbouring filters.

alias Scalar = f32;
const WORKGROUP: u32 = 64u;
const ALPHA_H: u32 = 4u;
const ALPHA_W: u32 = 4u;
const OUT_H: u32 = 2u;
const OUT_W: u32 = 2u;
// The rows of A, here of F(2, 3).
const A_H = array<f32, 8>(1.0, 0.0, 1.0, 1.0, 1.0, -1.0, 0.0, 1.0);
const A_W = array<f32, 8>(1.0, 0.0, 1.0, 1.0, 1.0, -1.0, 0.0, 1.0);

struct Params {
  tiles: u32,  // of this part
  first_tile: u32,
  image_tiles: u32,  // of an image
  row_tiles: u32,  // of a row of an image
  pitch: u32,  // filters from one tile of M to the next
  filters: u32,
  k_group: u32,
  out_h: u32,
  out_w: u32,
  y_n: u32,  // strides of the output, in elements
  y_h: u32,
  y_w: u32,
  act_a: f32,
  act_b: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> product: array<f32>;
@group(0) @binding(2) var<storage, read> bias: array<Scalar>;
@group(0) @binding(3) var<storage, read_write> y: array<Scalar>;

fn activate(v: f32) -> f32 { return v; }
fn add_residual(v: f32, at: u32) -> f32 { return v; }

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) lane: u32,
) {
  let index = (workgroup.x + workgroup.y * workgroups.x) * WORKGROUP + lane;
  let filter_at = index % params.filters;
  let tile = index / params.filters;
  if (tile >= params.tiles) {
    return;
  }
  let groups = params.filters / params.k_group;
  let group = filter_at / params.k_group;
  let m_at = (group * params.tiles + tile) * params.pitch + filter_at % params.k_group;
  let m_point = groups * params.tiles * params.pitch;  // from one point to the next

  var sums: array<f32, OUT_H * OUT_W>;
  for (var i = 0u; i < OUT_H * OUT_W; i++) { // @unroll
    sums[i] = 0.0;
  }
  for (var i = 0u; i < ALPHA_H; i++) { // @unroll
    var m: array<f32, ALPHA_W>;
    for (var j = 0u; j < ALPHA_W; j++) { // @unroll
      m[j] = product[m_at + (i * ALPHA_W + j) * m_point];
    }
    for (var b = 0u; b < OUT_W; b++) { // @unroll
      var sum = 0.0;
      for (var j = 0u; j < ALPHA_W; j++) { // @unroll
        if (A_W[j * OUT_W + b] != 0.0) { sum = fma(A_W[j * OUT_W + b], m[j], sum); }
      }
      for (var a = 0u; a < OUT_H; a++) { // @unroll
        if (A_H[i * OUT_H + a] != 0.0) { sums[a * OUT_W + b] = fma(A_H[i * OUT_H + a], sum, sums[a * OUT_W + b]); }
      }
    }
  }

  let at = params.first_tile + tile;
  let top = at % params.image_tiles / params.row_tiles * OUT_H;
  let left = at % params.row_tiles * OUT_W;
  let corner = at / params.image_tiles * params.y_n + top * params.y_h + left * params.y_w + filter_at;
  let bias_k = f32(bias[filter_at]);
  for (var a = 0u; a < OUT_H; a++) { // @unroll
    for (var b = 0u; b < OUT_W; b++) { // @unroll
      if (top + a < params.out_h && left + b < params.out_w) {
        let y_at = corner + a * params.y_h + b * params.y_w;
        y[y_at] = Scalar(activate(add_residual(sums[a * OUT_W + b] + bias_k, y_at)));
      }
    }
  }
}
