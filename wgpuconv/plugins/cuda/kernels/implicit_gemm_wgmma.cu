// Implicit GEMM on Hopper's warpgroup products: halves or bfloats in, or floats, which are
// multiplied as TF32, or whole; sums in float. The product, the gather and `taps` are those of
// implicit_gemm_mma.
//
// A launch may compute several phases of a transposed convolution, which gather the same pixels: a
// tile belongs to one of them, each with filters and places of the output of its own.
//
// Each block stays on its multiprocessor and computes one tile after the other, TILE_P pixels by
// TILE_M filters. Its warpgroups have different work. The last one, the producer, copies the steps
// over k to a ring of STAGES slots in shared memory; the others, the consumers, multiply a share
// of the pixels each, and store them. While they store, the producer copies the next tile's first
// steps. A slot has two barriers: `full` counts what has arrived, `empty` the warps that have done
// with it.
//
// A slot holds rows of 128 bytes: of A as swizzled<8> permutes them, gathered in copies of 16
// bytes; of B as pack_filters writes them with CORES, in one copy. The weight of a pointwise product
// need not be packed: its rows are those of B, and are copied like A's. If B of all steps has room
// beside the slots, it is copied but once (RESIDENT), and all tiles of a block have the same filters.
//
// With PLANES nothing is gathered: the product is pointwise, and its input has its channels first.
// A row of A then is a channel of the pixels that lie side by side in 128 bytes; each such block of
// pixels has the rows of a whole step, one after the other.
//
// With IM2COL, one thread of the producer asks the copy engine for all rows of a step at once, which
// are channels under one tap, and for those of an unpacked weight (Thakkar et al., CUTLASS's
// implicit GEMM for Hopper). Else the producer's threads gather chunks.
//
// Halves are multiplied from shared memory, in either order, and floats that the copy engine has
// rounded to TF32 on their way. Of other floats, A goes through registers, which rounds it; without
// WHOLE, products of one half of a step run while the other half is rounded.
//
// With WHOLE, floats stay floats: each is the sum of what TF32 holds of it and of what TF32 holds of
// the rest, and three of the four products of those are added up (Markidis et al. 2018,
// arXiv:1803.04014). Tensor cores cut off what a sum does not hold instead of rounding it, so each
// step's products are summed by themselves, the small ones first, and added outside (Ootomo and
// Yokota 2022, arXiv:2203.03341). An infinity, and what TF32 rounds to one, has no rest: it becomes
// NaN.
//
// What goes out does so through shared memory, slice by slice: threads copy it to its places, or,
// with BULK_OUT, one of them asks the copy engine to, and all go on to the next tile.
//
// The sum over k may be split. Either the blocks of a CLUSTER take one split each of the same tile,
// the only one of the block; then each adds up its share of the tile from the shared memory of all.
// Or, with SPLIT, partial sums go to y as floats, one slice a split, and reduce_splits finishes.

#include "wgmma.cuh"
#include "mma.cuh"
#include "gather.cuh"

using Scalar = Half;
constexpr int TILE_P = 128;
constexpr int TILE_M = 128;
constexpr int STAGES = 5;
constexpr int BLOCKS = 1;  // of a multiprocessor, 1 or 2: one multiplies while the other stores
constexpr bool PLANES = false;  // A's pixels lie side by side, in whole and aligned chunks
constexpr bool IM2COL = false;  // A comes through `x_map`
constexpr bool WHOLE = false;   // floats, not what TF32 holds of them
constexpr bool PACKED = true;   // else `packed` is the weight, whose channels lie side by side in
                                // whole copies; if the copy engine does not gather, of one tap
constexpr bool RESIDENT = false;  // B of all K_STEPS stays, from the block's first tile on
constexpr int K_STEPS = 1;
constexpr bool CACHED = true;  // A goes through the first-level cache: taps share pixels
constexpr bool CHANNELS_LAST = true;  // the output's order
constexpr int OUT_VECTOR = 8;  // elements of one store
constexpr int STORED_M = 64;      // filters that a consumer stores at once, of 64 pixels
constexpr bool BULK_OUT = false;  // through `y_map`: pixels follow each other, in whole copies
constexpr bool SPLIT = false;
constexpr int CLUSTER = 1;  // blocks that share the sum of a tile
using Out = Half;  // Scalar, or float for partial sums
constexpr Activation ACTIVATION = Activation::identity;
constexpr bool RESIDUAL = false;  // else `residual` is not read
constexpr int THREADS = 384;
constexpr int SHARED_BYTES = 184952;

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
  int x_c;       // over channels
  int channels;  // of a group
  int y_base;
  int y_g;  // strides of the output over groups, images, filters, rows, columns
  int y_n;
  int y_m;
  int y_h;
  int y_w;
  int phases;  // that share the gather,
  int phase_columns;  // in rows of so many
  int y_phase_h;  // strides of the output over those rows and columns
  int y_phase_w;
  int m;  // filters of a group
  int m_tiles;
  int p_tiles;
  int groups;
  int tiles;  // of all filters, phases, pixels, groups and splits
  int k_steps;
  int splits;
  int y_elements;  // of the whole output: the size of one slice of partial sums
  float act_a;
  float act_b;
};

