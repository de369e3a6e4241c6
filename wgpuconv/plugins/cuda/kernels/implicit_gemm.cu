// Implicit GEMM in plain floats.
//
//   y[m, p] = sum over k of A[m, k] * B[k, p]
//
// m counts filters, p output pixels of all images, k (channel, tap) in the order of `taps`. A is
// the packed weight. B[k, p] is the input element under tap k of pixel p; single elements are
// gathered by asynchronous copies, with the help of `taps`: for each k the offset from the pixel's
// first element and, as bits, the tap's row and column. Each pixel has a mask of the rows and
// columns that lie inside of the input; what lies outside is filled with zeros.
//
// A block computes TILE_M x TILE_P outputs, a warp 32 x 64 of them, a thread 8 x 8. STAGES - 1
// steps of TILE_K are on their way to shared memory while one is multiplied.
//
// Several launches with other offsets and strides make up a transposed convolution, one for each
// phase of the stride. SPLIT spreads the sum over k across blocks; the partial sums go to y, one
// slice a split, and reduce_splits finishes.

#include "ptx.cuh"
#include "activations.cuh"
#include "gather.cuh"

using Scalar = float;
constexpr int TILE_M = 128;
constexpr int TILE_P = 128;
constexpr int TILE_K = 16;
constexpr int STAGES = 3;
constexpr bool CHANNELS_LAST = false;  // the order of input and output
constexpr int OUT_VECTOR = 4;  // elements of one store
constexpr bool SPLIT = false;
constexpr Activation ACTIVATION = Activation::identity;
constexpr bool RESIDUAL = false;  // else `residual` is not read
constexpr int THREADS = 256;
constexpr int BLOCKS = 2;  // a multiprocessor: what the registers must suffice for
constexpr int SHARED_BYTES = 51200;

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

constexpr int WARPS_P = TILE_P / 64;
static_assert(TILE_M / 32 * WARPS_P * 32 == THREADS, "a warp computes 32 x 64");

// Rows of B begin 8 banks further each, so that the copies of a warp, four k of eight pixels where
// the channels lie side by side, fall on all 32.
constexpr int PITCH = TILE_P + 8;
constexpr int A_FLOATS = TILE_K * TILE_M;
constexpr int B_FLOATS = TILE_K * PITCH;
constexpr int STAGE_FLOATS = A_FLOATS + B_FLOATS;
constexpr int PLACES_AT = STAGES * STAGE_FLOATS * 4;
static_assert(SHARED_BYTES >= PLACES_AT + 4 * TILE_P, "the host asks for enough shared memory");

