// depthwise.wgsl for rows of whole pairs or fours of pixels, in and out: each invocation computes
// as many neighbouring columns, and reads and writes them as one vector.
//
// Each computes ROWS outputs down by COLUMNS across of one filter, whose taps it holds in registers.
// Offsets and strides of x and y, along w too, count vectors.

alias Scalar = f32;
alias Vector = vec2f;  // COLUMNS pixels as they are stored
alias Sums = vec2f;
const R: u32 = 3u;
const S: u32 = 3u;
const ROWS: u32 = 4u;
const COLUMNS: u32 = 2u;
const STRIDE_H: u32 = 1u;
const WORKGROUP: u32 = 64u;
const STRIDE_W: u32 = 1u;
const SHIFT: u32 = 1u;  // pixels of a vector before the first window of an invocation

const SPAN = SHIFT + (COLUMNS - 1u) * STRIDE_W + S;  // pixels of a row up to the last window's end
const SEGMENT = (SPAN + COLUMNS - 1u) / COLUMNS;  // vectors of a row that the windows cross
const ROWS_IN = (ROWS - 1u) * STRIDE_H + R;  // of the input, for all of an invocation's

struct Params {
  n: u32,
  h: u32,
  w_vectors: u32,
  out_h: u32,
  out_vectors: u32,  // of a row
  k: u32,
  k_group: u32,  // filters of one input channel (the channel multiplier)
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
@group(0) @binding(1) var<storage, read> x: array<Vector>;
@group(0) @binding(2) var<storage, read> weight: array<Scalar>;
@group(0) @binding(3) var<storage, read> bias: array<Scalar>;
@group(0) @binding(4) var<storage, read_write> y: array<Vector>;

fn activate(v: f32) -> f32 { return v; }
fn add_residual(v: Sums, at: u32) -> Sums { return v; }

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) lane: u32,
) {
  let index = (workgroup.x + workgroup.y * workgroups.x) * WORKGROUP + lane;
  let strips = (params.out_h + ROWS - 1u) / ROWS * params.out_vectors;
  let strip = index % strips;
  let k = (index / strips) % params.k;
  let image = index / strips / params.k;
  if (image >= params.n) {
    return;
  }
  let oh = strip / params.out_vectors * ROWS;
  let out_vector = strip % params.out_vectors;

  var taps: array<f32, R * S>;
  for (var t = 0u; t < R * S; t++) { // @unroll
    taps[t] = f32(weight[k * R * S + t]);
  }
  let bias_k = f32(bias[k]);
  let plane = image * params.x_n + k / params.k_group * params.x_c;
  // Above and left of the image these wrap to huge numbers: one comparison checks both sides.
  let top = oh * STRIDE_H - params.pad_top;
  let left = out_vector * STRIDE_W - params.pad_vectors;

  // Each row of the input serves all outputs whose windows it crosses. No load waits for a branch.
  var acc: array<Sums, ROWS>;
  for (var h = 0u; h < ROWS; h++) { // @unroll
    acc[h] = Sums(bias_k);
  }
  for (var i = 0u; i < ROWS_IN; i++) { // @unroll
    let row = plane + min(top + i, params.h - 1u) * params.x_h;
    var segment: array<Sums, SEGMENT>;
    for (var j = 0u; j < SEGMENT; j++) { // @unroll
      let value = Sums(x[row + min(left + j, params.w_vectors - 1u)]);
      let counts = top + i < params.h && left + j < params.w_vectors;
      segment[j] = select(Sums(0.0), value, counts);
    }
    for (var h = 0u; h < ROWS; h++) { // @unroll
      let r = u32(i32(i) - i32(h * STRIDE_H));  // before this output's window a huge number
      if (r < R) {
        for (var s = 0u; s < S; s++) { // @unroll
          let tap = taps[min(r, R - 1u) * S + s];
          for (var p = 0u; p < COLUMNS; p++) { // @unroll
            let v =
              segment[(SHIFT + p * STRIDE_W + s) / COLUMNS][(SHIFT + p * STRIDE_W + s) % COLUMNS];
            acc[h][p] = fma(v, tap, acc[h][p]);
          }
        }
      }
    }
  }

  let y_column = image * params.y_n + k * params.y_k + oh * params.y_h + out_vector;
  for (var h = 0u; h < ROWS; h++) { // @unroll
    if (oh + h < params.out_h) {
      let y_at = y_column + h * params.y_h;
      var v = add_residual(acc[h], y_at);
      for (var p = 0u; p < COLUMNS; p++) { // @unroll
        v[p] = activate(v[p]);
      }
      y[y_at] = Vector(v);
    }
  }
}
