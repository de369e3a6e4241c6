// Direct convolution: each invocation computes one output pixel of FILTERS filters of a group.
//
// The plainest algorithm, and the one that fits every problem. Neighbouring invocations
// compute neighbouring pixels, so that their loads and stores fall together; the FILTERS
// accumulators reuse each loaded input element.

alias Scalar = f32;
const FILTERS: u32 = 4u;
const WORKGROUP: u32 = 64u;
const CHANNELS_LAST: bool = false;  // neighbouring invocations take neighbouring filters

struct Params {
  n: u32,
  h: u32,
  w: u32,
  out_h: u32,
  out_w: u32,
  c_group: u32,
  k_group: u32,
  groups: u32,
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
  y_n: u32,  // strides of the output
  y_k: u32,
  y_h: u32,
  y_w: u32,
  act_a: f32,
  act_b: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<Scalar>;
@group(0) @binding(2) var<storage, read> weight: array<Scalar>;
@group(0) @binding(3) var<storage, read> bias: array<Scalar>;
@group(0) @binding(4) var<storage, read_write> y: array<Scalar>;

fn activate(v: f32) -> f32 { return v; }
fn add_residual(v: f32, at: u32) -> f32 { return v; }

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) lane: u32,
) {
  let index = (workgroup.x + workgroup.y * workgroups.x) * WORKGROUP + lane;
  let pixels = params.out_h * params.out_w;
  let blocks_group = (params.k_group + FILTERS - 1u) / FILTERS;
  let blocks = blocks_group * params.groups;
  let pixel = select(index % pixels, (index / blocks) % pixels, CHANNELS_LAST);
  let block = select((index / pixels) % blocks, index % blocks, CHANNELS_LAST);
  let image = index / pixels / blocks;
  if (image >= params.n) {
    return;
  }
  let oh = pixel / params.out_w;
  let ow = pixel % params.out_w;
  let group = block / blocks_group;
  let k0 = (block % blocks_group) * FILTERS;  // within the group

  let taps = params.r * params.s;
  var row: array<u32, FILTERS>;  // where each filter's weights begin
  var acc: array<f32, FILTERS>;
  for (var f = 0u; f < FILTERS; f++) { // @unroll
    row[f] = (group * params.k_group + min(k0 + f, params.k_group - 1u)) * params.c_group * taps;
    acc[f] = 0.0;
  }

  let x_image = image * params.x_n + group * params.c_group * params.x_c;
  for (var c = 0u; c < params.c_group; c++) {
    for (var r = 0u; r < params.r; r++) {
      // Above the image this wraps to a huge number, so one comparison checks both sides.
      let ih = oh * params.stride_h + r * params.dilation_h - params.pad_top;
      if (ih >= params.h) {
        continue;
      }
      for (var s = 0u; s < params.s; s++) {
        let iw = ow * params.stride_w + s * params.dilation_w - params.pad_left;
        if (iw >= params.w) {
          continue;
        }
        let v = f32(x[x_image + c * params.x_c + ih * params.x_h + iw * params.x_w]);
        let at = c * taps + r * params.s + s;
        for (var f = 0u; f < FILTERS; f++) { // @unroll
          acc[f] = fma(v, f32(weight[row[f] + at]), acc[f]);
        }
      }
    }
  }

  // Loaded at once: one after the other, each in its branch, would take longer than to store.
  var bias_k: array<f32, FILTERS>;
  for (var f = 0u; f < FILTERS; f++) { // @unroll
    bias_k[f] = f32(bias[group * params.k_group + min(k0 + f, params.k_group - 1u)]);
  }
  let y_pixel = image * params.y_n + oh * params.y_h + ow * params.y_w;
  for (var f = 0u; f < FILTERS; f++) { // @unroll
    if (k0 + f < params.k_group) {
      let k = group * params.k_group + k0 + f;
      let y_at = y_pixel + k * params.y_k;
      y[y_at] = Scalar(activate(add_residual(acc[f] + bias_k[f], y_at)));
    }
  }
}