constexpr int BYTES = sizeof(Scalar);
static_assert(sizeof(Out) == (SPLIT ? 4 : BYTES), "partial sums are floats");
static_assert(!SPLIT || CLUSTER == 1, "the sum is split in one way");
constexpr int CHUNK = 16 / BYTES;  // elements of one copy
constexpr int ROW_CHUNKS = 8;
constexpr int ROW_BYTES = 128;
constexpr int TILE_K = ROW_BYTES / BYTES;
constexpr int PLANE_P = ROW_BYTES / BYTES;  // pixels of a row of A that is a channel
constexpr int STEP_PRODUCTS = ROW_BYTES / 32;  // over the k of one step
constexpr int A_BYTES = TILE_P * ROW_BYTES;
constexpr int FILTER_BYTES = TILE_M * ROW_BYTES;
constexpr bool ROUNDED = BYTES == 4 && IM2COL && !WHOLE;  // by the copy engine
static_assert(PACKED || BYTES == 2 || ROUNDED, "else floats are rounded when they are packed");
constexpr int B_BYTES = FILTER_BYTES * (WHOLE ? 2 : 1);  // of the rests as well
constexpr int STAGE_BYTES = A_BYTES + (RESIDENT ? 0 : B_BYTES);
// Of a slot, what does not come in chunks of threads.
constexpr int BULK_BYTES =
    (IM2COL ? A_BYTES : 0) + (!RESIDENT && (IM2COL || PACKED) ? B_BYTES : 0);
static_assert(!IM2COL || !PLANES, "rows are pixels");
static_assert(!RESIDENT || IM2COL || PACKED, "B comes in bulk");

constexpr int GROUP = 128;  // threads of a warpgroup
constexpr int CONSUMERS = THREADS / GROUP - 1;
// For sync_some; each consumer has one before them for itself.
constexpr int PRODUCER_BARRIER = 1 + CONSUMERS;
constexpr int CONSUMER_BARRIER = 2 + CONSUMERS;
constexpr int ROWS = TILE_P / CONSUMERS / 64;  // of 64 pixels that a consumer multiplies
static_assert(ROWS == 1 || ROWS == 2);
constexpr int A_ROWS = GROUP / ROW_CHUNKS;  // that one copy of each thread covers
constexpr int A_COPIES = TILE_P / A_ROWS;
// What a thread may hold: more than that in all, and a consumer would wait for ever. A producer that
// gathers needs two a copy; the thread that asks the copy engine keeps two tiles' places.
constexpr int PRODUCER_REGISTERS = BLOCKS == 2 ? 40 : IM2COL ? 56 : A_COPIES > 8 ? 72 : 40;
constexpr int CONSUMER_REGISTERS =
    BLOCKS == 2 ? 96 : CONSUMERS == 3 ? 144 : IM2COL ? 224 : A_COPIES > 8 ? 216 : 232;
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <=
                  (CONSUMERS + 1) * (65536 / (BLOCKS * THREADS) / 8 * 8),
              "all of a multiprocessor's, as the kernel begins with them");
static_assert(!WHOLE || (BYTES == 4 && ROWS == 1 && TILE_M <= 128), "registers for two sums");
static_assert(BLOCKS == 1 || (BLOCKS == 2 && ROWS == 1 && TILE_M <= 64), "registers for the sums");

// What a consumer stores at once: a line of memory of each pixel, or less.
static_assert(TILE_M % STORED_M == 0 && STORED_M * BYTES <= ROW_BYTES);
constexpr int STORED = BULK_OUT        ? 2 * 64 * STORED_M  // of which one is still read
                       : CHANNELS_LAST ? 64 * (STORED_M + 8)
                                       : STORED_M * (64 + CHUNK);
constexpr int STORED_BYTES = SPLIT || CLUSTER > 1 ? 0 : BYTES * STORED;
static_assert(!BULK_OUT || (CHANNELS_LAST && !SPLIT && CLUSTER == 1), "rows of whole sums");
constexpr int RESIDENT_AT = STAGES * STAGE_BYTES;
constexpr int STORED_AT = RESIDENT_AT + (RESIDENT ? K_STEPS * B_BYTES : 0);
constexpr int PLACES_AT = STORED_AT + CONSUMERS * STORED_BYTES;
constexpr int PIXELS_AT = PLACES_AT + (BULK_OUT ? 0 : 4 * TILE_P);
constexpr int BARRIERS_AT = PIXELS_AT + (IM2COL ? 0 : 2 * 8 * TILE_P);

// Of a cluster: the sums of a block in the place of the slots, with rows that begin on other banks.
constexpr int SUMS_ROWS = CHANNELS_LAST ? TILE_P : TILE_M;
constexpr int SUMS_PITCH = (CHANNELS_LAST ? TILE_M : TILE_P) + 8;
static_assert(CLUSTER == 1 || 4 * SUMS_ROWS * SUMS_PITCH <= STORED_AT, "the sums fit");
constexpr int BARRIERS = 2 * STAGES + 1 + 2 * CONSUMERS;
static_assert(SHARED_BYTES >= BARRIERS_AT + 8 * BARRIERS, "the host asks for enough");

// One tile of the output, or one split of it.
struct Work {
  int m_tile;
  int phase;
  int p_tile;
  int group;
  int split;
  int first_step;
  int end_step;
};

