// Last step of Winograd's convolution: Y = A^T M A of each tile, bias, residual, activation.
//
// M holds, for each of the ALPHA_H * ALPHA_W points, the product of filters by tiles. Each
// invocation transforms one tile of one filter into OUT_H x OUT_W outputs. These go through
// workgroup memory, so that neighbouring invocations write neighbouring pixels.

alias Scalar = f32;
const WORKGROUP: u32 = 64u;
const ALPHA_H: u32 = 4u;
const ALPHA_W: u32 = 4u;
const OUT_H: u32 = 2u;
const OUT_W: u32 = 2u;
// The rows of A, here of F(2, 3).
const A_H = array<f32, 8>(1.0, 0.0, 1.0, 1.0, 1.0, -1.0, 0.0, 1.0);
const A_W = array<f32, 8>(1.0, 0.0, 1.0, 1.0, 1.0, -1.0, 0.0, 1.0);

const ROW = WORKGROUP * OUT_W;  // outputs of all tiles of the workgroup in one row

struct Params {
  tiles: u32,  // of this part
  first_tile: u32,
  image_tiles: u32,  // of an image
  row_tiles: u32,  // of a row of an image
  pitch: u32,  // tiles from one filter of M to the next
  filters: u32,
  k_group: u32,
  out_h: u32,
  out_w: u32,
  y_n: u32,  // strides of the output, in elements
  y_k: u32,
  y_h: u32,
  y_w: u32,
  act_a: f32,
  act_b: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> product: array<f32>;
@group(0) @binding(2) var<storage, read> bias: array<Scalar>;
@group(0) @binding(3) var<storage, read_write> y: array<Scalar>;

var<workgroup> outputs: array<f32, OUT_H * ROW>;
// Where each tile's outputs begin in y, and how many rows and columns of it lie inside.
var<workgroup> corners: array<vec4<u32>, WORKGROUP>;

fn activate(v: f32) -> f32 { return v; }
fn add_residual(v: f32, at: u32) -> f32 { return v; }

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) lane: u32,
) {
  let index = workgroup.x + workgroup.y * workgroups.x;
  let blocks = (params.tiles + WORKGROUP - 1u) / WORKGROUP;
  let tile = index % blocks * WORKGROUP + lane;
  let filter_at = index / blocks;
  if (filter_at >= params.filters) {
    return;
  }

  // Tiles past the end transform the last one again, and write nothing.
  let at = params.first_tile + min(tile, params.tiles - 1u);
  let image = at / params.image_tiles;
  let top = at % params.image_tiles / params.row_tiles * OUT_H;
  let left = at % params.row_tiles * OUT_W;
  corners[lane] = vec4<u32>(
    image * params.y_n + top * params.y_h + left * params.y_w,
    select(0u, params.out_h - top, tile < params.tiles),
    params.out_w - left,
    0u,
  );

  let groups = params.filters / params.k_group;
  let group = filter_at / params.k_group;
  let row = filter_at % params.k_group;
  let column_at = min(tile, params.tiles - 1u);
  var sums: array<f32, OUT_H * OUT_W>;
  for (var i = 0u; i < OUT_H * OUT_W; i++) { // @unroll
    sums[i] = 0.0;
  }
  for (var i = 0u; i < ALPHA_H; i++) { // @unroll
    var m: array<f32, ALPHA_W>;
    for (var j = 0u; j < ALPHA_W; j++) { // @unroll
      m[j] = product[(((i * ALPHA_W + j) * groups + group) * params.k_group + row) * params.pitch
        + column_at];
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
  let bias_k = f32(bias[filter_at]);
  for (var a = 0u; a < OUT_H; a++) { // @unroll
    for (var b = 0u; b < OUT_W; b++) { // @unroll
      outputs[a * ROW + lane * OUT_W + b] = sums[a * OUT_W + b] + bias_k;
    }
  }
  workgroupBarrier();  // all outputs and corners are there before they are read across lanes

  for (var i = 0u; i < OUT_H * OUT_W; i++) { // @unroll
    let a = i / OUT_W;
    let column = i % OUT_W * WORKGROUP + lane;  // of the row of all tiles
    let corner = corners[column / OUT_W];
    let b = column % OUT_W;
    if (a < corner.y && b < corner.z) {
      let y_at = corner.x + filter_at * params.y_k + a * params.y_h + b * params.y_w;
      y[y_at] = Scalar(activate(add_residual(outputs[a * ROW + column], y_at)));
    }
  }
}
