// Implicit GEMM on tensor cores: halves or bfloats in, or floats, which are multiplied as TF32;
// sums in float.
//
//   y[p, m] = sum over k of A[p, k] * B[k, m]
//
// p counts output pixels of all images, m filters, k (tap, channel). The input has its channels
// last, so that VECTOR channels of a pixel are one copy. A[p, k] is the input element under tap k
// of pixel p; a tile of A is gathered by asynchronous copies, with the help of `taps`: for each
// VECTOR of k the offset from the pixel's first element and, as bits, the tap's row and column.
// Each pixel has a mask of the rows and columns that lie inside of the input, so that the border
// costs one comparison a copy: what lies outside is filled with zeros. B is the packed weight.
//
// A block computes TILE_P pixels by TILE_M filters, each warp WARP_P by WARP_M. STAGES - 1 steps
// of TILE_K are on their way to shared memory while one is multiplied.
//
// Several launches with other offsets and strides make up a transposed convolution, one for each
// phase of the stride. SPLIT spreads the sum over k across blocks; the partial sums go to y as
// floats, one slice a split, and reduce_splits finishes.

#include "mma.cuh"
#include "gather.cuh"

using Scalar = Half;
constexpr int TILE_P = 128;
constexpr int TILE_M = 128;
constexpr int TILE_K = 32;
constexpr int WARP_P = 64;
constexpr int WARP_M = 64;
constexpr int STAGES = 4;
constexpr int VECTOR = 8;  // channels of one copy
constexpr bool CHANNELS_LAST = true;  // the output's order
constexpr int OUT_VECTOR = 8;  // elements of one store
constexpr bool SPLIT = false;
using Out = Half;  // Scalar, or float for partial sums
constexpr Activation ACTIVATION = Activation::identity;
constexpr bool RESIDUAL = false;  // else `residual` is not read
constexpr int THREADS = 128;
constexpr int BLOCKS = 2;  // a multiprocessor: what the registers must suffice for
constexpr int SHARED_BYTES = 66048;

struct Params {
  int pixels;  // output pixels of this launch, over all images
  int q_hw;    // those of one image
  int q_w;     // those of one row
  int in_h;
  int in_w;
  int in_stride_h;  // input pixels from one output pixel to the next
  int in_stride_w;
  int tap_rows;  // rows and columns of taps, at most 16 and 15
  int tap_columns;
  int tap_h;  // input pixels from an output pixel's place to its first tap
  int tap_w;
  int tap_step_h;  // from one row of taps to the next
  int tap_step_w;
  int x_g;  // strides of the input over groups, images, rows, columns
  int x_n;
  int x_h;
  int x_w;
  int y_base;
  int y_g;  // strides of the output over groups, images, filters, rows, columns
  int y_n;
  int y_m;
  int y_h;
  int y_w;
  int m;  // filters of a group
  int m_tiles;
  int p_tiles;
  int groups;
  int k_steps;
  int splits;
  int y_elements;  // of the whole output: the size of one slice of partial sums
  float act_a;
  float act_b;
};

constexpr int WARPS_P = TILE_P / WARP_P;
constexpr int WARPS_M = TILE_M / WARP_M;
static_assert(WARPS_P * WARPS_M * 32 == THREADS, "as many warps as make up the tile");
constexpr int BYTES = sizeof(Scalar);
static_assert(sizeof(Out) == (SPLIT ? 4 : BYTES), "partial sums are floats");

constexpr int CHUNK = 16 / BYTES;  // elements of 16 bytes
constexpr int ROW_CHUNKS = TILE_K / CHUNK;
constexpr int ROW_BYTES = TILE_K * BYTES;
constexpr int A_BYTES = TILE_P * ROW_BYTES;
constexpr int B_BYTES = TILE_M * ROW_BYTES;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;

constexpr int ROW_COPIES = TILE_K / VECTOR;
constexpr int A_ROWS = THREADS / ROW_COPIES;  // that one copy of each thread covers
constexpr int A_COPIES = TILE_P / A_ROWS;
static_assert(TILE_P % A_ROWS == 0, "whole copies of A");
constexpr int B_COPIES = TILE_M * ROW_CHUNKS / THREADS;
constexpr bool B_WHOLE = TILE_M * ROW_CHUNKS % THREADS == 0;

constexpr int STAGED_BYTES =
    SPLIT ? 0 : BYTES * (CHANNELS_LAST ? TILE_P * (TILE_M + 8) : TILE_M * (TILE_P + CHUNK));
constexpr int PLACES_AT =
    STAGES * STAGE_BYTES > STAGED_BYTES ? STAGES * STAGE_BYTES : STAGED_BYTES;
