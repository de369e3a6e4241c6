// Writes the columns matrix of a convolution: for each image and each k = (channel, r, s) one row
// with the input element under that tap for every output pixel of a range.
//
// columns[image, k, pixel]; each invocation writes one element. Rows of all groups follow one
// another, since channels do.

alias Scalar = f32;
const WORKGROUP: u32 = 256u;

struct Params {
  images: u32,  // of this dispatch
  first_image: u32,
  pixels: u32,  // of the range, per image
  first_pixel: u32,
  channels: u32,
  h: u32,
  w: u32,
  out_w: u32,
  r: u32,
  s: u32,
  stride_h: u32,
  stride_w: u32,
  pad_top: u32,
  pad_left: u32,
  dilation_h: u32,
  dilation_w: u32,
  x_n: u32,  // strides of the input, in elements
  x_c: u32,
  x_h: u32,
  x_w: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<Scalar>;
@group(0) @binding(2) var<storage, read_write> columns: array<Scalar>;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) lane: u32,
) {
  let index = (workgroup.x + workgroup.y * workgroups.x) * WORKGROUP + lane;
  let rows = params.channels * params.r * params.s;
  let pixel = index % params.pixels + params.first_pixel;
  let k = index / params.pixels % rows;
  let image = index / params.pixels / rows;
  if (image >= params.images) {
    return;
  }
  let s = k % params.s;
  let r = k / params.s % params.r;
  let c = k / params.s / params.r;
  // Before the border these wrap to huge numbers, so one comparison checks both sides.
  let ih = pixel / params.out_w * params.stride_h + r * params.dilation_h - params.pad_top;
  let iw = pixel % params.out_w * params.stride_w + s * params.dilation_w - params.pad_left;
  var v = Scalar(0.0);
  if (ih < params.h && iw < params.w) {
    v = x[(params.first_image + image) * params.x_n + c * params.x_c
      + ih * params.x_h + iw * params.x_w];
  }
  columns[index] = v;
}
