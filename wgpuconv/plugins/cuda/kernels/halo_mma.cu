// Convolution on tensor cores with the input's tile staged once for all taps: halves or
// bfloats in, sums in float.
//
// A block computes TILE_P output pixels by TILE_M filters. For each TILE_K channels it copies the
// input pixels that any tap of any of its pixels needs (the halo, border zeros included) to
// shared memory, each a row of TILE_K halves; a tap then only shifts the rows that the tensor
// cores read. The weight streams by: one step is one tap of TILE_K channels, STAGES - 1 steps are
// on their way while one is multiplied. RESIDENT brings the whole weight at once, where it fits,
// and so has no barriers between steps. (The gather of implicit_gemm_mma copies each input element
// once a tap, and the second-level cache cannot keep up with that.)
//
// The pixels of a block are a rectangle of TILE_W columns of one image, or, where TILE_W is 0, a
// run of pixels over rows and images (small images). Rows of the halo are counted over all images,
// each of which has `image_rows` rows from the first that a tap needs to the last.
//
// SPLIT spreads the sum over channels across blocks; the partial sums go to y as floats, one
// slice a split, and reduce_splits finishes.

#include "mma.cuh"

using Scalar = Half;
constexpr int TILE_P = 128;
constexpr int TILE_W = 16;
constexpr int TILE_M = 128;
constexpr int TILE_K = 32;
constexpr int WARP_P = 64;
constexpr int WARP_M = 64;
constexpr int STAGES = 4;
constexpr bool RESIDENT = false;  // STAGES is the number of taps, all channels are one step
constexpr int HALO_PIXELS = 180;  // at most
constexpr int HALO_BUFFERS = 2;   // 1 where all channels are one step
constexpr bool CHANNELS_LAST = true;  // the output's order
constexpr int OUT_VECTOR = 8;  // elements of one store
constexpr bool SPLIT = false;  // several blocks share the sum over channels
using Out = Half;  // float for partial sums
constexpr Activation ACTIVATION = Activation::identity;
constexpr bool RESIDUAL = false;  // else `residual` is not read
constexpr int THREADS = 128;
constexpr int BLOCKS = 2;  // a multiprocessor: what the registers must suffice for
constexpr int SHARED_BYTES = 57552;

