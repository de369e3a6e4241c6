// direct_tiled.wgsl for rows of an even number of pixels, in and out: each invocation computes two
// neighbouring columns, and reads and writes pairs of pixels.
//
// Each computes ROWS outputs down by two across of FILTERS filters; all of a workgroup share the
// weights, which lie in workgroup memory. Offsets and strides of x and y, along w too, count pairs.

alias Scalar = f32;
const FILTERS: u32 = 16u;  // a multiple of 4
const ROWS: u32 = 2u;
const WORKGROUP: u32 = 64u;
const TAPS_H: u32 = 3u;
const TAPS_W: u32 = 3u;
const STRIDE_H: u32 = 1u;
const STRIDE_W: u32 = 1u;
const SHIFT: u32 = 0u;  // 1 where the padding at the left is odd: windows begin within a pair
const UNROLL_ROWS: bool = true;  // write out the rows of a channel
const UNROLL_TAPS: bool = true;  // write out the taps of a row
const STAGED: u32 = 1024u;  // weight quads in workgroup memory: whole channels of them
const BORDER: bool = true;  // false where no tap lies outside the image

const QUADS = FILTERS / 4u;
const SEGMENT = (SHIFT + STRIDE_W + TAPS_W + 1u) / 2u;  // pairs of a row that the windows cross
const ROWS_IN = (ROWS - 1u) * STRIDE_H + TAPS_H;  // of the input, for all of an invocation's

struct Params {
  columns: u32,  // pairs of columns of ROWS outputs each, over all images
  image_columns: u32,
  out_h: u32,
  out_vectors: u32,  // of a row
  h: u32,
  w_vectors: u32,
  c_group: u32,
  k_group: u32,
  groups: u32,
  stage_channels: u32,  // channels whose weights are staged at a time
  pad_top: u32,
  pad_vectors: u32,  // at the left, rounded up
  x_n: u32,  // strides of the input
  x_c: u32,
  x_h: u32,
  y_n: u32,  // strides of the output
  y_k: u32,
  y_h: u32,
  act_a: f32,
  act_b: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec2<Scalar>>;
@group(0) @binding(2) var<storage, read> weight: array<Scalar>;
@group(0) @binding(3) var<storage, read> bias: array<Scalar>;
@group(0) @binding(4) var<storage, read_write> y: array<vec2<Scalar>>;

// By channel and tap: the weights of the FILTERS filters.
var<workgroup> weights: array<vec4<f32>, STAGED>;

fn activate(v: f32) -> f32 { return v; }
fn add_residual(v: vec2<f32>, at: u32) -> vec2<f32> { return v; }

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) lane: u32,
) {
  let index = workgroup.x + workgroup.y * workgroups.x;
  let patches = (params.columns + WORKGROUP - 1u) / WORKGROUP;
  let blocks = (params.k_group + FILTERS - 1u) / FILTERS;
  let block = index % blocks;
  let column = index / blocks % patches * WORKGROUP + lane;
  let group = index / blocks / patches;
  if (group >= params.groups) {
    return;
  }

  // Where the windows begin. Columns past the end compute the last one again.
  let used = min(column, params.columns - 1u);
  let within = used % params.image_columns;
  let image = used / params.image_columns;
  let oh = within / params.out_vectors * ROWS;
  let out_pair = within % params.out_vectors;
  let top = oh * STRIDE_H - params.pad_top;  // before the image these wrap to huge numbers
  let left = out_pair * STRIDE_W - params.pad_vectors;
  let origin = image * params.x_n + group * params.c_group * params.x_c + top * params.x_h + left;

  var acc: array<f32, ROWS * 2u * FILTERS>;
  for (var i = 0u; i < ROWS * 2u * FILTERS; i++) { // @unroll
    acc[i] = 0.0;
  }

  // Each row is loaded while the row before is computed.
  var next: array<vec2<Scalar>, SEGMENT>;
  for (var i = 0u; i < SEGMENT; i++) { // @unroll
    next[i] = x[origin + i];
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
        var row: array<vec2<f32>, SEGMENT>;
        for (var j = 0u; j < SEGMENT; j++) { // @unroll
          row[j] = vec2<f32>(next[j]);
          if (BORDER) {
            let counts = top + i < params.h && left + j < params.w_vectors;
            row[j] = select(vec2<f32>(0.0), row[j], counts);
          }
        }
        // The next row of this channel, or the first of the next; after the last, anything.
        var next_at = (c0 + c) * params.x_c + (i + 1u) * params.x_h;
        if (i + 1u == ROWS_IN) {
          next_at = (c0 + c + 1u) * params.x_c;
        }
        for (var j = 0u; j < SEGMENT; j++) { // @unroll
          next[j] = x[origin + next_at + j];
        }
        for (var h = 0u; h < ROWS; h++) { // @unroll
          let r = u32(i32(i) - i32(h * STRIDE_H));  // before this output's window a huge number
          if (r < TAPS_H) {
            let weight_row = (c * TAPS_H + r) * TAPS_W * QUADS;
            for (var s = 0u; s < TAPS_W; s++) { // @unroll if UNROLL_TAPS
              for (var q = 0u; q < QUADS; q++) { // @unroll
                let four = weights[weight_row + s * QUADS + q];
                for (var p = 0u; p < 2u; p++) { // @unroll
                  let v = row[(SHIFT + p * STRIDE_W + s) / 2u][(SHIFT + p * STRIDE_W + s) % 2u];
                  for (var f = 0u; f < 4u; f++) { // @unroll
                    acc[(h * 2u + p) * FILTERS + q * 4u + f] =
                      fma(v, four[f], acc[(h * 2u + p) * FILTERS + q * 4u + f]);
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
  if (column < params.columns) {
    let y_column = image * params.y_n + oh * params.y_h + out_pair;
    for (var h = 0u; h < ROWS; h++) { // @unroll
      if (oh + h < params.out_h) {
        let y_row = y_column + h * params.y_h + group * params.k_group * params.y_k;
        var two: array<vec2<f32>, FILTERS>;
        for (var f = 0u; f < FILTERS; f++) { // @unroll
          let k = min(k0 + f, params.k_group - 1u);
          two[f] = vec2<f32>(acc[h * 2u * FILTERS + f], acc[(h * 2u + 1u) * FILTERS + f]);
          two[f] = add_residual(two[f] + bias_k[f], y_row + k * params.y_k);
        }
        for (var f = 0u; f < FILTERS; f++) { // @unroll
          if (k0 + f < params.k_group) {
            let v = vec2<f32>(activate(two[f].x), activate(two[f].y));
            y[y_row + (k0 + f) * params.y_k] = vec2<Scalar>(v);
          }
        }
      }
    }
  }
}