__device__ inline Work work_of(const Params& params, int tile) {
  Work work;
  if constexpr (CLUSTER > 1) {
    work.split = tile % CLUSTER;
    tile /= CLUSTER;
  }
  // Filters innermost, of one phase after the other: blocks that run side by side share their
  // pixels in the second-level cache.
  work.m_tile = tile % params.m_tiles;
  tile /= params.m_tiles;
  work.phase = 0;
  if (params.phases > 1) {  // a division takes a while, of a tile of short sums
    work.phase = tile % params.phases;
    tile /= params.phases;
  }
  work.p_tile = tile % params.p_tiles;
  tile /= params.p_tiles;
  work.group = tile % params.groups;
  if constexpr (CLUSTER == 1) {
    work.split = tile / params.groups;
  }
  work.first_step = static_cast<long long>(work.split) * params.k_steps / params.splits;
  work.end_step = static_cast<long long>(work.split + 1) * params.k_steps / params.splits;
  return work;
}

// Which slot comes next, and the parity of its phase.
struct Slot {
  int at = 0;
  unsigned parity = 0;

  __device__ void advance() {
    at++;
    if (at == STAGES) {
      at = 0;
      parity ^= 1;
    }
  }
};

__device__ inline unsigned full_barrier(unsigned shared, int slot) {
  return shared + BARRIERS_AT + 8 * slot;
}
__device__ inline unsigned empty_barrier(unsigned shared, int slot) {
  return shared + BARRIERS_AT + 8 * (STAGES + slot);
}
__device__ inline unsigned resident_barrier(unsigned shared) {
  return shared + BARRIERS_AT + 8 * 2 * STAGES;
}

// Of a consumer's two places for what goes out.
__device__ inline unsigned residual_barriers(unsigned shared, int consumer) {
  return resident_barrier(shared) + 8 + 16 * consumer;
}

// A thread of the producer copies this chunk of every A_ROWS-th row of A from this one on.
__device__ inline int copied_chunk() { return threadIdx.x % ROW_CHUNKS; }
__device__ inline int copied_row() { return threadIdx.x % GROUP / ROW_CHUNKS; }

// Where a chunk of a row of A lies.
__device__ inline int place_in_a(int row, int chunk) {
  if constexpr (PLANES && BYTES == 4) {
    // A warp loads floats of four neighbouring rows at once, from the same two chunks of each.
    return row * ROW_BYTES + (chunk ^ (row % 4 * 2)) * 16;
  } else {
    return swizzled<ROW_CHUNKS>(row, chunk);
  }
}

// Copies A: rows that are pixels under their taps,
struct Gather {
  const Params& params;
  const Scalar* x;
  const int2* taps;
  int2* pixels = reinterpret_cast<int2*>(shared_memory() + PIXELS_AT);
  int2 pixel[A_COPIES];
  const int2* taps_at;
  int2 tap;  // of the step that is copied next: loaded a step ahead

  __device__ Gather(const Params& params, const Scalar* x, const int2* taps)
      : params(params), x(x), taps(taps) {}

  __device__ void begin(const Work& work) {
    const int thread = threadIdx.x % GROUP;
    taps_at = taps + work.first_step * ROW_CHUNKS + copied_chunk();
    tap = *taps_at;

    // Each pixel's first element, and which taps are inside: bit r row r, bit 16 + s column s.
    // Pixels past the end copy the last one again.
    for (int i = thread; i < TILE_P; i += GROUP) {
      const int p = min(work.p_tile * TILE_P + i, params.pixels - 1);
      const int q = p % params.q_hw;
      const int h = q / params.q_w * params.in_stride_h;
      const int w = q % params.q_w * params.in_stride_w;
      int2 found;
      found.x = work.group * params.x_g + p / params.q_hw * params.x_n + h * params.x_h +
                w * params.x_w;
      found.y =
          taps_inside(h + params.tap_h, params.tap_step_h, params.tap_rows, params.in_h) |
          taps_inside(w + params.tap_w, params.tap_step_w, params.tap_columns, params.in_w) << 16;
      pixels[i] = found;
    }
    sync_some<GROUP>(PRODUCER_BARRIER);
#pragma unroll
    for (int i = 0; i < A_COPIES; i++) {
      pixel[i] = pixels[i * A_ROWS + copied_row()];
    }
    // The next tile's pixels go elsewhere: not all threads have read these.
    pixels = reinterpret_cast<int2*>(shared_memory() + PIXELS_AT) +
             (pixels == reinterpret_cast<int2*>(shared_memory() + PIXELS_AT) ? TILE_P : 0);
  }

  __device__ void copy_step(unsigned to, unsigned) {
    to += place_in_a(copied_row(), copied_chunk());
#pragma unroll
    for (int i = 0; i < A_COPIES; i++) {
      copy_async<16, CACHED>(to + i * A_ROWS * ROW_BYTES, x + (pixel[i].x + tap.x),
                             (pixel[i].y & tap.y) == tap.y);
    }
    taps_at += ROW_CHUNKS;
    tap = *taps_at;
  }
};

// rows that are channels of a block of pixels,
struct Planes {
  const Params& params;
  const Scalar* x;
  int pixel[TILE_P / PLANE_P];  // in each block, the first one of the chunk
  int channel;                  // of the first row of the step that is copied next

