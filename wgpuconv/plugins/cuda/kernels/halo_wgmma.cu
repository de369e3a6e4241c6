// Convolution on Hopper's tensor cores with the input's tile staged once for all taps: halves in,
// sums in float.
//
// A block computes a rectangle of TILE_H x TILE_W output pixels of one image by TILE_M filters, a
// warpgroup SQUARES squares of 8 x 8 of them. As in halo_mma, the input pixels that any tap of any
// of its pixels needs are copied to shared memory once for each TILE_K channels, and a tap only
// shifts where the tensor cores read. They read groups of 8 rows (pixels side by side) of 8
// channels that are 128 contiguous bytes, from any place that is a multiple of 16 bytes: so the
// halo lies as one plane for each 8 channels, in it the pixels. With a stride, the columns are
// sorted by their remainder, so that what neighbouring output pixels need lies side by side.
//
// The weight streams by: one step is one tap of TILE_K channels. One step's products run while the
// next step begins, so that a slot is free again two steps after its own: STAGES - 2 steps are on
// their way.

#include "wgmma.cuh"
#include "mma.cuh"

using Scalar = Half;
constexpr int TILE_H = 16;
constexpr int TILE_W = 16;
constexpr int TILE_M = 128;
constexpr int TILE_K = 64;
constexpr int SQUARES = 2;
constexpr int STAGES = 4;
constexpr int PLANE_PIXELS = 332;  // of the halo, and some more
constexpr int HALO_BUFFERS = 2;    // 1 where all channels are one step
constexpr bool CHANNELS_LAST = true;  // the output's order
constexpr int OUT_VECTOR = 8;  // elements of one store
constexpr bool SPLIT = false;  // several blocks share the sum over channels
using Out = Half;  // float for partial sums
constexpr Activation ACTIVATION = Activation::identity;
constexpr bool RESIDUAL = false;  // else `residual` is not read
constexpr int THREADS = 256;
constexpr int BLOCKS = 1;  // a multiprocessor: what the registers must suffice for
constexpr int SHARED_BYTES = 153264;

struct Params {
  int images;
  int q_h;  // output pixels of this launch, of one image
  int q_w;
  int tiles_h;  // of one image
  int tiles_w;
  int in_h;
  int in_w;
  int in_stride_h;  // input pixels from one output pixel to the next
  int in_stride_w;
  int first_h;  // input pixels from an output pixel's place to the first that any tap needs
  int first_w;
  int halo_h;  // rows and columns of the halo
  int halo_w;
  int sorted_w;  // columns of the halo that have the same remainder
  int x_g;       // strides of the input over groups, images, rows, columns
  int x_n;
  int x_h;
  int x_w;
  int channels;  // of a group, a multiple of 8
  int y_base;
  int y_g;  // strides of the output over groups, images, filters, rows, columns
  int y_n;
  int y_m;
  int y_h;
  int y_w;
  int m;  // filters of a group
  int m_tiles;
  int taps;
  int chunks;  // of TILE_K channels
  int groups;
  int splits;
  int y_elements;  // of the whole output: the size of one slice of partial sums
  float act_a;
  float act_b;
};

constexpr int TILE_P = TILE_H * TILE_W;
static_assert(TILE_H % 8 == 0 && TILE_W % 8 == 0, "whole squares");
static_assert(TILE_P / 64 / SQUARES * 128 == THREADS, "as many warpgroups as make up the tile");
static_assert(sizeof(Out) == (SPLIT ? 4 : 2), "partial sums are floats");

constexpr int ROW_CHUNKS = TILE_K / 8;  // of 16 bytes
constexpr int PLANE_BYTES = PLANE_PIXELS * 16;
// Copies of eight neighbouring threads, two chunks of four pixels, fall on all 32 banks.
static_assert(PLANE_PIXELS % 8 == 4);
constexpr int HALO_BYTES = ROW_CHUNKS * PLANE_BYTES;
constexpr int B_BYTES = TILE_M * TILE_K * 2;
constexpr int B_COPIES = B_BYTES / 16 / THREADS;
static_assert(B_BYTES % (16 * THREADS) == 0, "whole copies of B");

