// Brings an input of either layout into the order (image, pixel, group, channel), with as many zero
// channels behind each group's own as make it a multiple of CHANNELS: what the tensor-core
// kernels load in wide copies.
//
// A block moves PIXELS pixels of all images by CHUNKS chunks of CHANNELS, through shared memory: it
// reads along the pixels, a warp 32 times VECTOR of them, and writes along the channels.

#include "ptx.cuh"

using Scalar = Half;
constexpr int CHANNELS = 8;
constexpr int CHUNKS = 8;
constexpr int PIXELS = 64;
constexpr int VECTOR = 2;  // pixels of one load: side by side, and aligned
constexpr int THREADS = 256;

struct Params {
  int all_pixels;
  int pixels;  // of one image
  int c_group;
  int chunks_group;
  int chunks;  // of all groups
  int tiles;   // of chunks
  int x_n;     // strides of the input over images, channels, pixels
  int x_c;
  int x_p;
};

template <int BYTES>
struct Words;
template <>
struct Words<8> {
  uint2 all;
};
template <>
struct Words<16> {
  uint4 all;
};
using Chunk = Words<CHANNELS * static_cast<int>(sizeof(Scalar))>;

template <int COUNT>
struct alignas(COUNT * sizeof(Scalar)) Run {
  Scalar each[COUNT];
};

constexpr int RUN = 32 * VECTOR;  // pixels of a warp
static_assert(PIXELS % RUN == 0 && THREADS % 32 == 0, "whole warps");
static_assert(PIXELS * CHUNKS % THREADS == 0, "all threads store as much");

extern "C" __global__ void __launch_bounds__(THREADS)
    to_channels_last(Params params, const Scalar* __restrict__ x, Scalar* __restrict__ y) {
  let_next_start();
  wait_for_previous();
  // Neighbouring chunks begin on other banks. Of a run, the first pixels of all loads come first,
  // so that a warp stores to neighbouring places.
  __shared__ Chunk staged[CHUNKS][PIXELS + 1];
  const int first_chunk = static_cast<int>(blockIdx.x) % params.tiles * CHUNKS;
  const int first_pixel = static_cast<int>(blockIdx.x) / params.tiles * PIXELS;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int job = 0; job < CHUNKS * PIXELS / RUN * 32; job += THREADS) {
    const int warp = (job + static_cast<int>(threadIdx.x)) / 32;
    const int chunk = warp % CHUNKS;
    const int run = warp / CHUNKS * RUN;
    const int pixel = first_pixel + run + lane * VECTOR;
    const int at = first_chunk + chunk;
    if (run >= PIXELS || at >= params.chunks || pixel >= params.all_pixels) {
      continue;
    }
    const int group = at / params.chunks_group;
    const int c0 = at % params.chunks_group * CHANNELS;
    const Scalar* from = x + pixel / params.pixels * params.x_n +
                         pixel % params.pixels * params.x_p +
                         (group * params.c_group + c0) * params.x_c;
    union {
      Scalar scalars[CHANNELS];
      Chunk chunk;
    } v[VECTOR];
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
      Run<VECTOR> loaded = {};
      if (c0 + i < params.c_group) {
        loaded = *reinterpret_cast<const Run<VECTOR>*>(from + i * params.x_c);
      }
#pragma unroll
      for (int p = 0; p < VECTOR; p++) {
        v[p].scalars[i] = loaded.each[p];
      }
    }
#pragma unroll
    for (int p = 0; p < VECTOR; p++) {
      staged[chunk][run + p * 32 + lane] = v[p].chunk;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < PIXELS * CHUNKS; i += THREADS) {
    const int chunk = i % CHUNKS;
    const int p = i / CHUNKS;
    if (first_chunk + chunk < params.chunks && first_pixel + p < params.all_pixels) {
      const long long place =
          static_cast<long long>(first_pixel + p) * params.chunks + first_chunk + chunk;
      reinterpret_cast<Chunk*>(y)[place] =
          staged[chunk][p / RUN * RUN + p % VECTOR * 32 + p % RUN / VECTOR];
    }
  }
}