  __device__ Planes(const Params& params, const Scalar* x) : params(params), x(x) {}

  __device__ void begin(const Work& work) {
    // A chunk is all of one image. Those past the end copy the last one again.
#pragma unroll
    for (int i = 0; i < TILE_P / PLANE_P; i++) {
      const int p = min(work.p_tile * TILE_P + i * PLANE_P + copied_chunk() * CHUNK,
                        params.pixels - CHUNK);
      pixel[i] = work.group * params.x_g + p / params.q_hw * params.x_n + p % params.q_hw;
    }
    channel = work.first_step * TILE_K + copied_row();
  }

  __device__ void copy_step(unsigned to, unsigned) {
    to += place_in_a(copied_row(), copied_chunk());
#pragma unroll
    for (int row = 0; row < TILE_K; row += A_ROWS) {
      const bool valid = channel + row < params.channels;
      const Scalar* plane = x + (valid ? channel + row : 0) * params.x_c;
#pragma unroll
      for (int i = 0; i < TILE_P / PLANE_P; i++) {
        copy_async<16, CACHED>(to + (i * TILE_K + row) * ROW_BYTES, plane + pixel[i], valid);
      }
    }
    channel += TILE_K;
  }
};

// or rows that the copy engine gathers: a block of channels under each tap, then the next block.
struct Columns {
  const Params& params;
  const TensorMap& map;
  int n;  // of the first pixel
  int h;  // of its tap with the lowest place
  int w;
  int lowest_h;  // from that tap to the first one
  int lowest_w;
  int channel;  // of the step that is copied next
  int row;      // of taps
  int column;

  __device__ Columns(const Params& params, const TensorMap& map) : params(params), map(map) {
    lowest_h = max((1 - params.tap_rows) * params.tap_step_h, 0);
    lowest_w = max((1 - params.tap_columns) * params.tap_step_w, 0);
  }

  __device__ void begin(const Work& work) {
    const int p = work.p_tile * TILE_P;
    const int q = p % params.q_hw;
    n = p / params.q_hw;
    h = q / params.q_w * params.in_stride_h + params.tap_h - lowest_h;
    w = q % params.q_w * params.in_stride_w + params.tap_w - lowest_w;
    const int columns = max(params.tap_columns, 1);  // a phase may have no taps, and no steps
    const int taps = max(params.tap_rows, 1) * columns;
    channel = work.group * params.channels + work.first_step / taps * TILE_K;
    row = work.first_step % taps / columns;
    column = work.first_step % columns;
  }

  __device__ void copy_step(unsigned to, unsigned full) {
    copy_columns(to, map, channel, w, h, n, lowest_w + column * params.tap_step_w,
                 lowest_h + row * params.tap_step_h, full);
    column++;
    if (column == params.tap_columns) {
      column = 0;
      row++;
    }
    if (row == params.tap_rows) {
      row = 0;
      channel += TILE_K;
    }
  }
};

// Copies B: what pack_filters has written, each step in one piece, by one thread; or rows of the
// weight as it lies.
struct Filters {
  const Params& params;
  const Scalar* all;
  const TensorMap& map;
  const Scalar* next;  // of the step that is copied next
  int rows;            // of the weight, from the thread's first one to the last
  int first_row;       // of the weight, of the tile
  int channel;         // of the step that is copied next
  int tap;             // likewise, where the copy engine brings it

  __device__ Filters(const Params& params, const Scalar* all, const TensorMap& map)
      : params(params), all(all), map(map) {}

  __device__ void begin(const Work& work) {
    const int taps = IM2COL ? max(params.tap_rows * params.tap_columns, 1) : 1;
    channel = work.first_step / taps * TILE_K;
    tap = work.first_step % taps;
    first_row = work.group * params.m + work.m_tile * TILE_M;
    if constexpr (PACKED) {
      const int tile =
          (work.phase * params.groups + work.group) * params.m_tiles + work.m_tile;
      const int step = tile * params.k_steps + work.first_step;
      next = all + static_cast<long long>(step) * (B_BYTES / BYTES);
    } else if constexpr (!IM2COL) {
      rows = params.m - work.m_tile * TILE_M - copied_row();
      channel += copied_chunk() * CHUNK;
      next = all + (first_row + copied_row()) * params.channels + channel;
    }
  }

  __device__ void copy_step(unsigned to, unsigned full) {
    if constexpr (PACKED) {
      if (threadIdx.x % GROUP == 0) {
        copy_bulk(to, next, B_BYTES, full);
      }
      next += B_BYTES / BYTES;
    } else if constexpr (IM2COL) {
      copy_rows(to, map, channel, tap, first_row, full);
      tap++;
      if (tap == params.tap_rows * params.tap_columns) {
        tap = 0;
        channel += TILE_K;
      }
    } else {
      const unsigned own = to + swizzled<ROW_CHUNKS>(copied_row(), copied_chunk());
#pragma unroll
      for (int row = 0; row < TILE_M; row += A_ROWS) {
        const bool valid = row < rows && channel < params.channels;
        copy_async<16>(own + row * ROW_BYTES, valid ? next + row * params.channels : all, valid);
      }
      next += TILE_K;
      channel += TILE_K;
    }
  }
};

