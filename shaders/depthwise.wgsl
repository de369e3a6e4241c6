// Depthwise convolution: every group has one input channel, so there is nothing to sum over
// channels and the kernel is bound by memory. Each invocation computes ROWS output pixels of
// one column of one filter, with that filter's taps in registers.

alias Scalar = f32;
const R: u32 = 3u;
const S: u32 = 3u;
const ROWS: u32 = 4u;
const STRIDE_H: u32 = 1u;
const WORKGROUP: u32 = 64u;
const CHANNELS_LAST: bool = false;  // neighbouring invocations take neighbouring filters

const ROWS_IN = (ROWS - 1u) * STRIDE_H + R;  // of the input, for all of an invocation's

struct Params {
  n: u32,
  h: u32,
  w: u32,
  out_h: u32,
  out_w: u32,
  k: u32,
  k_group: u32,  // filters of one input channel (the channel multiplier)
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
  let strips = (params.out_h + ROWS - 1u) / ROWS * params.out_w;
  let strip = select(index % strips, (index / params.k) % strips, CHANNELS_LAST);
  let k = select((index / strips) % params.k, index % params.k, CHANNELS_LAST);
  let image = index / strips / params.k;
  if (image >= params.n) {
    return;
  }
  let oh = strip / params.out_w * ROWS;
  let ow = strip % params.out_w;

  var taps: array<f32, R * S>;
  for (var t = 0u; t < R * S; t++) { // @unroll
    taps[t] = f32(weight[k * R * S + t]);
  }
  let bias_k = f32(bias[k]);
  let plane = image * params.x_n + k / params.k_group * params.x_c;
  // Above and left of the image these wrap to huge numbers: one comparison checks both sides.
  let top = oh * STRIDE_H - params.pad_top;
  let left = ow * params.stride_w - params.pad_left;

  // Each row of the input serves all outputs whose windows it crosses. No load waits for a branch.
  var acc: array<f32, ROWS>;
  for (var h = 0u; h < ROWS; h++) { // @unroll
    acc[h] = bias_k;
  }
  for (var i = 0u; i < ROWS_IN; i++) { // @unroll
    let ih = top + i * params.dilation_h;
    let row = plane + min(ih, params.h - 1u) * params.x_h;
    for (var s = 0u; s < S; s++) { // @unroll
      let iw = left + s * params.dilation_w;
      let value = f32(x[row + min(iw, params.w - 1u) * params.x_w]);
      let v = select(0.0, value, ih < params.h && iw < params.w);
      for (var h = 0u; h < ROWS; h++) { // @unroll
        let r = u32(i32(i) - i32(h * STRIDE_H));  // before this output's window a huge number
        if (r < R) {
          acc[h] = fma(v, taps[min(r, R - 1u) * S + s], acc[h]);
        }
      }
    }
  }

  let y_column = image * params.y_n + k * params.y_k + ow * params.y_w + oh * params.y_h;
  for (var h = 0u; h < ROWS; h++) { // @unroll
    if (oh + h < params.out_h) {
      let y_at = y_column + h * params.y_h;
      y[y_at] = Scalar(activate(add_residual(acc[h], y_at)));
    }
  }
}
