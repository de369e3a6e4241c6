// Packs the weight into the order in which the tensor-core kernels read it: tiles of TILE_M
// filters, in them the steps over k, in each step the filters, and of each TILE_K products side
// by side. Filters and products past the end become zeros, so that those kernels need no edge on
// this side. With CORES, the filters of each 8 products lie side by side instead (4 of floats).
// With WHOLE, what TF32 does not hold of a step's floats follows them. Which weight stands at k is
// the host's choice: `offsets` has its place in a filter, or -1.
//
// A block packs FILTERS filters by WINDOW products, through shared memory: it reads along k, where
// neighbouring threads need neighbouring weights or almost so, and writes 16 bytes a thread.

#include "ptx.cuh"

using Scalar = Half;
constexpr int TILE_M = 128;
constexpr int TILE_K = 32;
constexpr bool CORES = false;  // eight filters of one chunk lie side by side (for wgmma)
constexpr bool WHOLE = false;
constexpr int THREADS = 256;

struct Params {
  int m;  // filters of a group
  int m_tiles;
  int k_steps;
  int windows;
  int w_g;  // strides of the weight over groups and filters
  int w_m;
};

constexpr int FILTERS = 8;
constexpr int WINDOW = 512;  // products
constexpr int CHUNK = 16 / sizeof(Scalar);
constexpr int STEP = TILE_M * TILE_K;
static_assert(THREADS == 32 * FILTERS, "a warp reads one filter");
static_assert(TILE_M % FILTERS == 0 && TILE_K % CHUNK == 0, "whole chunks of one tile");

extern "C" __global__ void __launch_bounds__(THREADS)
    pack_filters(Params params, const Scalar* __restrict__ weight, const int* __restrict__ offsets,
                 Scalar* __restrict__ packed) {
  let_next_start();
  wait_for_previous();
  // Rows begin on other banks.
  __shared__ __align__(16) Scalar staged[FILTERS][WINDOW + CHUNK];
  const int k0 = blockIdx.x % params.windows * WINDOW;
  const int m0 = blockIdx.x / params.windows * FILTERS;  // over all groups, whole tiles of each
  const int group = m0 / (params.m_tiles * TILE_M);
  const int products = min(params.k_steps * TILE_K - k0, WINDOW);
  {
    const int row = threadIdx.x / 32;
    const int m = m0 % (params.m_tiles * TILE_M) + row;
    const Scalar* filter = weight + group * params.w_g + m * params.w_m;
    // All loads are on their way at once.
    constexpr int LOADS = WINDOW / 32;
    int offset[LOADS];
    Scalar v[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const int k = i * 32 + threadIdx.x % 32;
      offset[i] = m < params.m && k < products ? offsets[k0 + k] : -1;
    }
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      v[i] = offset[i] >= 0 ? filter[offset[i]] : from_float<Scalar>(0.0f);
    }
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      staged[row][i * 32 + threadIdx.x % 32] = WHOLE ? v[i] : as_operand(v[i]);
    }
  }
  __syncthreads();
  const int tile = m0 / TILE_M;
  for (int i = threadIdx.x; i < products / CHUNK * FILTERS; i += THREADS) {
    const int row = CORES ? i % FILTERS : i / (products / CHUNK);
    const int k = (CORES ? i / FILTERS : i % (products / CHUNK)) * CHUNK;
    const int m = m0 % TILE_M + row;
    const long long step = static_cast<long long>(tile) * params.k_steps + (k0 + k) / TILE_K;
    const int in_step = (k0 + k) % TILE_K;
    const int place = CORES ? in_step * TILE_M + m * CHUNK : m * TILE_K + in_step;
    Scalar* to = packed + step * (STEP * (WHOLE ? 2 : 1)) + place;
    if constexpr (WHOLE) {
      alignas(16) Scalar held[CHUNK];
      alignas(16) Scalar rest[CHUNK];
#pragma unroll
      for (int c = 0; c < CHUNK; c++) {
        held[c] = as_operand(staged[row][k + c]);
        rest[c] = as_operand(from_float<Scalar>(to_float(staged[row][k + c]) - to_float(held[c])));
      }
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(held);
      *reinterpret_cast<uint4*>(to + STEP) = *reinterpret_cast<const uint4*>(rest);
    } else {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&staged[row][k]);
    }
  }
}