template <typename Rows>
__device__ inline void produce(const Params& params, Rows rows, Filters filters) {
  const unsigned shared = shared_address(shared_memory());
  static_assert(A_ROWS % 8 == 0, "the permutation repeats every eight rows");
  if constexpr (RESIDENT) {
    const unsigned full = resident_barrier(shared);
    if (threadIdx.x % GROUP == 0) {
      arrive_expecting(full, K_STEPS * B_BYTES);
    }
    filters.begin(work_of(params, blockIdx.x));
    for (int step = 0; step < K_STEPS; step++) {
      filters.copy_step(shared + RESIDENT_AT + step * B_BYTES, full);
    }
  }
  Slot slot;
  for (int tile = blockIdx.x; tile < params.tiles; tile += gridDim.x) {
    const Work work = work_of(params, tile);
    rows.begin(work);
    if constexpr (!RESIDENT) {
      filters.begin(work);
    }
    for (int step = work.first_step; step < work.end_step; step++) {
      const unsigned full = full_barrier(shared, slot.at);
      const unsigned to = shared + slot.at * STAGE_BYTES;
      wait_barrier(empty_barrier(shared, slot.at), slot.parity ^ 1);
      if (BULK_BYTES > 0 && threadIdx.x % GROUP == 0) {
        arrive_expecting(full, BULK_BYTES);
      }
      if constexpr (!RESIDENT) {
        filters.copy_step(to + A_BYTES, full);
      }
      rows.copy_step(to, full);
      if constexpr (!IM2COL) {
        arrive_with_copies(full);
      }
      slot.advance();
    }
  }
  commit_copies();
  wait_copies<0>();  // none may be on its way when the thread ends
}

// Floats of A on their way to the tensor cores, rounded: half of the pixels, or half of k where
// there are but 64 pixels.
constexpr int HALF = ROWS == 2 ? STEP_PRODUCTS : STEP_PRODUCTS / 2;

// What one consumer holds in registers. Products that are not done still use it.
struct Operands {
  float acc[ROWS][TILE_M / 8][4];
  unsigned fragments[2][HALF][4];
};

// Matrix A of 64 pixels, whose rows begin at `a`, of the k-th product.
__device__ inline unsigned long long pixels_of(unsigned a, int k) {
  if constexpr (PLANES) {
    // Groups of eight rows, each a channel of all 64 pixels. (One of the two distances would be
    // that to more pixels.)
    return matrix(a + k * 16 * ROW_BYTES, 1024, 1024) | 1ull << 62;
  } else {
    return swizzled_matrix(a + k * 32);
  }
}

// Matrix B, whose filters begin at `b`, of the k-th product.
__device__ inline unsigned long long filters_of(unsigned b, int k) {
  return PACKED ? matrix(b + k * 2 * TILE_M * 16, TILE_M * 16, 128) : swizzled_matrix(b + k * 32);
}

// Where a lane begins to load the floats of its warp, which has 16 of 64 pixels.
__device__ inline int place_of_fragments() {
  const int warp = threadIdx.x % GROUP / 32;
  const int lane = threadIdx.x % 32;
  if constexpr (PLANES) {
    const int p = warp * 16 + lane / 4;
    return p / PLANE_P * TILE_K * ROW_BYTES + place_in_a(lane % 4, p % PLANE_P / CHUNK) +
           p % CHUNK * BYTES;
  } else {
    const LaneRow row = lane_row_a(lane);
    return place_in_a(warp * 16 + row.row, row.chunk);
  }
}

// A warp's floats of the k-th product, in the order that load_matrices gives them; `at` bytes beyond
// where a lane begins.
__device__ inline void load_fragment(unsigned (&to)[4], unsigned begin, int at, int k) {
  if constexpr (PLANES) {
#pragma unroll
    for (int i = 0; i < 4; i++) {  // eight pixels more, and four channels
      to[i] = load_word((begin ^ (i % 2 * 32)) + at + (k * 8 + i / 2 * 4) * ROW_BYTES);
    }
  } else {
    load_matrices(to, (begin ^ (32 * k)) + at);
  }
}

