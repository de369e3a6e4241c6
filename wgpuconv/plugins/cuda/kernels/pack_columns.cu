// Packs the weight into the order in which implicit_gemm reads it: tiles of TILE_M filters, in
// them for each k the TILE_M filters side by side. Filters and products past the end become zeros,
// so that the kernel needs no edge on this side. Which weight goes to which k is the host's choice,
// through `taps`: the last components are k and the weight's place in a filter, in the order of
// these places.

#include "ptx.cuh"

using Scalar = float;
constexpr int TILE_M = 128;
constexpr int THREADS = 128;

struct Params {
  int m;  // filters of a group
  int m_tiles;
  int reduction;  // products of an output element
  int k_padded;   // the same, rounded up to whole steps
  int groups;
  int w_g;  // strides of the weight over groups and filters
  int w_m;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    pack_columns(Params params, const Scalar* __restrict__ weight, const int4* __restrict__ taps,
                 Scalar* __restrict__ packed) {
  let_next_start();
  wait_for_previous();
  const long long index = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
  const int k = index / TILE_M % params.k_padded;
  const int tile = index / TILE_M / params.k_padded;
  const int group = tile / params.m_tiles;
  if (group >= params.groups) {
    return;
  }
  const int m = tile % params.m_tiles * TILE_M + index % TILE_M;
  const bool exists = k < params.reduction && m < params.m;
  const int4 tap = taps[k];
  packed[index + static_cast<long long>(tap.z - k) * TILE_M] =
      exists ? weight[group * params.w_g + m * params.w_m + tap.w] : from_float<Scalar>(0.0f);
}
