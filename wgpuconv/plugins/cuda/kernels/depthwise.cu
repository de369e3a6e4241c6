// Depthwise convolution: every group has one input channel, so there is nothing to sum over
// channels and the kernel is bound by memory. Each thread computes ROWS output pixels of one
// column of one filter, with that filter's taps in registers. It walks down the input rows, and
// each element that it loads goes to all of its output pixels that a tap connects it to.

#include "ptx.cuh"
#include "activations.cuh"

using Scalar = float;
constexpr int R = 3;
constexpr int S = 3;
constexpr int STRIDE_H = 1;
constexpr int DILATION_H = 1;
constexpr int ROWS = 4;
constexpr int THREADS = 128;
constexpr bool CHANNELS_LAST = false;  // neighbouring threads take neighbouring filters
constexpr Activation ACTIVATION = Activation::identity;
constexpr bool RESIDUAL = false;  // else `residual` is not read

struct Params {
  int n;
  int h;
  int w;
  int out_h;
  int out_w;
  int k;
  int k_group;  // filters of one input channel (the channel multiplier)
  int stride_w;
  int pad_top;
  int pad_left;
  int dilation_w;
  int x_n;  // strides of the input, in elements
  int x_c;
  int x_h;
  int x_w;
  int y_n;  // strides of the output
  int y_k;
  int y_h;
  int y_w;
  float act_a;
  float act_b;
};

// Input rows from the first that any of the ROWS pixels needs to the last.
constexpr int IN_ROWS = (ROWS - 1) * STRIDE_H + (R - 1) * DILATION_H + 1;

// The tap of output row `row` under which input row `in` lies, or -1.
__device__ constexpr int tap_of(int in, int row) {
  const int below = in - row * STRIDE_H;
  return below >= 0 && below % DILATION_H == 0 && below / DILATION_H < R ? below / DILATION_H : -1;
}

// Whether any output row needs input row `in`: gaps arise from strides and dilations.
__device__ constexpr bool is_needed(int in) {
  for (int row = 0; row < ROWS; row++) {
    if (tap_of(in, row) >= 0) {
      return true;
    }
  }
  return false;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    depthwise(Params params, const Scalar* __restrict__ x, const Scalar* __restrict__ weight,
              const Scalar* __restrict__ bias, const Scalar* __restrict__ residual,
              Scalar* __restrict__ y) {
  wait_for_previous();
  const unsigned index = blockIdx.x * THREADS + threadIdx.x;
  const unsigned strips = (params.out_h + ROWS - 1) / ROWS * params.out_w;
  const unsigned filters = params.k;
  const unsigned strip = CHANNELS_LAST ? index / filters % strips : index % strips;
  const int k = CHANNELS_LAST ? index % filters : index / strips % filters;
  const int image = index / strips / filters;
  if (image >= params.n) {
    return;
  }
  const int oh0 = strip / params.out_w * ROWS;
  const int ow = strip % params.out_w;

  float taps[R * S];
#pragma unroll
  for (int t = 0; t < R * S; t++) {
    taps[t] = to_float(weight[k * R * S + t]);
  }
  const float b = to_float(bias[k]);
  float acc[ROWS] = {};
  const Scalar* plane = x + image * params.x_n + k / params.k_group * params.x_c;
  const int ih0 = oh0 * STRIDE_H - params.pad_top;
  const int iw0 = ow * params.stride_w - params.pad_left;
#pragma unroll
  for (int in = 0; in < IN_ROWS; in++) {
    const int ih = ih0 + in;
    if (!is_needed(in) || static_cast<unsigned>(ih) >= static_cast<unsigned>(params.h)) {
      continue;
    }
#pragma unroll
    for (int s = 0; s < S; s++) {
      const int iw = iw0 + s * params.dilation_w;
      const bool inside = static_cast<unsigned>(iw) < static_cast<unsigned>(params.w);
      const float v = inside ? to_float(plane[ih * params.x_h + iw * params.x_w]) : 0.0f;
#pragma unroll
      for (int row = 0; row < ROWS; row++) {
        const int r = tap_of(in, row);
        if (r >= 0) {
          acc[row] = fmaf(v, taps[r * S + s], acc[row]);
        }
      }
    }
  }

  const int y_column = image * params.y_n + k * params.y_k + ow * params.y_w;
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    if (oh0 + row < params.out_h) {
      const int at = y_column + (oh0 + row) * params.y_h;
      float sum = acc[row] + b;
      if (RESIDUAL) {
        sum += to_float(residual[at]);
      }
      y[at] = from_float<Scalar>(activate<ACTIVATION>(sum, params.act_a, params.act_b));
    }
  }
}
