// Packs the weight into the order in which the tensor-core kernels read it: tiles of TILE_M
// filters, in them the steps over k, in each step the filters, and of each TILE_K products side
// by side. Filters and products past the end become zeros, so that those kernels need no edge on
// this side. With CORES, the filters of each 8 products lie side by side instead. Which weight stands at k is the host's choice: `offsets` has its place in a filter,
// or -1.
//
// A block packs one filter: the weights that its threads gather lie in a few kilobytes, which the
// first-level cache holds.

#include "ptx.cuh"

using Scalar = Half;
constexpr int TILE_M = 128;
constexpr int TILE_K = 32;
constexpr bool CORES = false;  // eight filters of eight products lie side by side (for wgmma)
constexpr int THREADS = 128;

struct Params {
  int m;  // filters of a group
  int m_tiles;
  int k_steps;
  int w_g;  // strides of the weight over groups and filters
  int w_m;
};

constexpr int VECTOR = 16 / sizeof(Scalar);

extern "C" __global__ void __launch_bounds__(THREADS)
    pack_filters(Params params, const Scalar* __restrict__ weight, const int* __restrict__ offsets,
                 Scalar* __restrict__ packed) {
  const int m = blockIdx.x % (params.m_tiles * TILE_M);
  const int group = blockIdx.x / (params.m_tiles * TILE_M);
  const Scalar* filter = weight + group * params.w_g + m * params.w_m;
  const int tile = group * params.m_tiles + m / TILE_M;
  for (int k = threadIdx.x * VECTOR; k < params.k_steps * TILE_K; k += THREADS * VECTOR) {
    union {
      Scalar scalars[VECTOR];
      uint4 all;
    } v;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
      const int offset = offsets[k + i];
      v.scalars[i] = as_operand(m < params.m && offset >= 0 ? filter[offset]
                                                            : from_float<Scalar>(0.0f));
    }
    const long long step = static_cast<long long>(tile) * params.k_steps + k / TILE_K;
    const int place = CORES ? k % TILE_K * TILE_M + m % TILE_M * VECTOR
                            : m % TILE_M * TILE_K + k % TILE_K;
    *reinterpret_cast<uint4*>(packed + step * (TILE_M * TILE_K) + place) = v.all;
  }
}