constexpr int A_COPIES = A_FLOATS / 4 / THREADS;
static_assert(A_FLOATS % (4 * THREADS) == 0, "whole copies of A");
// Neighbouring threads copy neighbouring elements: of one k, or of four.
constexpr int K_LANES = CHANNELS_LAST ? 4 : 1;
// Two pixels a thread: a tap serves both, and a pixel's mask several taps.
constexpr int P_LANES = THREADS / K_LANES < TILE_P / 2 ? THREADS / K_LANES : TILE_P / 2;
constexpr int P_COPIES = TILE_P / P_LANES;
constexpr int K_ROWS = THREADS / P_LANES;  // that one copy of each thread covers
constexpr int K_COPIES = TILE_K / K_ROWS;
static_assert(OUT_VECTOR == 1 || OUT_VECTOR == 4);
static_assert(TILE_P % P_LANES == 0 && TILE_K % K_ROWS == 0, "whole copies of B");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    implicit_gemm(Params params, const Scalar* __restrict__ x, const Scalar* __restrict__ packed,
                  const int4* __restrict__ taps, const Scalar* __restrict__ bias,
                  const Scalar* __restrict__ residual, Scalar* __restrict__ y) {
  wait_for_previous();
  const int thread = threadIdx.x;
  int block = blockIdx.x;
  const int m_tile = block % params.m_tiles;
  block /= params.m_tiles;
  const int p_tile = block % params.p_tiles;
  block /= params.p_tiles;
  const int group = block % params.groups;
  const int split = block / params.groups;
  const int first_step = static_cast<long long>(split) * params.k_steps / params.splits;
  const int end_step = static_cast<long long>(split + 1) * params.k_steps / params.splits;

  float* shared = reinterpret_cast<float*>(shared_memory());
  int* y_of_pixel = reinterpret_cast<int*>(shared_memory() + PLACES_AT);
  for (int i = thread; i < TILE_P; i += THREADS) {
    const int p = p_tile * TILE_P + i;
    const int q = p % params.q_hw;
    y_of_pixel[i] = p < params.pixels
                        ? params.y_base + group * params.y_g + p / params.q_hw * params.y_n +
                              q / params.q_w * params.y_h + q % params.q_w * params.y_w
                        : -1;
  }

  // The pixels of which this thread copies elements. Pixels past the end copy the last one again.
  const int copy_k = thread % K_LANES + thread / K_LANES / P_LANES * K_LANES;
  const int copy_p = thread / K_LANES % P_LANES;
  int origin[P_COPIES];
  int inside[P_COPIES];  // bit r: row r of the taps, bit 16 + s: column s
#pragma unroll
  for (int i = 0; i < P_COPIES; i++) {
    const int p = min(p_tile * TILE_P + i * P_LANES + copy_p, params.pixels - 1);
    const int q = p % params.q_hw;
    const int h = q / params.q_w * params.in_stride_h;
    const int w = q % params.q_w * params.in_stride_w;
    origin[i] = group * params.x_g + p / params.q_hw * params.x_n + h * params.x_h + w * params.x_w;
    inside[i] =
        taps_inside(h + params.tap_h, params.tap_step_h, params.tap_rows, params.in_h) |
        taps_inside(w + params.tap_w, params.tap_step_w, params.tap_columns, params.in_w) << 16;
  }

  const unsigned stages = shared_address(shared);
  const Scalar* packed_at =
      packed + (static_cast<long long>(group * params.m_tiles + m_tile) * params.k_steps +
                first_step) *
                   A_FLOATS;
  int2 tap[K_COPIES];  // of the step that is copied next: loaded a step ahead
  auto load_taps = [&](int step) {
#pragma unroll
    for (int j = 0; j < K_COPIES; j++) {
      tap[j] = *reinterpret_cast<const int2*>(taps + step * TILE_K + copy_k + j * K_ROWS);
    }
  };
  load_taps(first_step);

  unsigned to_slot = 0;
  auto copy_step = [&](int step) {
    if (step < end_step) {
      const unsigned a = stages + to_slot;
#pragma unroll
      for (int i = 0; i < A_COPIES; i++) {
        const int at = (i * THREADS + thread) * 4;
        copy_async<16>(a + at * 4, packed_at + at, true);
      }
      const unsigned b = a + (A_FLOATS + copy_k * PITCH + copy_p) * 4;
#pragma unroll
      for (int j = 0; j < K_COPIES; j++) {
#pragma unroll
        for (int i = 0; i < P_COPIES; i++) {
          copy_async<4>(b + (j * K_ROWS * PITCH + i * P_LANES) * 4, x + (origin[i] + tap[j].x),
                        (inside[i] & tap[j].y) == tap[j].y);
        }
      }
      packed_at += A_FLOATS;
      load_taps(step + 1);
      to_slot = to_slot == (STAGES - 1) * STAGE_FLOATS * 4 ? 0 : to_slot + STAGE_FLOATS * 4;
    }
    commit_copies();  // an empty group too, so that the count of groups is that of steps
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    copy_step(first_step + i);
  }

  // A thread's filters are m0 + 0..3 and m0 + 16..19, its pixels p0 + 0..3 and p0 + 32..35.
  const int lane = thread % 32;
  const int m0 = thread / 32 / WARPS_P * 32 + lane / 8 * 4;
  const int p0 = thread / 32 % WARPS_P * 64 + lane % 8 * 4;
  float acc[8][8] = {};
  int from_slot = 0;
  for (int step = first_step; step < end_step; step++) {
    wait_copies<STAGES - 2>();
    // This step's tiles are complete, and all have read the slot that is overwritten next.
    __syncthreads();
    copy_step(step + STAGES - 1);
    const float* tile_a = shared + from_slot + m0;
    const float* tile_b = shared + from_slot + A_FLOATS + p0;
#pragma unroll
    for (int k = 0; k < TILE_K; k++) {
      const float4 a_low = *reinterpret_cast<const float4*>(tile_a + k * TILE_M);
      const float4 a_high = *reinterpret_cast<const float4*>(tile_a + k * TILE_M + 16);
      const float4 b_low = *reinterpret_cast<const float4*>(tile_b + k * PITCH);
      const float4 b_high = *reinterpret_cast<const float4*>(tile_b + k * PITCH + 32);
      const float a[8] = {a_low.x,  a_low.y,  a_low.z,  a_low.w,
                          a_high.x, a_high.y, a_high.z, a_high.w};
      const float b[8] = {b_low.x,  b_low.y,  b_low.z,  b_low.w,
                          b_high.x, b_high.y, b_high.z, b_high.w};
#pragma unroll
      for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
          acc[i][j] = fmaf(a[i], b[j], acc[i][j]);
        }
      }
    }
    from_slot = from_slot == (STAGES - 1) * STAGE_FLOATS ? 0 : from_slot + STAGE_FLOATS;
  }
  wait_copies<0>();
  __syncthreads();  // the places of the pixels are there, also where there was no step

#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int m = m_tile * TILE_M + m0 + i % 4 + i / 4 * 16;
    const float b = SPLIT ? 0.0f : to_float(bias[group * params.m + min(m, params.m - 1)]);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      if (!SPLIT) {
        float sum = acc[i][j] + b;
        const int place = RESIDUAL ? y_of_pixel[p0 + j % 4 + j / 4 * 32] : -1;
        if (place >= 0 && m < params.m) {
          sum += to_float(residual[place + m * params.y_m]);
        }
        acc[i][j] = activate<ACTIVATION>(sum, params.act_a, params.act_b);
      }
    }
  }
  Scalar* out = y + (SPLIT ? static_cast<long long>(split) * params.y_elements : 0);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int m = m_tile * TILE_M + m0 + i % 4 + i / 4 * 16;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int place = y_of_pixel[p0 + j % 4 + j / 4 * 32];
      if (place < 0 || m >= params.m) {
        continue;
      }
      Scalar* to = out + place + m * params.y_m;
      if constexpr (OUT_VECTOR == 4 && CHANNELS_LAST) {
        if (i % 4 == 0) {
          *reinterpret_cast<float4*>(to) =
              make_float4(acc[i][j], acc[i + 1][j], acc[i + 2][j], acc[i + 3][j]);
        }
      } else if constexpr (OUT_VECTOR == 4) {
        if (j % 4 == 0) {
          *reinterpret_cast<float4*>(to) =
              make_float4(acc[i][j], acc[i][j + 1], acc[i][j + 2], acc[i][j + 3]);
        }
      } else {
        *to = acc[i][j];
      }
    }
  }
}
