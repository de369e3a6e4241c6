// Brings an input of any strides into the order (image, pixel, group, channel), with as many zero
// channels behind each group's own as make it a multiple of CHANNELS: what the tensor-core
// kernels load in wide copies.
//
// A thread moves CHANNELS of one pixel, a warp those of 32 neighbouring pixels, and neighbouring warps
// the same pixels' other channels, so that whole lines of memory are written at about one time.

#include "ptx.cuh"

using Scalar = Half;
constexpr int CHANNELS = 8;
constexpr int THREADS = 128;

struct Params {
  int pixels;  // of one image
  int w;
  int c_group;
  int chunks_group;  // of CHANNELS
  int groups;
  int n;
  int x_n;
  int x_c;
  int x_h;
  int x_w;
};

constexpr int BYTES = CHANNELS * sizeof(Scalar);
static_assert(BYTES == 8 || BYTES % 16 == 0, "a thread stores 8 bytes or several times 16");

extern "C" __global__ void __launch_bounds__(THREADS)
    to_channels_last(Params params, const Scalar* __restrict__ x, Scalar* __restrict__ y) {
  const unsigned warp = (blockIdx.x * THREADS + threadIdx.x) / 32;
  const unsigned chunks = params.groups * params.chunks_group;
  const unsigned runs = (params.pixels + 31) / 32;
  const int chunk = warp % chunks;
  const int pixel = warp / chunks % runs * 32 + threadIdx.x % 32;
  const int image = warp / chunks / runs;
  if (image >= params.n || pixel >= params.pixels) {
    return;
  }
  const int group = chunk / params.chunks_group;
  const int c0 = chunk % params.chunks_group * CHANNELS;
  const Scalar* from = x + image * params.x_n + pixel / params.w * params.x_h +
                       pixel % params.w * params.x_w + group * params.c_group * params.x_c;
  union {
    Scalar scalars[CHANNELS];
    uint2 half;
    uint4 all[BYTES / 16 + 1];
  } v;
#pragma unroll
  for (int i = 0; i < CHANNELS; i++) {
    const int c = c0 + i;
    v.scalars[i] = c < params.c_group ? from[c * params.x_c] : from_float<Scalar>(0.0f);
  }
  const long long place = (static_cast<long long>(image) * params.pixels + pixel) * chunks + chunk;
  if constexpr (BYTES == 8) {
    *reinterpret_cast<uint2*>(y + place * CHANNELS) = v.half;
  } else {
#pragma unroll
    for (int i = 0; i < BYTES / 16; i++) {
      reinterpret_cast<uint4*>(y + place * CHANNELS)[i] = v.all[i];
    }
  }
}