// Adds the products of one step, whose A begins at `a` for this consumer. Those of the step before
// are done when it calls `release`; of whole floats, all are done when it returns.
template <typename Release>
__device__ inline void multiply(Operands& own, unsigned a, unsigned b, Release release) {
  if constexpr (WHOLE) {
    unsigned held[STEP_PRODUCTS][4];
    unsigned rest[STEP_PRODUCTS][4];
    const unsigned begin = a + place_of_fragments();
#pragma unroll
    for (int k = 0; k < STEP_PRODUCTS; k++) {
      load_fragment(rest[k], begin, 0, k);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float v = __uint_as_float(rest[k][i]);
        const float most = as_operand(v);
        held[k][i] = __float_as_uint(most);
        rest[k][i] = __float_as_uint(as_operand(v - most));
      }
    }
    float sums[TILE_M / 8][4] = {};
    begin_products();
#pragma unroll
    for (int k = 0; k < STEP_PRODUCTS; k++) {
      multiply_add_async<Scalar>(sums, rest[k], filters_of(b, k));
      multiply_add_async<Scalar>(sums, held[k], filters_of(b + FILTER_BYTES, k));
    }
#pragma unroll
    for (int k = 0; k < STEP_PRODUCTS; k++) {
      multiply_add_async<Scalar>(sums, held[k], filters_of(b, k));
    }
    commit_products();
    wait_products<0>();
#pragma unroll
    for (int j = 0; j < TILE_M / 8; j++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        own.acc[0][j][i] += sums[j][i];
      }
    }
  } else if constexpr (BYTES == 2 || ROUNDED) {
    if constexpr (!IM2COL) {
      publish_copies();
    }
    begin_products();
#pragma unroll
    for (int k = 0; k < STEP_PRODUCTS; k++) {
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
        multiply_add_async<Scalar, PLANES>(own.acc[i], pixels_of(a + i * 64 * ROW_BYTES, k),
                                           filters_of(b, k));
      }
    }
    commit_products();
    wait_products<1>();
    release();
  } else {
    const unsigned begin = a + place_of_fragments();
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int first_k = ROWS == 2 ? 0 : half * HALF;
      const int i = ROWS == 2 ? half : 0;
#pragma unroll
      for (int k = 0; k < HALF; k++) {
        load_fragment(own.fragments[half][k], begin, i * 64 * ROW_BYTES, first_k + k);
        round_operands<Scalar>(own.fragments[half][k]);
      }
      begin_products();
#pragma unroll
      for (int k = 0; k < HALF; k++) {
        multiply_add_async<Scalar>(own.acc[i], own.fragments[half][k],
                                   filters_of(b, first_k + k));
      }
      commit_products();
      wait_products<1>();
      if (half == 0) {
        release();
      }
    }
  }
}

// Leaves the sums of this block where the others of the cluster find them.
__device__ inline void leave_sums(const Operands& own, int first_p, int lane) {
  float* sums = reinterpret_cast<float*>(shared_memory());
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
#pragma unroll
    for (int j = 0; j < TILE_M / 8; j++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int p = first_p + i * 64 + half * 8 + lane / 4;
        const int m = j * 8 + lane % 4 * 2;
        const float* pair = own.acc[i][j] + 2 * half;
        if constexpr (CHANNELS_LAST) {
          store_pair(sums + p * SUMS_PITCH + m, pair[0], pair[1]);
        } else {
          sums[m * SUMS_PITCH + p] = pair[0];
          sums[(m + 1) * SUMS_PITCH + p] = pair[1];
        }
      }
    }
  }
}

// Adds up and stores this block's share of the tile. The order of the additions is fixed, so that
// two runs agree to the bit.
__device__ inline void store_share(const Target<Scalar>& target, int block, Scalar* y) {
  constexpr int LOADED = OUT_VECTOR > 4 ? 4 : OUT_VECTOR;
  constexpr int RUNS = (CHANNELS_LAST ? TILE_M : TILE_P) / OUT_VECTOR;
  const unsigned sums = shared_address(shared_memory());
  const int first = block * SUMS_ROWS / CLUSTER * RUNS;
  const int end = (block + 1) * SUMS_ROWS / CLUSTER * RUNS;
  for (int run = first + threadIdx.x; run < end; run += CONSUMERS * GROUP) {
    const int row = run / RUNS;
    const int column = run % RUNS * OUT_VECTOR;
    const int place = target.y_of_pixel[CHANNELS_LAST ? row : column];
    const int m = target.m0 + (CHANNELS_LAST ? column : row);
    if (place < 0 || m >= target.m) {
      continue;
    }
    float parts[CLUSTER][OUT_VECTOR];
#pragma unroll
    for (int i = 0; i < CLUSTER; i++) {
#pragma unroll
      for (int v = 0; v < OUT_VECTOR; v += LOADED) {
        load_remote<LOADED>(parts[i] + v, sums + 4 * (row * SUMS_PITCH + column + v), i);
      }
    }
    const int at = place + m * target.y_m;
    alignas(16) Scalar finished[OUT_VECTOR];
    if (target.residual != nullptr) {
      copy_run<OUT_VECTOR>(finished, target.residual + at);
    }
#pragma unroll
    for (int v = 0; v < OUT_VECTOR; v++) {
      float sum = parts[0][v];
#pragma unroll
      for (int i = 1; i < CLUSTER; i++) {
        sum += parts[i][v];
      }
      sum += to_float(target.bias[CHANNELS_LAST ? m + v : m]);
      if (target.residual != nullptr) {
        sum += to_float(finished[v]);
      }
      finished[v] = from_float<Scalar>(activate<ACTIVATION>(sum, target.act_a, target.act_b));
    }
    copy_run<OUT_VECTOR>(y + at, finished);
  }
}

// The way out of a consumer's sums by the copy engine: in slices of 64 pixels by STORED_M filters,
// which lie in two places by turns, since a copy may still read the last one. The residual comes to
// the slice's place before its sums are complete.
struct BulkStore {
  static constexpr int COLUMNS = TILE_M / STORED_M;
  static constexpr int SLICES = ROWS * COLUMNS;      // of a tile
  static constexpr int HELD = (TILE_M / 8 + 7) / 8;  // pairs of biases of a lane
  static constexpr int PLACE_BYTES = STORED_BYTES / 2;

  const Params& params;
  const TensorMap& residual_map;
  const TensorMap& y_map;
  unsigned char* places;
  unsigned barriers;  // of the residual, one of each place
  int count = 0;      // of slices that have gone out
  int m0;             // the tile's first filter
  int group;          // of filters
  int pixel0;         // the consumer's first pixel
  Scalar held[HELD][2];

