// depthwise.wgsl for NHWC with one filter a channel, and channels in fours: each invocation
// computes ROWS output pixels of one column of four channels, whose taps it holds in registers.

alias Scalar = f32;
const R: u32 = 3u;
const S: u32 = 3u;
const ROWS: u32 = 4u;
const STRIDE_H: u32 = 1u;
const WORKGROUP: u32 = 64u;

const ROWS_IN = (ROWS - 1u) * STRIDE_H + R;  // of the input, for all of an invocation's

struct Params {
  n: u32,
  h: u32,
  w: u32,
  out_h: u32,
  out_w: u32,
  quads: u32,  // fours of channels
  block: u32,  // of them, that invocations take side by side before the next column
  stride_w: u32,
  pad_top: u32,
  pad_left: u32,
  dilation_h: u32,
  dilation_w: u32,
  act_a: f32,
  act_b: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<Scalar>>;
@group(0) @binding(2) var<storage, read> weight: array<vec4<Scalar>>;
@group(0) @binding(3) var<storage, read> bias: array<vec4<Scalar>>;
@group(0) @binding(4) var<storage, read_write> y: array<vec4<Scalar>>;

fn activate(v: f32) -> f32 { return v; }
fn add_residual(v: vec4<f32>, at: u32) -> vec4<f32> { return v; }

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) lane: u32,
) {
  let index = (workgroup.x + workgroup.y * workgroups.x) * WORKGROUP + lane;
  let strips = (params.out_h + ROWS - 1u) / ROWS * params.out_w;
  let strip = index / params.block % strips;
  let blocks = params.quads / params.block;
  let quad = index / params.block / strips % blocks * params.block + index % params.block;
  let image = index / params.block / strips / blocks;
  if (image >= params.n) {
    return;
  }
  let oh = strip / params.out_w * ROWS;
  let ow = strip % params.out_w;

  // The taps of four filters lie one filter after the other, R * S vec4s in all.
  var loaded: array<vec4<f32>, R * S>;
  for (var i = 0u; i < R * S; i++) { // @unroll
    loaded[i] = vec4<f32>(weight[quad * R * S + i]);
  }
  var taps: array<vec4<f32>, R * S>;
  for (var t = 0u; t < R * S; t++) { // @unroll
    for (var e = 0u; e < 4u; e++) { // @unroll
      taps[t][e] = loaded[(e * R * S + t) / 4u][(e * R * S + t) % 4u];
    }
  }
  let bias_quad = vec4<f32>(bias[quad]);
  // Above and left of the image these wrap to huge numbers: one comparison checks both sides.
  let top = oh * STRIDE_H - params.pad_top;
  let left = ow * params.stride_w - params.pad_left;

  // Each row of the input serves all outputs whose windows it crosses. No load waits for a branch.
  var acc: array<vec4<f32>, ROWS>;
  for (var h = 0u; h < ROWS; h++) { // @unroll
    acc[h] = bias_quad;
  }
  for (var i = 0u; i < ROWS_IN; i++) { // @unroll
    let ih = top + i * params.dilation_h;
    let row = (image * params.h + min(ih, params.h - 1u)) * params.w;
    for (var s = 0u; s < S; s++) { // @unroll
      let iw = left + s * params.dilation_w;
      let value = vec4<f32>(x[(row + min(iw, params.w - 1u)) * params.quads + quad]);
      let v = select(vec4<f32>(0.0), value, ih < params.h && iw < params.w);
      for (var h = 0u; h < ROWS; h++) { // @unroll
        let r = u32(i32(i) - i32(h * STRIDE_H));  // before this output's window a huge number
        if (r < R) {
          acc[h] = fma(v, taps[min(r, R - 1u) * S + s], acc[h]);
        }
      }
    }
  }

  for (var h = 0u; h < ROWS; h++) { // @unroll
    if (oh + h < params.out_h) {
      let pixel = (image * params.out_h + oh + h) * params.out_w + ow;
      let y_at = pixel * params.quads + quad;
      var v = add_residual(acc[h], y_at);
      for (var e = 0u; e < 4u; e++) { // @unroll
        v[e] = activate(v[e]);
      }
      y[y_at] = vec4<Scalar>(v);
    }
  }
}
