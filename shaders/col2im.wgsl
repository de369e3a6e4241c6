// The second half of a transposed convolution by GEMM: columns[image, (k, r, s), input pixel]
// hold each input pixel's contribution through each tap; every invocation gathers those that
// reach one output pixel, adds bias and residual, and applies the activation.
//
// Input row ih reaches output row oh through tap r where ih * stride + r * dilation = oh + pad.

alias Scalar = f32;
const WORKGROUP: u32 = 256u;

struct Params {
  images: u32,  // of this dispatch
  first_image: u32,
  first_row: u32,  // output rows of this dispatch
  out_rows: u32,
  out_w: u32,
  k: u32,
  h: u32,  // input rows whose columns are there, from first_h on
  first_h: u32,
  w: u32,
  r: u32,
  s: u32,
  stride_h: u32,
  stride_w: u32,
  pad_top: u32,
  pad_left: u32,
  dilation_h: u32,
  dilation_w: u32,
  y_n: u32,  // strides of the output, in elements
  y_k: u32,
  y_h: u32,
  y_w: u32,
  act_a: f32,
  act_b: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> columns: array<f32>;
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
  let ow = index % params.out_w;
  let oh = index / params.out_w % params.out_rows + params.first_row;
  let k = index / params.out_w / params.out_rows % params.k;
  let image = index / params.out_w / params.out_rows / params.k;
  if (image >= params.images) {
    return;
  }
  var sum = 0.0;
  for (var r = 0u; r < params.r; r++) {
    // Before the first input row this wraps to a huge number, far past the last row.
    let below = oh + params.pad_top - r * params.dilation_h;
    let ih = below / params.stride_h - params.first_h;
    if (below % params.stride_h != 0u || ih >= params.h) {
      continue;
    }
    for (var s = 0u; s < params.s; s++) {
      let right = ow + params.pad_left - s * params.dilation_w;
      let iw = right / params.stride_w;
      if (right % params.stride_w != 0u || iw >= params.w) {
        continue;
      }
      let at = ((image * params.k + k) * params.r + r) * params.s + s;
      sum += columns[(at * params.h + ih) * params.w + iw];
    }
  }
  let y_at = (params.first_image + image) * params.y_n + k * params.y_k
    + oh * params.y_h + ow * params.y_w;
  y[y_at] = Scalar(activate(add_residual(sum + f32(bias[k]), y_at)));
}