struct Params {
  int images;
  int q_h;  // output pixels of this launch, of one image
  int q_w;
  int p_tiles;  // of all images
  int tiles_h;  // of one image, where the tiles are rectangles
  int tiles_w;
  int in_h;
  int in_w;
  int in_stride_h;  // input pixels from one output pixel to the next
  int in_stride_w;
  int first_h;  // input pixels from an output pixel's place to the first that any tap needs
  int first_w;
  int tap_span_h;  // input rows from the first to the last tap of a pixel, both included
  int image_rows;  // rows of the halo that belong to one image
  int halo_w;      // columns of the halo
  int x_g;         // strides of the input over groups, images, rows, columns
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

constexpr int WARPS_P = TILE_P / WARP_P;
constexpr int WARPS_M = TILE_M / WARP_M;
static_assert(WARPS_P * WARPS_M * 32 == THREADS, "as many warps as make up the tile");
static_assert(sizeof(Out) == (SPLIT ? 4 : 2), "partial sums are floats");

constexpr int ROW_CHUNKS = TILE_K / 8;  // of 16 bytes
constexpr int ROW_BYTES = TILE_K * 2;
// A halo begins on 128 bytes, so that chunks can be told apart by single bits of the address.
constexpr int HALO_BYTES = (HALO_PIXELS * ROW_BYTES + 127) / 128 * 128;
constexpr int B_BYTES = TILE_M * ROW_BYTES;
constexpr int B_COPIES = TILE_M * ROW_CHUNKS / THREADS;
constexpr bool B_WHOLE = TILE_M * ROW_CHUNKS % THREADS == 0;

constexpr int COPIED_BYTES = HALO_BUFFERS * HALO_BYTES + STAGES * B_BYTES;
constexpr int STAGED_BYTES =
    SPLIT ? 0 : 2 * (CHANNELS_LAST ? TILE_P * (TILE_M + 8) : TILE_M * (TILE_P + 8));
constexpr int PLACES_AT = COPIED_BYTES > STAGED_BYTES ? COPIED_BYTES : STAGED_BYTES;
constexpr int ORIGINS_AT = PLACES_AT + 4 * TILE_P;
static_assert(SHARED_BYTES >= ORIGINS_AT + 4 * HALO_PIXELS, "the host asks for enough");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    halo_mma(Params params, const Scalar* __restrict__ x, const Scalar* __restrict__ packed,
             const int* __restrict__ shifts, const Scalar* __restrict__ bias,
             const Scalar* __restrict__ residual, Out* __restrict__ y) {
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
  const int first_chunk = split * params.chunks / params.splits;
  const int end_chunk = (split + 1) * params.chunks / params.splits;
  const int end_channel = min(end_chunk * TILE_K, params.channels);
  const int steps = (end_chunk - first_chunk) * params.taps;

  // The tile's first pixel, and what any pixel of it is.
  const int tile_x = TILE_W ? p_tile % params.tiles_w * TILE_W : 0;
  const int tile_y =
      TILE_W ? p_tile / params.tiles_w % params.tiles_h * (TILE_P / max(TILE_W, 1)) : 0;
  const int tile_n = TILE_W ? p_tile / params.tiles_w / params.tiles_h : 0;
  struct Pixel {
    int n, h, w;
  };
  auto pixel_of = [&](int i) -> Pixel {
    if constexpr (TILE_W != 0) {
      return {tile_n, tile_y + i / TILE_W, tile_x + i % TILE_W};
    } else {
      const int p = p_tile * TILE_P + i;
      return {p / params.q_w / params.q_h, p / params.q_w % params.q_h, p % params.q_w};
    }
  };
  const Pixel first = pixel_of(0);
  const int first_row = first.n * params.image_rows + first.h * params.in_stride_h;
  const int first_column = tile_x * params.in_stride_w;

  // The elements of x at which the pixels of the halo begin (or NOWHERE), and those of y.
  unsigned char* shared = shared_memory();
  int* y_of_pixel = reinterpret_cast<int*>(shared + PLACES_AT);
  int* origins = reinterpret_cast<int*>(shared + ORIGINS_AT);
  const int pixels = params.images * params.q_h * params.q_w;
  const Pixel last = pixel_of(TILE_W ? TILE_P - 1 : min(TILE_P, pixels - p_tile * TILE_P) - 1);
  const int last_row = last.n * params.image_rows + last.h * params.in_stride_h;
  const int halo_pixels = (last_row - first_row + params.tap_span_h) * params.halo_w;
  for (int i = thread; i < TILE_P; i += THREADS) {
    const Pixel p = pixel_of(i);
    const bool exists = p.n < params.images && p.h < params.q_h && p.w < params.q_w;
    y_of_pixel[i] = exists ? params.y_base + group * params.y_g + p.n * params.y_n +
                                 p.h * params.y_h + p.w * params.y_w
                           : -1;
  }
  for (int i = thread; i < halo_pixels; i += THREADS) {
    const int row = first_row + i / params.halo_w;
    const int n = row / params.image_rows;
    const int h = row % params.image_rows + params.first_h;
    const int w = first_column + i % params.halo_w + params.first_w;
    const bool inside = n < params.images &&
                        static_cast<unsigned>(h) < static_cast<unsigned>(params.in_h) &&
                        static_cast<unsigned>(w) < static_cast<unsigned>(params.in_w);
    origins[i] =
        inside ? group * params.x_g + n * params.x_n + h * params.x_h + w * params.x_w : NOWHERE;
  }
  __syncthreads();  // the origins are there

  const unsigned halos = shared_address(shared);
  const unsigned stages = halos + HALO_BUFFERS * HALO_BYTES;
  auto copy_halo = [&](int channel, unsigned to) {
    const int chunk = thread % ROW_CHUNKS;
    const int c = channel + chunk * 8;
    for (int i = thread / ROW_CHUNKS; i < halo_pixels; i += THREADS / ROW_CHUNKS) {
      const int origin = origins[i];
      copy_async<16>(to + swizzled<ROW_CHUNKS>(i, chunk), x + (origin + c),
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
      for (int i = 0; i < B_COPIES + (B_WHOLE ? 0 : 1); i++) {
        const int chunk = i * THREADS + thread;
        if (B_WHOLE || chunk < TILE_M * ROW_CHUNKS) {
          copy_async<16>(stages + to_slot +
                             swizzled<ROW_CHUNKS>(chunk / ROW_CHUNKS, chunk % ROW_CHUNKS),
                         packed_at + chunk * 8, true);
        }
      }
      packed_at += TILE_M * TILE_K;
      copied++;
      to_slot = to_slot == (STAGES - 1) * B_BYTES ? 0 : to_slot + B_BYTES;
    }
    commit_copies();  // an empty group too, so that the count of groups is that of steps
  };
  copy_halo(first_chunk * TILE_K, halos);
  if constexpr (RESIDENT) {
    for (int i = thread; i < STAGES * TILE_M * ROW_CHUNKS; i += THREADS) {
      copy_async<16>(stages + swizzled<ROW_CHUNKS>(i / ROW_CHUNKS, i % ROW_CHUNKS),
                     packed_at + i * 8, true);
    }
    commit_copies();
    wait_copies<0>();
    __syncthreads();  // the weight and the halo are complete
  } else {
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
      copy_weights();
    }
  }

  // The rows of the halo under the first tap of the pixels that this lane names.
  const int warp_p = warp / WARPS_M;
  const int warp_m = warp % WARPS_M;
  const LaneRow row_a = lane_row_a(lane);
  const LaneRow row_b = lane_row_b(lane);
  int under[WARP_P / 16];
#pragma unroll
  for (int i = 0; i < WARP_P / 16; i++) {
    const Pixel p = pixel_of(warp_p * WARP_P + i * 16 + row_a.row);
    const int row = p.n * params.image_rows + p.h * params.in_stride_h - first_row;
    const int at = row * params.halo_w + p.w * params.in_stride_w - first_column;
    under[i] = p.n < params.images ? at : 0;  // pixels past the end read anything
  }
  const unsigned read_b =
      stages + swizzled<ROW_CHUNKS>(warp_m * WARP_M + row_b.row, row_b.chunk);

  Sums<WARP_P, WARP_M> sums;
  unsigned from_slot = 0;
  unsigned halo = halos;
  int tap = 0;
  int channel = first_chunk * TILE_K;
  int shift = shifts[0];
  for (int step = 0; step < steps; step++) {
    if constexpr (!RESIDENT) {
      wait_copies<STAGES - 2>();
      // This step's weights and halo are complete, and all have read what is overwritten next.
      __syncthreads();
      if (HALO_BUFFERS > 1 && tap == 0 && channel + TILE_K < end_channel) {
        copy_halo(channel + TILE_K, halos == halo ? halos + HALO_BYTES : halos);
      }
      copy_weights();
    }
    unsigned a[WARP_P / 16];
#pragma unroll
    for (int i = 0; i < WARP_P / 16; i++) {
      a[i] = halo + swizzled<ROW_CHUNKS>(under[i] + shift, row_a.chunk);
    }
    tap++;
    if (tap == params.taps) {
      tap = 0;
      channel += TILE_K;
      if (HALO_BUFFERS > 1) {
        halo = halos == halo ? halos + HALO_BYTES : halos;
      }
    }
    shift = shifts[tap];  // a step ahead
    sums.template add<Scalar, TILE_K>(a, read_b + from_slot);
    from_slot = from_slot == (STAGES - 1) * B_BYTES ? 0 : from_slot + B_BYTES;
  }
  wait_copies<0>();
  __syncthreads();  // all have read the weights and the halo

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
