// Direct convolution with register tiles: each invocation computes ROWS outputs down by PIXELS
// across of FILTERS filters, and all of a workgroup share the weights, which lie in workgroup memory.
//
// For few channels or few filters, where a GEMM's tiles would be mostly empty or its reduction too
// short. A row of the input serves all outputs whose windows it crosses. The columns of an
// invocation lie WORKGROUP apart, so that neighbouring invocations load and store neighbours.

alias Scalar = f32;
const FILTERS: u32 = 16u;  // a multiple of 4
const ROWS: u32 = 2u;
const PIXELS: u32 = 2u;
const WORKGROUP: u32 = 64u;
const TAPS_H: u32 = 3u;
const TAPS_W: u32 = 3u;
const STRIDE_H: u32 = 1u;
const UNROLL_ROWS: bool = true;  // write out the rows of a channel
const UNROLL_TAPS: bool = true;  // write out the taps of a row
const STAGED: u32 = 1024u;  // weight quads in workgroup memory: whole channels of them
const BORDER: bool = true;  // false where no tap lies outside the image

const QUADS = FILTERS / 4u;
const PATCH = WORKGROUP * PIXELS;  // columns of a workgroup, each ROWS high
const ROWS_IN = (ROWS - 1u) * STRIDE_H + TAPS_H;  // of the input, for all of an invocation's

