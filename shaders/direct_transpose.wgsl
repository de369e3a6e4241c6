// Direct transposed convolution, gathered: each invocation computes one output pixel of FILTERS
// filters of a group, from the input pixels that reach it.
//
// Input row ih reaches output row oh through tap r where ih * stride + r * dilation = oh + pad.
// Whether a tap counts depends on the pixel alone, so the loop over channels lies inside.

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
  var column: array<u32, FILTERS>;  // where each filter's taps begin, for the first channel
  var acc: array<f32, FILTERS>;
  for (var f = 0u; f < FILTERS; f++) { // @unroll
    column[f] = min(k0 + f, params.k_group - 1u) * taps;
    acc[f] = 0.0;
  }

  let c0 = group * params.c_group;
  let w_c = params.k_group * taps;  // the weight is (C, K/groups, R, S)
  let x_image = image * params.x_n + c0 * params.x_c;
  for (var r = 0u; r < params.r; r++) {
    // Before the first input row this wraps to a huge number, far past the last row.
    let below = oh + params.pad_top - r * params.dilation_h;
    let ih = below / params.stride_h;
    if (below % params.stride_h != 0u || ih >= params.h) {
      continue;
    }
    for (var s = 0u; s < params.s; s++) {
      let right = ow + params.pad_left - s * params.dilation_w;
      let iw = right / params.stride_w;
      if (right % params.stride_w != 0u || iw >= params.w) {
        continue;
      }
      let x_at = x_image + ih * params.x_h + iw * params.x_w;
      let w_at = c0 * w_c + r * params.s + s;
      for (var c = 0u; c < params.c_group; c++) {
        let v = f32(x[x_at + c * params.x_c]);
        for (var f = 0u; f < FILTERS; f++) { // @unroll
          acc[f] = fma(v, f32(weight[w_at + c * w_c + column[f]]), acc[f]);
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