constexpr int COPIED_BYTES = HALO_BUFFERS * HALO_BYTES + STAGES * B_BYTES;
constexpr int STAGED_BYTES =
    SPLIT ? 0 : 2 * (CHANNELS_LAST ? TILE_P * (TILE_M + 8) : TILE_M * (TILE_P + 8));
constexpr int PLACES_AT = COPIED_BYTES > STAGED_BYTES ? COPIED_BYTES : STAGED_BYTES;
constexpr int ORIGINS_AT = PLACES_AT + 4 * TILE_P;
static_assert(SHARED_BYTES >= ORIGINS_AT + 4 * PLANE_PIXELS, "the host asks for enough");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    halo_wgmma(Params params, const Scalar* __restrict__ x, const Scalar* __restrict__ packed,
               const int* __restrict__ shifts, const Scalar* __restrict__ bias,
               const Scalar* __restrict__ residual, Out* __restrict__ y) {
  const int thread = threadIdx.x;
  int block = blockIdx.x;
  const int m_tile = block % params.m_tiles;
  block /= params.m_tiles;
  const int tile_x = block % params.tiles_w * TILE_W;
  block /= params.tiles_w;
  const int tile_y = block % params.tiles_h * TILE_H;
  block /= params.tiles_h;
  const int image = block % params.images;
  block /= params.images;
  const int group = block % params.groups;
  const int split = block / params.groups;
  const int first_chunk = split * params.chunks / params.splits;
  const int end_chunk = (split + 1) * params.chunks / params.splits;
  const int end_channel = min(end_chunk * TILE_K, params.channels);
  const int steps = (end_chunk - first_chunk) * params.taps;

  // The elements of x at which the pixels of the halo begin (-1: border), and those of y.
  unsigned char* shared = shared_memory();
  int* y_of_pixel = reinterpret_cast<int*>(shared + PLACES_AT);
  int* origins = reinterpret_cast<int*>(shared + ORIGINS_AT);
  const int halo_pixels = params.halo_h * params.halo_w;
  for (int i = thread; i < TILE_P; i += THREADS) {
    const int square = i / 64;
    const int h = tile_y + square / (TILE_W / 8) * 8 + i % 64 / 8;
    const int w = tile_x + square % (TILE_W / 8) * 8 + i % 8;
    y_of_pixel[i] = h < params.q_h && w < params.q_w
                        ? params.y_base + group * params.y_g + image * params.y_n +
                              h * params.y_h + w * params.y_w
                        : -1;
  }
  for (int i = thread; i < halo_pixels; i += THREADS) {
    const int column = i % params.halo_w;
    const int h = tile_y * params.in_stride_h + params.first_h + i / params.halo_w;
    const int w = tile_x * params.in_stride_w + params.first_w +
                  column % params.sorted_w * params.in_stride_w + column / params.sorted_w;
    const bool inside = static_cast<unsigned>(h) < static_cast<unsigned>(params.in_h) &&
                        static_cast<unsigned>(w) < static_cast<unsigned>(params.in_w);
    origins[i] =
        inside ? group * params.x_g + image * params.x_n + h * params.x_h + w * params.x_w : -1;
  }
  __syncthreads();  // the origins are there

  const unsigned halos = shared_address(shared);
  const unsigned stages = halos + HALO_BUFFERS * HALO_BYTES;
  auto copy_halo = [&](int channel, unsigned to) {
    // Two chunks of a pixel are a whole sector of memory.
    const int pair = thread % 2;
    for (int i = thread / 2; i < halo_pixels * (ROW_CHUNKS / 2); i += THREADS / 2) {
      const int pixel = i % halo_pixels;
      const int chunk = i / halo_pixels * 2 + pair;
      const int origin = origins[pixel];
      const int c = channel + chunk * 8;
      copy_async<16>(to + chunk * PLANE_BYTES + pixel * 16, x + (origin + c),
                     origin >= 0 && c < params.channels);
    }
  };
  const Scalar* packed_at =
      packed + (static_cast<long long>(group * params.m_tiles + m_tile) * params.chunks +
                first_chunk) *
                   params.taps * (TILE_M * TILE_K);
  int copied = 0;
  unsigned to_slot = 0;
  auto copy_weights = [&]() {
    if (copied < steps) {
#pragma unroll
      for (int i = 0; i < B_COPIES; i++) {
        const int chunk = i * THREADS + thread;
        copy_async<16>(stages + to_slot + chunk * 16, packed_at + chunk * 8, true);
      }
      packed_at += TILE_M * TILE_K;
      copied++;
      to_slot = to_slot == (STAGES - 1) * B_BYTES ? 0 : to_slot + B_BYTES;
    }
    commit_copies();  // an empty group too, so that the count of groups is that of steps
  };
  copy_halo(first_chunk * TILE_K, halos);
#pragma unroll
  for (int i = 0; i < STAGES - 2; i++) {
    copy_weights();
  }

  // Where the squares of this warpgroup begin in the halo, for the first tap.
  const int warpgroup = thread / 128;
  unsigned under[SQUARES];
#pragma unroll
  for (int i = 0; i < SQUARES; i++) {
    const int square = warpgroup * SQUARES + i;
    const int row = square / (TILE_W / 8) * 8 * params.in_stride_h;
    under[i] = (row * params.halo_w + square % (TILE_W / 8) * 8) * 16;
  }
  const unsigned next_row = params.in_stride_h * params.halo_w * 16;

  float acc[SQUARES][TILE_M / 8][4] = {};
  unsigned from_slot = 0;
  unsigned halo = halos;
  int tap = 0;
  int channel = first_chunk * TILE_K;
  int shift = shifts[0];
  for (int step = 0; step < steps; step++) {
    wait_copies<STAGES - 3>();
    publish_copies();
    wait_products<1>();
    // This step's weights and halo are complete, and the products of the step before the last are
    // done: their slot, and at the second tap the other halo, are free.
    __syncthreads();
    begin_products();
#pragma unroll
    for (int k = 0; k < TILE_K / 16; k++) {
      const unsigned long long b =
          matrix(stages + from_slot + k * 2 * TILE_M * 16, TILE_M * 16, 128);
#pragma unroll
      for (int i = 0; i < SQUARES; i++) {
        const unsigned at = halo + under[i] + shift * 16 + k * 2 * PLANE_BYTES;
        multiply_add_async<Scalar>(acc[i], matrix(at, PLANE_BYTES, next_row), b);
      }
    }
    commit_products();
    if (HALO_BUFFERS > 1 && tap == 1 && channel + TILE_K < end_channel) {
      copy_halo(channel + TILE_K, halos == halo ? halos + HALO_BYTES : halos);
    }
    copy_weights();
    tap++;
    if (tap == params.taps) {
      tap = 0;
      channel += TILE_K;
      if (HALO_BUFFERS > 1) {
        halo = halos == halo ? halos + HALO_BYTES : halos;
      }
    }
    shift = shifts[tap];  // a step ahead
    from_slot = from_slot == (STAGES - 1) * B_BYTES ? 0 : from_slot + B_BYTES;
  }
  wait_products<0>();
  wait_copies<0>();
  __syncthreads();  // all products are done: the shared memory is free

  const int lane = thread % 32;
  const int first_p = warpgroup * SQUARES * 64 + thread / 32 % 4 * 16;
  const Target<Scalar> target{y_of_pixel, bias + group * params.m, m_tile * TILE_M, params.m,
                              params.y_m, params.act_a, params.act_b,
                              RESIDUAL ? residual : nullptr};
  if constexpr (SPLIT) {
    store_partial<64>(acc, first_p, 0, lane, target,
                      reinterpret_cast<float*>(y) +
                          static_cast<long long>(split) * params.y_elements);
  } else {
    store<WholeBlock<THREADS>, TILE_P, TILE_M, CHANNELS_LAST, OUT_VECTOR, ACTIVATION, 64>(
        acc, first_p, 0, lane, target, shared, reinterpret_cast<Scalar*>(y));
  }
}