  // Asks for what will be added to a slice of the tile.
  __device__ void load_residual(int slice) const {
    const int place = (count + slice) % 2;
    arrive_expecting(barriers + 8 * place, PLACE_BYTES);
    copy_rows(shared_address(places) + place * PLACE_BYTES, residual_map,
              m0 + slice % COLUMNS * STORED_M, group, pixel0 + slice / COLUMNS * 64,
              barriers + 8 * place);
  }

  // Of the next tile. Nobody waits for the biases yet.
  __device__ void begin(const Work& work, const Scalar* bias) {
    const int lane = threadIdx.x % 32;
    m0 = work.m_tile * TILE_M;
    group = work.group;
    pixel0 = work.p_tile * TILE_P + threadIdx.x / GROUP * ROWS * 64;
    // Each lane loads those of some filters, for all lanes that have these.
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      const int m = m0 + (i * 8 + lane / 4) * 8 + lane % 4 * 2;
      held[i][0] = bias[group * params.m + min(m, params.m - 1)];
      held[i][1] = bias[group * params.m + min(m + 1, params.m - 1)];
    }
  }

  // Called while products run, since it waits for what the tile before has stored.
  __device__ void load_residuals() const {
    if (threadIdx.x % GROUP == 0) {
      wait_stores<SLICES == 1 ? 1 : 0>();
      for (int slice = 0; slice < min(SLICES, 2); slice++) {
        load_residual(slice);
      }
    }
  }

  __device__ void store(const float (&acc)[ROWS][TILE_M / 8][4]) {
    const int thread = threadIdx.x % GROUP;
    const int lane = thread % 32;
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
      const int place = (count + slice) % 2;
      unsigned char* staged = places + place * PLACE_BYTES;
      if constexpr (RESIDUAL) {
        wait_barrier(barriers + 8 * place, (count + slice) / 2 % 2);
      } else {
        if (thread == 0) {
          wait_stores<1>();
        }
        Warpgroup::sync();  // the slice that lay here has been read
      }
#pragma unroll
      for (int j = 0; j < STORED_M / 8; j++) {
        const int all_j = slice % COLUMNS * (STORED_M / 8) + j;
        const int m = j * 8 + lane % 4 * 2;
        const float(&sums)[4] = acc[slice / COLUMNS][all_j];
        const float bias0 = from_lane(to_float(held[all_j / 8][0]), all_j % 8 * 4 + lane % 4);
        const float bias1 = from_lane(to_float(held[all_j / 8][1]), all_j % 8 * 4 + lane % 4);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int row = thread / 32 * 16 + half * 8 + lane / 4;
          Scalar* pair = reinterpret_cast<Scalar*>(
              staged + swizzled<STORED_M / CHUNK>(row, m / CHUNK) + m % CHUNK * BYTES);
          float v0 = sums[2 * half] + bias0;
          float v1 = sums[2 * half + 1] + bias1;
          if constexpr (RESIDUAL) {
            v0 += to_float(pair[0]);
            v1 += to_float(pair[1]);
          }
          store_pair(pair, activate<ACTIVATION>(v0, params.act_a, params.act_b),
                     activate<ACTIVATION>(v1, params.act_a, params.act_b));
        }
      }
      publish_copies();
      Warpgroup::sync();  // the slice is complete
      if (thread == 0) {
        store_box(y_map, shared_address(staged), m0 + slice % COLUMNS * STORED_M, group,
                  pixel0 + slice / COLUMNS * 64);
        commit_stores();
        if (RESIDUAL && slice + 2 < SLICES) {
          wait_stores<0>();
          load_residual(slice + 2);
        }
      }
    }
    count += SLICES;
  }

  // Before shared memory goes away.
  __device__ void end() const {
    if (threadIdx.x % GROUP == 0) {
      wait_stores<0>();
    }
  }
};

