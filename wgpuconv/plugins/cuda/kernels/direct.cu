// Direct convolution and transposed convolution: each thread computes one output pixel of FILTERS
// filters of a group. The plainest algorithm, and the one that fits every problem.
//
// Neighbouring threads take neighbouring pixels (or filters, where those lie side by side), so
// that their loads and stores fall together.

#include "ptx.cuh"
#include "activations.cuh"

using Scalar = float;
constexpr int FILTERS = 4;
constexpr int THREADS = 128;
constexpr bool CHANNELS_LAST = false;
constexpr bool TRANSPOSED = false;
constexpr bool WEIGHT_LAST = false;
constexpr Activation ACTIVATION = Activation::identity;
constexpr bool RESIDUAL = false;  // else `residual` is not read

struct Params {
  int n;
  int h;
  int w;
  int out_h;
  int out_w;
  int c_group;
  int k_group;
  int groups;
  int r;
  int s;
  int stride_h;
  int stride_w;
  int pad_top;
  int pad_left;
  int dilation_h;
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

// The input coordinate under a tap of an output coordinate, or -1.
__device__ int under(int out, int tap, int stride, int pad, int dilation, int size) {
  int at;
  if (TRANSPOSED) {
    const int shifted = out + pad - tap * dilation;
    at = shifted % stride == 0 ? shifted / stride : -1;
  } else {
    at = out * stride + tap * dilation - pad;
  }
  return at < size ? at : -1;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    direct(Params params, const Scalar* __restrict__ x, const Scalar* __restrict__ weight,
           const Scalar* __restrict__ bias, const Scalar* __restrict__ residual,
           Scalar* __restrict__ y) {
  wait_for_previous();
  const unsigned index = blockIdx.x * THREADS + threadIdx.x;
  const unsigned pixels = params.out_h * params.out_w;
  const unsigned blocks_group = (params.k_group + FILTERS - 1) / FILTERS;
  const unsigned blocks = blocks_group * params.groups;
  const unsigned pixel = CHANNELS_LAST ? index / blocks % pixels : index % pixels;
  const unsigned block = CHANNELS_LAST ? index % blocks : index / pixels % blocks;
  const int image = index / pixels / blocks;
  if (image >= params.n) {
    return;
  }
  const int oh = pixel / params.out_w;
  const int ow = pixel % params.out_w;
  const int group = block / blocks_group;
  const int k0 = block % blocks_group * FILTERS;  // within the group

  // The weight is (K, C/groups, R, S), or (C, K/groups, R, S) where transposed; its second axis may
  // lie last.
  const int taps = params.r * params.s;
  const int second = TRANSPOSED ? params.k_group : params.c_group;
  const int w_first = second * taps;
  const int w_second = WEIGHT_LAST ? 1 : taps;
  const int w_tap = WEIGHT_LAST ? second : 1;
  const int w_c = TRANSPOSED ? w_first : w_second;
  const int w_k = TRANSPOSED ? w_second : w_first;
  const Scalar* w_group = weight + group * params.c_group * params.k_group * taps;
  const Scalar* x_group = x + image * params.x_n + group * params.c_group * params.x_c;
  int row[FILTERS];  // where each filter's weights begin
  float acc[FILTERS];
#pragma unroll
  for (int f = 0; f < FILTERS; f++) {
    row[f] = min(k0 + f, params.k_group - 1) * w_k;
    acc[f] = 0.0f;
  }
  for (int r = 0; r < params.r; r++) {
    const int ih = under(oh, r, params.stride_h, params.pad_top, params.dilation_h, params.h);
    if (ih < 0) {
      continue;
    }
    for (int s = 0; s < params.s; s++) {
      const int iw = under(ow, s, params.stride_w, params.pad_left, params.dilation_w, params.w);
      if (iw < 0) {
        continue;
      }
      const Scalar* from = x_group + ih * params.x_h + iw * params.x_w;
      const Scalar* tap = w_group + (r * params.s + s) * w_tap;
      for (int c = 0; c < params.c_group; c++) {
        const float v = to_float(from[c * params.x_c]);
#pragma unroll
        for (int f = 0; f < FILTERS; f++) {
          acc[f] = fmaf(v, to_float(tap[c * w_c + row[f]]), acc[f]);
        }
      }
    }
  }

  const int y_pixel = image * params.y_n + oh * params.y_h + ow * params.y_w;
#pragma unroll
  for (int f = 0; f < FILTERS; f++) {
    if (k0 + f < params.k_group) {
      const int k = group * params.k_group + k0 + f;
      const int at = y_pixel + k * params.y_k;
      float sum = acc[f] + to_float(bias[k]);
      if (RESIDUAL) {
        sum += to_float(residual[at]);
      }
      y[at] = from_float<Scalar>(activate<ACTIVATION>(sum, params.act_a, params.act_b));
    }
  }
}