static_assert(SHARED_BYTES >= PLACES_AT + 4 * TILE_P, "the host asks for enough shared memory");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    implicit_gemm_mma(Params params, const Scalar* __restrict__ x,
                      const Scalar* __restrict__ packed, const int2* __restrict__ taps,
                      const Scalar* __restrict__ bias, const Scalar* __restrict__ residual,
                      Out* __restrict__ y) {
  wait_for_previous();
  const int thread = threadIdx.x;
  const int warp = thread / 32;
  const int lane = thread % 32;
  int block = blockIdx.x;
  const int m_tile = block % params.m_tiles;
  block /= params.m_tiles;
  const int p_tile = block % params.p_tiles;
  block /= params.p_tiles;
  const int group = block % params.groups;
  const int split = block / params.groups;
  const int first_step = static_cast<long long>(split) * params.k_steps / params.splits;
  const int end_step = static_cast<long long>(split + 1) * params.k_steps / params.splits;

  unsigned char* shared = shared_memory();
  int* y_of_pixel = reinterpret_cast<int*>(shared + PLACES_AT);
  for (int i = thread; i < TILE_P; i += THREADS) {
    const int p = p_tile * TILE_P + i;
    const int q = p % params.q_hw;
    y_of_pixel[i] = p < params.pixels
                        ? params.y_base + group * params.y_g + p / params.q_hw * params.y_n +
                              q / params.q_w * params.y_h + q % params.q_w * params.y_w
                        : -1;
  }

  // The pixels of which this thread copies elements. Pixels past the end copy the last one again.
  const int copy_k = thread % ROW_COPIES;
  const int copy_row = thread / ROW_COPIES;
  int origin[A_COPIES];
  int inside[A_COPIES];  // bit r: row r of the taps, bit 16 + s: column s
#pragma unroll
  for (int i = 0; i < A_COPIES; i++) {
    const int p = min(p_tile * TILE_P + i * A_ROWS + copy_row, params.pixels - 1);
    const int q = p % params.q_hw;
    const int h = q / params.q_w * params.in_stride_h;
    const int w = q % params.q_w * params.in_stride_w;
    origin[i] = group * params.x_g + p / params.q_hw * params.x_n + h * params.x_h + w * params.x_w;
    inside[i] =
        taps_inside(h + params.tap_h, params.tap_step_h, params.tap_rows, params.in_h) |
        taps_inside(w + params.tap_w, params.tap_step_w, params.tap_columns, params.in_w) << 16;
  }

  // Where they go: chunks of less than 16 bytes lie inside of one.
  constexpr int SMALL = CHUNK / VECTOR;
  const unsigned stages = shared_address(shared);
  const unsigned copy_a =
      stages + swizzled<ROW_CHUNKS>(copy_row, copy_k / SMALL) + copy_k % SMALL * VECTOR * BYTES;
  static_assert(A_ROWS % 8 == 0, "the permutation repeats every eight rows");

  const Scalar* packed_at =
      packed + (static_cast<long long>(group * params.m_tiles + m_tile) * params.k_steps +
                first_step) *
                   (TILE_M * TILE_K);
  const int2* taps_at = taps + first_step * ROW_COPIES + copy_k;
  int2 tap = *taps_at;  // of the step that is copied next: loaded a step ahead

  int copied = first_step;
  unsigned to_slot = 0;
  auto copy_step = [&]() {
    if (copied < end_step) {
#pragma unroll
      for (int i = 0; i < A_COPIES; i++) {
        copy_async<VECTOR * BYTES>(copy_a + to_slot + i * A_ROWS * ROW_BYTES,
                                   x + (origin[i] + tap.x), (inside[i] & tap.y) == tap.y);
      }
#pragma unroll
      for (int i = 0; i < B_COPIES + (B_WHOLE ? 0 : 1); i++) {
        const int chunk = i * THREADS + thread;
        if (B_WHOLE || chunk < TILE_M * ROW_CHUNKS) {
          copy_async<16>(stages + to_slot + A_BYTES +
                             swizzled<ROW_CHUNKS>(chunk / ROW_CHUNKS, chunk % ROW_CHUNKS),
                         packed_at + chunk * CHUNK, true);
        }
      }
      packed_at += TILE_M * TILE_K;
      taps_at += ROW_COPIES;
      tap = *taps_at;
      copied++;
      to_slot = to_slot == (STAGES - 1) * STAGE_BYTES ? 0 : to_slot + STAGE_BYTES;
    }
    commit_copies();  // an empty group too, so that the count of groups is that of steps
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    copy_step();
  }

  const int warp_p = warp / WARPS_M;
  const int warp_m = warp % WARPS_M;
  const LaneRow row_a = lane_row_a(lane);
  const LaneRow row_b = lane_row_b(lane);
  const unsigned read_a = stages + swizzled<ROW_CHUNKS>(warp_p * WARP_P + row_a.row, row_a.chunk);
  const unsigned read_b =
      stages + A_BYTES + swizzled<ROW_CHUNKS>(warp_m * WARP_M + row_b.row, row_b.chunk);
  Sums<WARP_P, WARP_M> sums;
  unsigned from_slot = 0;
  for (int step = first_step; step < end_step; step++) {
    wait_copies<STAGES - 2>();
    // This step's tiles are complete, and all have read the slot that is overwritten next.
    __syncthreads();
    copy_step();
    unsigned a[WARP_P / 16];
#pragma unroll
    for (int i = 0; i < WARP_P / 16; i++) {
      a[i] = read_a + from_slot + i * 16 * ROW_BYTES;
    }
    sums.template add<Scalar, TILE_K>(a, read_b + from_slot);
    from_slot = from_slot == (STAGES - 1) * STAGE_BYTES ? 0 : from_slot + STAGE_BYTES;
  }
  wait_copies<0>();
  __syncthreads();  // all have read the last tiles, and the places of the pixels are there

  const Target<Scalar> target{y_of_pixel, bias + group * params.m, m_tile * TILE_M,
                              params.m, params.y_m, params.act_a, params.act_b,
                              RESIDUAL ? residual : nullptr};
  if constexpr (SPLIT) {
    store_partial<16>(
        sums.acc, warp_p * WARP_P, warp_m * WARP_M, lane, target,
        reinterpret_cast<float*>(y) + static_cast<long long>(split) * params.y_elements);
  } else {
    store<WholeBlock<THREADS>, TILE_P, TILE_M, CHANNELS_LAST, OUT_VECTOR, ACTIVATION, 16>(
        sums.acc, warp_p * WARP_P, warp_m * WARP_M, lane, target, shared,
        reinterpret_cast<Scalar*>(y));
  }
}