__device__ inline void consume(const Params& params, const Scalar* bias, const Scalar* residual,
                               Out* y, const TensorMap& residual_map, const TensorMap& y_map) {
  const int group = threadIdx.x / GROUP;
  const int warp = threadIdx.x % GROUP / 32;
  const int lane = threadIdx.x % 32;
  const unsigned shared = shared_address(shared_memory());
  unsigned char* stored = shared_memory() + STORED_AT + group * STORED_BYTES;
  int* y_of_pixel = reinterpret_cast<int*>(shared_memory() + PLACES_AT) + group * 64 * ROWS;
  BulkStore out{params, residual_map, y_map, stored, residual_barriers(shared, group)};
  Slot slot;
  for (int tile = blockIdx.x; tile < params.tiles; tile += gridDim.x) {
    const Work work = work_of(params, tile);
    if constexpr (BULK_OUT) {
      out.begin(work, bias);
    } else {
      int y_base = params.y_base + work.group * params.y_g;
      if (work.phase > 0) {
        y_base += work.phase / params.phase_columns * params.y_phase_h +
                  work.phase % params.phase_columns * params.y_phase_w;
      }
      for (int i = threadIdx.x % GROUP; i < 64 * ROWS; i += GROUP) {
        const int p = work.p_tile * TILE_P + group * 64 * ROWS + i;
        const int q = p % params.q_hw;
        y_of_pixel[i] = p < params.pixels
                            ? y_base + p / params.q_hw * params.y_n +
                                  q / params.q_w * params.y_h + q % params.q_w * params.y_w
                            : -1;
      }
    }

    Operands own;
#pragma unroll
    for (int i = 0; i < ROWS * (TILE_M / 8) * 4; i++) {
      own.acc[i / (TILE_M / 2)][i / 4 % (TILE_M / 8)][i % 4] = 0.0f;
    }
    if constexpr (RESIDENT) {
      wait_barrier(resident_barrier(shared), 0);
    }
    unsigned previous = 0;  // the barrier of the slot whose products may still run
    for (int step = work.first_step; step < work.end_step; step++) {
      wait_barrier(full_barrier(shared, slot.at), slot.parity);
      const unsigned at = shared + slot.at * STAGE_BYTES;
      const unsigned own_a = at + group * ROWS * 64 * ROW_BYTES;
      const unsigned b = RESIDENT ? shared + RESIDENT_AT + step * B_BYTES : at + A_BYTES;
      multiply(own, own_a, b, [&] { arrive_warp(previous, lane); });
      if (BULK_OUT && RESIDUAL && step == 0) {
        out.load_residuals();
      }
      previous = empty_barrier(shared, slot.at);
      if (WHOLE) {
        arrive_warp(previous, lane);
        previous = 0;
      }
      slot.advance();
    }
    wait_products<0>();
    arrive_warp(previous, lane);

    const Target<Scalar> all{y_of_pixel, bias + work.group * params.m, work.m_tile * TILE_M,
                             params.m, params.y_m, params.act_a, params.act_b,
                             RESIDUAL ? residual : nullptr};
    if constexpr (SPLIT) {
      Warpgroup::sync();  // the places of the pixels are there
      store_partial<64, CHANNELS_LAST && OUT_VECTOR % 2 == 0>(
          own.acc, warp * 16, 0, lane, all,
          reinterpret_cast<float*>(y) + static_cast<long long>(work.split) * params.y_elements);
      Warpgroup::sync();  // all have read them
    } else if constexpr (CLUSTER > 1) {
      sync_some<CONSUMERS * GROUP>(CONSUMER_BARRIER);  // no products read the slots any more
      leave_sums(own, group * 64 * ROWS + warp * 16, lane);
      sync_cluster();
      Target<Scalar> target = all;
      target.y_of_pixel -= group * 64 * ROWS;
      store_share(target, work.split, reinterpret_cast<Scalar*>(y));
      leave_cluster();
    } else if constexpr (BULK_OUT) {
      out.store(own.acc);
    } else {
      if constexpr (RESIDUAL) {
        Warpgroup::sync();  // the places of the pixels are there
      }
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
        Target<Scalar> target = all;
        target.y_of_pixel += 64 * i;
        store<Warpgroup, 64, STORED_M, CHANNELS_LAST, OUT_VECTOR, ACTIVATION, 64>(
            reinterpret_cast<const float(&)[1][TILE_M / 8][4]>(own.acc[i]), warp * 16, 0, lane,
            target, stored, reinterpret_cast<Scalar*>(y));
        Warpgroup::sync();  // all have read what was staged
      }
    }
  }
  if constexpr (BULK_OUT) {
    out.end();
  }
}

extern "C" __global__ void CLUSTER_OF(CLUSTER) __launch_bounds__(THREADS, BLOCKS)
    implicit_gemm_wgmma(Params params, const Scalar* __restrict__ x,
                        const Scalar* __restrict__ packed, const int2* __restrict__ taps,
                        const Scalar* __restrict__ bias, const Scalar* __restrict__ residual,
                        Out* __restrict__ y, const __grid_constant__ TensorMap x_map,
                        const __grid_constant__ TensorMap packed_map,
                        const __grid_constant__ TensorMap residual_map,
                        const __grid_constant__ TensorMap y_map) {
  const unsigned shared = shared_address(shared_memory());
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      // What comes in bulk arrives once, chunks by each thread that copies some.
      set_up_barrier(full_barrier(shared, i), (BULK_BYTES > 0) + (IM2COL ? 0 : GROUP));
      set_up_barrier(empty_barrier(shared, i), CONSUMERS * GROUP / 32);
    }
    set_up_barrier(resident_barrier(shared), 1);
    for (int i = 0; i < 2 * CONSUMERS; i++) {
      set_up_barrier(residual_barriers(shared, 0) + 8 * i, 1);
    }
    publish_barriers();
  }
  wait_for_previous();
  __syncthreads();
  if (threadIdx.x / GROUP == CONSUMERS) {
    give_registers<PRODUCER_REGISTERS>();
    const Filters filters(params, packed, packed_map);
    if constexpr (IM2COL) {
      if (threadIdx.x % GROUP == 0) {
        produce(params, Columns(params, x_map), filters);
      }
    } else if constexpr (PLANES) {  // which have no taps
      produce(params, Planes(params, x), filters);
    } else {
      produce(params, Gather(params, x, taps), filters);
    }
    if constexpr (CLUSTER > 1) {
      sync_cluster();
      leave_cluster();
    }
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(params, bias, residual, y, residual_map, y_map);
  }
}