struct Params {
  columns: u32,  // of ROWS outputs each, over all images
  image_columns: u32,
  out_h: u32,
  out_w: u32,
  h: u32,
  w: u32,
  c_group: u32,
  k_group: u32,
  groups: u32,
  stage_channels: u32,  // channels whose weights are staged at a time
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

// By channel and tap: the weights of the FILTERS filters.
var<workgroup> weights: array<vec4<f32>, STAGED>;

fn activate(v: f32) -> f32 { return v; }
fn add_residual(v: f32, at: u32) -> f32 { return v; }

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) lane: u32,
) {
  let index = workgroup.x + workgroup.y * workgroups.x;
  let patches = (params.columns + PATCH - 1u) / PATCH;
  let blocks = (params.k_group + FILTERS - 1u) / FILTERS;
  let block = index % blocks;
  let first = index / blocks % patches * PATCH + lane;
  let group = index / blocks / patches;
  if (group >= params.groups) {
    return;
  }

  // Where the windows of each column begin. Columns past the end compute the last one again.
  var origin: array<u32, PIXELS>;
  var top: array<u32, PIXELS>;  // before the image these wrap to huge numbers
  var left: array<u32, PIXELS>;
  for (var p = 0u; p < PIXELS; p++) { // @unroll
    let column = min(first + p * WORKGROUP, params.columns - 1u);
    let within = column % params.image_columns;
    top[p] = within / params.out_w * (ROWS * STRIDE_H) - params.pad_top;
    left[p] = within % params.out_w * params.stride_w - params.pad_left;
    origin[p] = column / params.image_columns * params.x_n + group * params.c_group * params.x_c
      + top[p] * params.x_h + left[p] * params.x_w;
  }

  var acc: array<f32, PIXELS * ROWS * FILTERS>;
  for (var i = 0u; i < PIXELS * ROWS * FILTERS; i++) { // @unroll
    acc[i] = 0.0;
  }

  // Each row is loaded while the row before is computed.
  var next: array<Scalar, PIXELS * TAPS_W>;
  for (var s = 0u; s < TAPS_W; s++) { // @unroll if UNROLL_TAPS
    for (var p = 0u; p < PIXELS; p++) { // @unroll
      next[s * PIXELS + p] = x[origin[p] + s * params.dilation_w * params.x_w];
    }
  }

  let taps = TAPS_H * TAPS_W;
  let k0 = block * FILTERS;  // within the group
  for (var c0 = 0u; c0 < params.c_group; c0 += params.stage_channels) {
    let channels = min(params.stage_channels, params.c_group - c0);
    workgroupBarrier();  // all have read the weights of the channels before
    for (var i = lane; i < channels * taps * QUADS; i += WORKGROUP) {
      // Neighbouring invocations read neighbouring taps of one filter.
      let tap = i % (channels * taps);
      let quad = i / (channels * taps);
      var four: vec4<f32>;
      for (var f = 0u; f < 4u; f++) { // @unroll
        let k = group * params.k_group + min(k0 + quad * 4u + f, params.k_group - 1u);
        four[f] = f32(weight[(k * params.c_group + c0) * taps + tap]);
      }
      weights[tap * QUADS + quad] = four;
    }
    workgroupBarrier();  // the weights are complete before any invocation reads them

    for (var c = 0u; c < channels; c++) {
      for (var i = 0u; i < ROWS_IN; i++) { // @unroll if UNROLL_ROWS
        var row: array<f32, PIXELS * TAPS_W>;
        for (var s = 0u; s < TAPS_W; s++) { // @unroll if UNROLL_TAPS
          for (var p = 0u; p < PIXELS; p++) { // @unroll
            row[s * PIXELS + p] = f32(next[s * PIXELS + p]);
            if (BORDER) {
              let counts = top[p] + i * params.dilation_h < params.h
                && left[p] + s * params.dilation_w < params.w;
              row[s * PIXELS + p] = select(0.0, row[s * PIXELS + p], counts);
            }
          }
        }
        // The next row of this channel, or the first of the next; after the last, anything.
        var next_at = (c0 + c) * params.x_c + (i + 1u) * params.dilation_h * params.x_h;
        if (i + 1u == ROWS_IN) {
          next_at = (c0 + c + 1u) * params.x_c;
        }
        for (var s = 0u; s < TAPS_W; s++) { // @unroll if UNROLL_TAPS
          for (var p = 0u; p < PIXELS; p++) { // @unroll
            next[s * PIXELS + p] = x[origin[p] + next_at + s * params.dilation_w * params.x_w];
          }
        }
        for (var h = 0u; h < ROWS; h++) { // @unroll
          let r = u32(i32(i) - i32(h * STRIDE_H));  // before this output's window a huge number
          if (r < TAPS_H) {
            let weight_row = (c * TAPS_H + r) * TAPS_W * QUADS;
            for (var s = 0u; s < TAPS_W; s++) { // @unroll if UNROLL_TAPS
              for (var q = 0u; q < QUADS; q++) { // @unroll
                let four = weights[weight_row + s * QUADS + q];
                for (var p = 0u; p < PIXELS; p++) { // @unroll
                  for (var f = 0u; f < 4u; f++) { // @unroll
                    acc[(p * ROWS + h) * FILTERS + q * 4u + f] =
                      fma(row[s * PIXELS + p], four[f], acc[(p * ROWS + h) * FILTERS + q * 4u + f]);
                  }
                }
              }
            }
          }
        }
      }
    }
  }

  // Loaded at once, as a residual is below: one after the other, each in its branch, would take
  // longer than to store.
  var bias_k: array<f32, FILTERS>;
  for (var f = 0u; f < FILTERS; f++) { // @unroll
    bias_k[f] = f32(bias[group * params.k_group + min(k0 + f, params.k_group - 1u)]);
  }
  for (var p = 0u; p < PIXELS; p++) { // @unroll
    let column = first + p * WORKGROUP;
    let within = column % params.image_columns;
    let oh = within / params.out_w * ROWS;
    let y_column = column / params.image_columns * params.y_n + oh * params.y_h
      + within % params.out_w * params.y_w;
    for (var h = 0u; h < ROWS; h++) { // @unroll
      if (column < params.columns && oh + h < params.out_h) {
        let y_pixel = y_column + h * params.y_h + group * params.k_group * params.y_k;
        var v: array<f32, FILTERS>;
        for (var f = 0u; f < FILTERS; f++) { // @unroll
          let k = min(k0 + f, params.k_group - 1u);
          let sum = acc[(p * ROWS + h) * FILTERS + f] + bias_k[f];
          v[f] = add_residual(sum, y_pixel + k * params.y_k);
        }
        for (var f = 0u; f < FILTERS; f++) { // @unroll
          if (k0 + f < params.k_group) {
            y[y_pixel + (k0 + f) * params.y_k] = Scalar(activate(v[f]));
          }
        }
      }
    }
  }
}
