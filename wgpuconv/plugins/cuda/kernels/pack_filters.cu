// Packs the weight into the order in which the tensor-core kernels read it: tiles of TILE_M
// filters, in them the steps over k, in each step the filters, and of each TILE_K products side
// by side. Filters and products past the end become zeros, so that those kernels need no edge on
// this side. With CORES, the filters of each 8 products lie side by side instead (4 of floats).
// With WHOLE, what TF32 does not hold of a step's floats follows them. Which weight stands at k is
// the host's choice: `offsets` has its place in a filter, or -1.
//
// Phases of a transposed convolution that gather the same pixels are packed together, all tiles of
// one after those of the other; their taps lie in rows and columns after those of the first one.
//
// A block packs COLUMNS filters, each of one phase, by WINDOW products, through shared memory, and
// writes 16 bytes a thread. It reads along k, where neighbouring threads need neighbouring weights
// or almost so. With FILTERS_FIRST it reads along the filters, phases innermost: in the weight of a
// transposed convolution it is their taps that lie side by side.

#include "ptx.cuh"

using Scalar = Half;
constexpr int TILE_M = 128;
constexpr int TILE_K = 32;
constexpr bool FILTERS_FIRST = false;
constexpr int COLUMNS = 8;
constexpr int WINDOW = 512;  // products
constexpr bool CORES = false;  // eight filters of one chunk lie side by side (for wgmma)
constexpr bool WHOLE = false;
constexpr int THREADS = 256;

struct Params {
  int m;  // filters of a group
  int m_tiles;
  int groups;
  int phases;
  int phase_columns;
  int k_steps;
  int windows;
  int w_g;  // strides of the weight over groups, filters, rows and columns of taps
  int w_m;
  int w_r;
  int w_s;
};

constexpr int SHARERS = THREADS / COLUMNS;  // threads of one column
constexpr int LOADS = WINDOW / SHARERS;
constexpr int CHUNK = 16 / sizeof(Scalar);
constexpr int STEP = TILE_M * TILE_K;
static_assert(TILE_K % CHUNK == 0, "whole chunks of one step");
// What neighbouring threads read lies side by side in shared memory as well. Rows of k begin on
// different banks, and on whole chunks.
constexpr int COLUMN_PITCH = FILTERS_FIRST ? 1 : WINDOW + CHUNK;
constexpr int K_PITCH = FILTERS_FIRST ? COLUMNS : 1;

extern "C" __global__ void __launch_bounds__(THREADS)
    pack_filters(Params params, const Scalar* __restrict__ weight, const int* __restrict__ offsets,
                 Scalar* __restrict__ packed) {
  let_next_start();
  wait_for_previous();
  __shared__ __align__(16) Scalar staged[COLUMNS * (FILTERS_FIRST ? WINDOW : COLUMN_PITCH)];
  const int thread = threadIdx.x;
  const int k0 = blockIdx.x % params.windows * WINDOW;
  const int column0 = blockIdx.x / params.windows * COLUMNS;
  const int products = min(params.k_steps * TILE_K - k0, WINDOW);
  const int tiles = params.groups * params.m_tiles;  // of a phase
  {
    const int column = FILTERS_FIRST ? thread % COLUMNS : thread / SHARERS;
    const int first = FILTERS_FIRST ? thread / COLUMNS : thread % SHARERS;
    // All loads are on their way at once.
    int offset[LOADS];
    Scalar v[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const int k = first + i * SHARERS;
      offset[i] = k < products ? offsets[k0 + k] : -1;
    }
    const int phase = (column0 + column) % params.phases;
    const int row = (column0 + column) / params.phases;  // of all groups, whole tiles of each
    const int group = row / (params.m_tiles * TILE_M);
    const int m = row % (params.m_tiles * TILE_M);
    const bool valid = group < params.groups && m < params.m;
    const Scalar* filter = weight + group * params.w_g + m * params.w_m +
                           phase / params.phase_columns * params.w_r +
                           phase % params.phase_columns * params.w_s;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      v[i] = valid && offset[i] >= 0 ? filter[offset[i]] : from_float<Scalar>(0.0f);
    }
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      staged[column * COLUMN_PITCH + (first + i * SHARERS) * K_PITCH] =
          WHOLE ? v[i] : as_operand(v[i]);
    }
  }
  __syncthreads();
  constexpr bool ALONG_COLUMNS = FILTERS_FIRST || CORES;
  const int column = ALONG_COLUMNS ? thread % COLUMNS : thread / SHARERS;
  const int first = ALONG_COLUMNS ? thread / COLUMNS : thread % SHARERS;
  const int phase = (column0 + column) % params.phases;
  const int row = (column0 + column) / params.phases;
  const int m = row % TILE_M;
  // The last block may have columns past the end.
  const int end = row < tiles * TILE_M ? products : 0;
  for (int k = first * CHUNK; k < end; k += SHARERS * CHUNK) {
    const long long step =
        static_cast<long long>(phase * tiles + row / TILE_M) * params.k_steps + (k0 + k) / TILE_K;
    const int in_step = (k0 + k) % TILE_K;
    const int place = CORES ? in_step * TILE_M + m * CHUNK : m * TILE_K + in_step;
    Scalar* to = packed + step * (STEP * (WHOLE ? 2 : 1)) + place;
    const Scalar* from = staged + column * COLUMN_PITCH + k * K_PITCH;
    alignas(16) Scalar chunk[CHUNK];
    if constexpr (FILTERS_FIRST) {
#pragma unroll
      for (int c = 0; c < CHUNK; c++) {
        chunk[c] = from[c * K_PITCH];
      }
    } else {
      *reinterpret_cast<uint4*>(chunk) = *reinterpret_cast<const uint4*>(from);
    }
    if constexpr (WHOLE) {
      alignas(16) Scalar rest[CHUNK];
#pragma unroll
      for (int c = 0; c < CHUNK; c++) {
        const Scalar held = as_operand(chunk[c]);
        rest[c] = as_operand(from_float<Scalar>(to_float(chunk[c]) - to_float(held)));
        chunk[c] = held;
      }
      *reinterpret_cast<uint4*>(to + STEP) = *reinterpret_cast<const uint4*>(rest);
    }
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(chunk);
  }
}
