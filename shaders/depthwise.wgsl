// Depthwise convolution: every group has one input channel, so there is nothing to sum over
// channels and the kernel is bound by memory. Each invocation computes ROWS output pixels of
// one column of one filter, with that filter's taps in registers.

alias Scalar = f32;
const R: u32 = 3u;
const S: u32 = 3u;
const ROWS: u32 = 4u;
const WORKGROUP: u32 = 64u;
const CHANNELS_LAST: bool = false;  // neighbouring invocations take neighbouring filters

struct Params {
  n: u32,
  h: u32,
  w: u32,
  out_h: u32,
  out_w: u32,
  k: u32,
  k_group: u32,  // filters of one input channel (the channel multiplier)
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
  let oh0 = strip / params.out_w * ROWS;
  let ow = strip % params.out_w;

  var taps: array<f32, R * S>;
  for (var t = 0u; t < R * S; t++) { // @unroll
    taps[t] = f32(weight[k * R * S + t]);
  }
  let b = f32(bias[k]);
  let x_plane = image * params.x_n + k / params.k_group * params.x_c;
  let y_column = image * params.y_n + k * params.y_k + ow * params.y_w;

  for (var row = 0u; row < ROWS; row++) { // @unroll
    let oh = oh0 + row;
    if (oh < params.out_h) {
      var acc = 0.0;
      for (var r = 0u; r < R; r++) { // @unroll
        // Above the image this wraps to a huge number, so one comparison checks both sides.
        let ih = oh * params.stride_h + r * params.dilation_h - params.pad_top;
        if (ih < params.h) {
          let x_row = x_plane + ih * params.x_h;
          for (var s = 0u; s < S; s++) { // @unroll
            let iw = ow * params.stride_w + s * params.dilation_w - params.pad_left;
            let inside = iw < params.w;
            let v = f32(x[x_row + select(0u, iw, inside) * params.x_w]);
            acc = fma(select(0.0, v, inside), taps[r * S + s], acc);
          }
        }
      }
      y[y_column + oh * params.y_h] = Scalar(activate(acc + b));
    }
  }
}
