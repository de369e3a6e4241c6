// Direct convolution on tensor cores for few channels or few filters: halves, bfloats, or floats as
// TF32. Such problems are bound by memory, so hardly more is read than the input, once for each tile
// of filters, and once the filters are there no thread waits for another warp's.
//
// A warp keeps TILE_M filters in registers, as fragments, and walks down a strip of TILE_W columns
// of the output. The input's rows come to a ring in shared memory that is the warp's own, several
// rows ahead. Where they lie as the ring wants them, they are copied (COPY_BYTES at a time), else
// they come through registers, with zeros behind the channels; so inputs of either layout do.
//
// Filters are the rows of a product, pixels its columns; it takes 32 bytes along (s, c), so taps of
// few channels share it. Any order of what is multiplied will do as long as both operands have it:
// a lane takes 8 neighbouring bytes of a pixel, where ldmatrix would give it two times 4. Likewise
// the rows need not be neighbouring filters: a lane's are, so that it stores up to 16 bytes of a
// pixel at once.

#include "ptx.cuh"
#include "activations.cuh"

using Scalar = Half;
constexpr int TILE_H = 2;  // rows and columns of the output that a warp computes at once
constexpr int TILE_W = 32;
constexpr int TILE_M = 16;
constexpr int C = 16;      // channels of a group
constexpr int PITCH = 32;  // bytes from one pixel of the ring to the next
constexpr int R = 3;
constexpr int S = 3;
constexpr int STRIDE_H = 1;
constexpr int STRIDE_W = 1;
constexpr int STEP_H = 1;  // input rows and columns from one tap to the next
constexpr int STEP_W = 1;
constexpr int RING = 8;         // rows, a power of two
constexpr int COPY_BYTES = 16;  // 8, or 0: through registers
constexpr int FILTER_VECTOR = 8;  // elements of the weight that are loaded at once; else 1
constexpr bool WEIGHT_LAST = false;  // its channels lie side by side
constexpr int WIDE = 1;  // pixels that are loaded at once: side by side, and aligned
constexpr int LEAD = 0;  // pixels before the first tap's, so that they are
constexpr bool CHANNELS_LAST = true;  // the output's order
constexpr int OUT_VECTOR = 8;  // elements of one store
constexpr bool STREAMED = false;  // the output is more than a cache would keep
constexpr Activation ACTIVATION = Activation::identity;
constexpr bool RESIDUAL = false;  // else `residual` is not read
constexpr int THREADS = 128;
constexpr int BLOCKS = 4;  // a multiprocessor: what the registers must suffice for
constexpr int SHARED_BYTES = 39552;

struct Params {
  int tasks;   // strips of all images
  int strips;  // side by side
  int chunks;  // strips one below the other
  int rows;    // of a strip, of the output
  int workers;  // blocks with the same filters
  int q_h;  // output pixels of this launch, of one image
  int q_w;
  int in_h;
  int in_w;
  int first_h;  // input pixels from an output pixel's place to the first that its strip loads
  int first_w;
  int x_g;  // strides of the input over groups, images, channels, rows, columns
  int x_n;
  int x_c;
  int x_h;
  int x_w;
  int w_first;  // the first tap's place in a filter
  int w_g;      // strides of the weight over groups, filters, channels, rows and columns of taps
  int w_m;
  int w_c;
  int w_r;
  int w_s;
  int y_base;
  int y_g;  // strides of the output over groups, images, filters, rows, columns
  int y_n;
  int y_m;
  int y_h;
  int y_w;
  int m;  // filters of a group
  int m_tiles;
  float act_a;
  float act_b;
};

constexpr int BYTES = sizeof(Scalar);
constexpr int WARPS = THREADS / 32;
constexpr int PIXEL_BYTES = (C * BYTES + 7) / 8 * 8;  // zeros behind the channels included
constexpr int CHANNELS = PIXEL_BYTES / BYTES;
static_assert(PITCH % 8 == 0 && PIXEL_BYTES <= PITCH, "pixels find room");
static_assert((RING & (RING - 1)) == 0, "a power of two");

constexpr int NEEDED = LEAD + (TILE_W - 1) * STRIDE_W + (S - 1) * STEP_W + 1;
constexpr int COLUMNS = (NEEDED + WIDE - 1) / WIDE * WIDE;  // of a strip's input
constexpr int ROW_BYTES = COLUMNS * PITCH;
constexpr int NEXT_ROWS = TILE_H * STRIDE_H;  // from the input of one tile to that of the next
constexpr int TILE_ROWS = (TILE_H - 1) * STRIDE_H + (R - 1) * STEP_H + 1;  // of a tile's input
constexpr int NEW_ROWS = NEXT_ROWS < TILE_ROWS ? NEXT_ROWS : TILE_ROWS;
constexpr int AHEAD = (RING - TILE_ROWS) / NEXT_ROWS;  // tiles whose input is on its way
static_assert(AHEAD > 0, "the next tile's input finds room");
constexpr int PRODUCTS = (S * PIXEL_BYTES + 31) / 32;  // of a row of taps
constexpr int OCTETS = TILE_W / 8;
constexpr int ROW_TILES = TILE_M / 16;  // of filters

// What is copied or loaded of a row: ITEMS for each lane, of the last of which there may be none.
constexpr int ITEM_BYTES = COPY_BYTES ? COPY_BYTES : 8;
constexpr int PIXEL_ITEMS = PIXEL_BYTES / ITEM_BYTES;
constexpr int LOADS = COLUMNS / WIDE;  // along a row
constexpr int ROW_ITEMS = LOADS * PIXEL_ITEMS;
constexpr int ITEMS = (ROW_ITEMS + 31) / 32;
constexpr int ELEMENTS = ITEM_BYTES / BYTES;

// The lane's i-th of them. Neighbouring lanes copy neighbouring channels, or load neighbouring pixels.
struct Item {
  int column;
  int chunk;  // of the pixel
  bool exists;

  __device__ Item(int i, int lane)
      : column(COPY_BYTES ? (i * 32 + lane) / PIXEL_ITEMS : (i * 32 + lane) % LOADS * WIDE),
        chunk(COPY_BYTES ? (i * 32 + lane) % PIXEL_ITEMS : (i * 32 + lane) / LOADS),
        exists((i + 1) * 32 <= ROW_ITEMS || i * 32 + lane < ROW_ITEMS) {}

  __device__ int place() const { return column * PITCH + chunk * ITEM_BYTES; }
};

// A lane's filters lie side by side in runs of as many as fit into 16 bytes, or fewer.
constexpr int FILTERS = TILE_M / 8;
constexpr int RUN = FILTERS < 16 / BYTES ? FILTERS : 16 / BYTES;

// Rows of filters of the output's tile, where it goes out with its channels first.
constexpr int STAGED_PITCH = TILE_W + 16 / BYTES;
constexpr int RING_BYTES = (RING * ROW_BYTES + 32 + 15) / 16 * 16;  // with what a last product reads
constexpr int WARP_BYTES = RING_BYTES + (CHANNELS_LAST ? 0 : TILE_M * STAGED_PITCH * BYTES);
constexpr int TILE_ELEMENTS = TILE_M * C * R * S;  // of filters
constexpr int FILTER_BYTES = (TILE_ELEMENTS * BYTES + 15) / 16 * 16;
static_assert(SHARED_BYTES >= FILTER_BYTES + WARPS * WARP_BYTES, "the host asks for enough");

// Where a quarter of a product's 32 bytes lies, from a pixel's first tap.
__device__ inline int tap_bytes(int product, int quarter) {
  const int at = product * 32 + quarter * 8;
  if constexpr (STEP_W * PITCH == PIXEL_BYTES) {
    return at;
  } else if constexpr (PIXEL_BYTES % 32 == 0) {
    return product * 32 / PIXEL_BYTES * (STEP_W * PITCH) + product * 32 % PIXEL_BYTES + quarter * 8;
  } else {
    return min(at / PIXEL_BYTES, S - 1) * (STEP_W * PITCH) + at % PIXEL_BYTES;
  }
}

// Whether there is anything behind the taps that a product takes; it is multiplied by zeros, but
// must be a number.
__device__ inline bool past_the_taps(int product, int quarter) {
  return product * 32 + 32 > S * PIXEL_BYTES && product * 32 + quarter * 8 >= S * PIXEL_BYTES;
}

// Floats that were copied have not been rounded yet.
__device__ inline uint2 operands(uint2 v) {
  if constexpr (BYTES == 4 && COPY_BYTES > 0) {
    v.x = __float_as_uint(as_operand(__uint_as_float(v.x)));
    v.y = __float_as_uint(as_operand(__uint_as_float(v.y)));
  }
  return v;
}

// The lane's filters, of those of the tile.
__device__ inline int filter_of(int i, int eighth) {
  return CHANNELS_LAST ? i / RUN * (8 * RUN) + eighth * RUN + i % RUN : i * 8 + eighth;
}

// Elements that are loaded and stored together.
template <int COUNT>
struct alignas(COUNT * BYTES) Vector {
  Scalar each[COUNT];
};

// One pixel's 8 bytes of channels, of loads of several pixels of a channel each; floats rounded.
template <int COUNT, int PIXELS>
__device__ inline uint2 channels_of(const Vector<PIXELS> (&held)[COUNT], int pixel) {
  uint2 words;
  if constexpr (BYTES == 4) {
    words.x = __float_as_uint(as_operand(held[0].each[pixel]));
    words.y = __float_as_uint(as_operand(held[1].each[pixel]));
  } else {
    words.x = held[0].each[pixel].bits | held[1].each[pixel].bits << 16;
    words.y = held[2].each[pixel].bits | held[3].each[pixel].bits << 16;
  }
  return words;
}

template <int COUNT>
__device__ inline Vector<COUNT> activated(const float (&v)[COUNT], const Params& params) {
  Vector<COUNT> to;
  if constexpr (COUNT == 1) {
    to.each[0] = from_float<Scalar>(activate<ACTIVATION>(v[0], params.act_a, params.act_b));
  } else {
#pragma unroll
    for (int e = 0; e < COUNT; e += 2) {
      store_pair(to.each + e, activate<ACTIVATION>(v[e], params.act_a, params.act_b),
                 activate<ACTIVATION>(v[e + 1], params.act_a, params.act_b));
    }
  }
  return to;
}

// Of a lane's filters 2 i (elements 0 and 1) and 2 i + 1 (2 and 3), the pixels 8 j + lane % 4 * 2 and
// one more.
using Sums = float[ROW_TILES][OCTETS][4];

// Bias, residual, activation and the way out of a row. `place` is that of its first pixel.
__device__ inline void store_pixels(const Sums& acc, const float (&biases)[FILTERS], int columns,
                                    int m0, int place, int lane, const Params& params,
                                    const Scalar* residual, Scalar* y) {
  constexpr int VECTOR = OUT_VECTOR < RUN ? OUT_VECTOR : RUN;
#pragma unroll
  for (int j = 0; j < 2 * FILTERS / VECTOR; j++) {
    const int half = j % 2;
    const int first = j / 2 * VECTOR;  // of the lane's filters
    const int column = lane % 4 * 2 + half;
    const int m = m0 + filter_of(first, lane / 4);
    const int left = m < params.m ? columns - column : 0;
    const int at_first = place + column * params.y_w + m * params.y_m;
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++) {
      if (octet * 8 < left) {
        const int at = at_first + octet * 8 * params.y_w;
        float v[VECTOR];
#pragma unroll
        for (int e = 0; e < VECTOR; e++) {
          const int i = first + e;
          v[e] = acc[i / 2][octet][i % 2 * 2 + half] + biases[i];
        }
        if constexpr (RESIDUAL) {
          const auto more = *reinterpret_cast<const Vector<VECTOR>*>(residual + at);
#pragma unroll
          for (int e = 0; e < VECTOR; e++) {
            v[e] += to_float(more.each[e]);
          }
        }
        store_run<STREAMED>(reinterpret_cast<Vector<VECTOR>*>(y + at), activated(v, params));
      }
    }
  }
}

// The same through shared memory, so that neighbouring lanes store neighbouring pixels.
__device__ inline void store_filters(const Sums& acc, const float (&biases)[FILTERS], int columns,
                                     int m0, int place, int lane, const Params& params,
                                     Scalar* staged, const Scalar* residual, Scalar* y) {
  using Pixels = Vector<OUT_VECTOR>;
  auto each_run = [&](auto action) {
    constexpr int ROW_RUNS = TILE_W / OUT_VECTOR;
    constexpr int LANES = ROW_RUNS < 32 ? ROW_RUNS : 32;  // along a row
#pragma unroll
    for (int first = 0; first < ROW_RUNS; first += LANES) {
      const int column = (first + lane % LANES) * OUT_VECTOR;
      int m = lane / LANES;
      int at = place + column * params.y_w + (m0 + m) * params.y_m;
#pragma unroll 4
      for (int i = 0; i < TILE_M * LANES / 32; i++) {
        if (column < columns && m0 + m < params.m) {
          action(staged + m * STAGED_PITCH + column, at);
        }
        m += 32 / LANES;
        at += 32 / LANES * params.y_m;
      }
    }
    __syncwarp();  // the residual is there, or the tile's place is free
  };
  if constexpr (RESIDUAL) {
    each_run([&](Scalar* at, int from) {
      *reinterpret_cast<Pixels*>(at) = *reinterpret_cast<const Pixels*>(residual + from);
    });
  }
#pragma unroll
  for (int i = 0; i < FILTERS; i++) {
    Scalar* row = staged + filter_of(i, lane / 4) * STAGED_PITCH + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < OCTETS; j++) {
      auto& pair = *reinterpret_cast<Vector<2>*>(row + j * 8);
      float v[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        v[e] = acc[i / 2][j][i % 2 * 2 + e] + biases[i];
        if constexpr (RESIDUAL) {
          v[e] += to_float(pair.each[e]);
        }
      }
      pair = activated(v, params);
    }
  }
  __syncwarp();  // the tile is complete
  each_run([&](const Scalar* at, int to) {
    store_run<STREAMED>(reinterpret_cast<Pixels*>(y + to), *reinterpret_cast<const Pixels*>(at));
  });
}

// The tile's filters as a lane multiplies them.
using Fragments = unsigned[R][PRODUCTS][ROW_TILES][4];

// Brings the filters of the block to shared memory, in the weight's order, and from there to
// registers.
__device__ inline void load_filters(Fragments& filters, const Scalar* weight, int m0,
                                    const Params& params) {
  auto* tile = reinterpret_cast<Vector<FILTER_VECTOR>*>(shared_memory());
  constexpr int LOADED = TILE_ELEMENTS / FILTER_VECTOR;
  constexpr int BATCH = 8;  // loads on their way at once
  for (int first = threadIdx.x; first < LOADED; first += BATCH * THREADS) {
    Vector<FILTER_VECTOR> v[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int at = (first + i * THREADS) * FILTER_VECTOR;
      const int m = at / (C * R * S);
      const Scalar* from = weight + m0 * params.w_m;
      if constexpr (FILTER_VECTOR > 1) {
        from += at;
      } else {
        const int c = WEIGHT_LAST ? at % C : at / (R * S) % C;
        const int tap = WEIGHT_LAST ? at / C % (R * S) : at % (R * S);
        from += m * params.w_m + c * params.w_c + tap / S * params.w_r + tap % S * params.w_s;
      }
      v[i] = load_or_zero(reinterpret_cast<const Vector<FILTER_VECTOR>*>(from),
                          at < TILE_ELEMENTS && m0 + m < params.m);
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      if (first + i * THREADS < LOADED) {
        tile[first + i * THREADS] = v[i];
      }
    }
  }
  __syncthreads();  // the filters are complete
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < PRODUCTS * ROW_TILES * 4; i++) {
    // Of each 16 filters: 4 bytes of the lane's first one, of its second, and 4 more of each.
    const int product = i / 4 / ROW_TILES;
    const int filter = i / 4 % ROW_TILES * 2 + i % 2;
    const int k = (product * 32 + lane % 4 * 8 + i % 4 / 2 * 4) / BYTES;  // along (s, c)
#pragma unroll
    for (int r = 0; r < R; r++) {
      Vector<4 / BYTES> word;
#pragma unroll
      for (int e = 0; e < 4 / BYTES; e++) {
        const int s = (k + e) / CHANNELS;
        const int c = (k + e) % CHANNELS;
        const int tap = r * S + s;
        const int at = filter_of(filter, lane / 4) * (C * R * S) +
                       (WEIGHT_LAST ? tap * C + c : c * (R * S) + tap);
        word.each[e] = s < S && c < C ? as_operand(reinterpret_cast<const Scalar*>(tile)[at])
                                      : from_float<Scalar>(0.0f);
      }
      filters[r][product][i / 4 % ROW_TILES][i % 4] = *reinterpret_cast<const unsigned*>(&word);
    }
  }
}

// What a warp computes from one filling of its ring to the next.
struct Strip {
  int n;
  int first_h;  // of the output
  int first_w;
  int rows;  // none, if there is no such strip

  __device__ Strip(int task, const Params& params)
      : n(task / params.strips / params.chunks),
        first_h(task / params.strips % params.chunks * params.rows),
        first_w(task % params.strips * TILE_W),
        rows(task < params.tasks ? min(params.rows, params.q_h - first_h) : 0) {}

  __device__ int tiles() const { return (rows + TILE_H - 1) / TILE_H; }
};

// The way of a strip's input to the ring. Rows are counted from the first that the strip needs.
struct Input {
  unsigned char* ring;
  const Scalar* image;
  int top;   // the first row, in the image
  int rows;  // that are needed
  const Params* params;
  int lane;
  int origins[ITEMS];  // of the lane's items, in a row of the image
  Vector<WIDE> held[COPY_BYTES ? 1 : NEW_ROWS][ITEMS][ELEMENTS];  // on their way to the ring

  __device__ Input(unsigned char* ring, const Scalar* x, int group, const Strip& strip,
                   const Params& params)
      : ring(ring),
        image(x + (strip.n * params.x_n + group * params.x_g)),
        top(strip.first_h * STRIDE_H + params.first_h),
        rows(strip.rows ? (strip.tiles() - 1) * NEXT_ROWS + TILE_ROWS : 0),
        params(&params),
        lane(threadIdx.x % 32) {
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      const Item item(i, lane);
      const int w = strip.first_w * STRIDE_W + params.first_w + item.column;
      const bool inside =
          item.exists && static_cast<unsigned>(w) < static_cast<unsigned>(params.in_w);
      origins[i] = inside ? w * params.x_w + item.chunk * ELEMENTS * params.x_c : NOWHERE;
    }
  }

  // Sends for the input of the first tiles.
  __device__ void start() {
#pragma unroll
    for (int row = 0; row < TILE_ROWS - NEW_ROWS; row++) {
      if constexpr (COPY_BYTES > 0) {
        copy_row(row);
      } else {
        load_row(row, held[0]);
        keep_row(row, held[0]);
      }
    }
    if constexpr (COPY_BYTES > 0) {
      for (int tile = 0; tile < AHEAD; tile++) {
        copy_new(tile);
      }
    } else {
      load_new(0);
      keep_new(0);
      load_new(1);
    }
  }

  // Waits until a tile's input is there, and sends for what comes after it.
  __device__ void advance(int tile) {
    if constexpr (COPY_BYTES > 0) {
      wait_copies<AHEAD - 1>();
    }
    __syncwarp();  // all lanes' part of it is there, and all have read what is replaced next
    if constexpr (COPY_BYTES > 0) {
      copy_new(tile + AHEAD);
    } else {
      keep_new(tile + 1);
      load_new(tile + 2);
    }
  }

  __device__ unsigned char* row_at(int row) const { return ring + (row & (RING - 1)) * ROW_BYTES; }

 private:
  __device__ bool inside(int row) const {
    return row < rows && static_cast<unsigned>(top + row) < static_cast<unsigned>(params->in_h);
  }

  // The first row that a tile needs and the one before it does not.
  __device__ static int first_new(int tile) { return tile * NEXT_ROWS + TILE_ROWS - NEW_ROWS; }

  __device__ void copy_row(int row) {
    if (row >= rows) {
      return;
    }
    const bool row_inside = inside(row);
    const Scalar* from = image + (row_inside ? (top + row) * params->x_h : 0);
    const unsigned to = shared_address(row_at(row));
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      const Item item(i, lane);
      if (item.exists) {
        copy_async<ITEM_BYTES>(to + item.place(), from + origins[i],
                               row_inside && origins[i] >= 0);
      }
    }
  }

  __device__ void copy_new(int tile) {
#pragma unroll
    for (int i = 0; i < NEW_ROWS; i++) {
      copy_row(first_new(tile) + i);
    }
    commit_copies();
  }

  __device__ void load_row(int row, Vector<WIDE> (&to)[ITEMS][ELEMENTS]) {
    const bool row_inside = inside(row);
    const int row_origin = (top + row) * params->x_h;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      const Item item(i, lane);
#pragma unroll
      for (int e = 0; e < ELEMENTS; e++) {
        const int at = row_origin + origins[i] + e * params->x_c;
        to[i][e] = load_or_zero(reinterpret_cast<const Vector<WIDE>*>(image + at),
                                row_inside && origins[i] >= 0 && item.chunk * ELEMENTS + e < C);
      }
    }
  }

  __device__ void keep_row(int row, const Vector<WIDE> (&from)[ITEMS][ELEMENTS]) {
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      const Item item(i, lane);
      if (item.exists) {
        unsigned char* to = row_at(row) + item.place();
#pragma unroll
        for (int pixel = 0; pixel < WIDE; pixel++) {
          *reinterpret_cast<uint2*>(to + pixel * PITCH) = channels_of(from[i], pixel);
        }
      }
    }
  }

  __device__ void load_new(int tile) {
#pragma unroll
    for (int i = 0; i < NEW_ROWS; i++) {
      load_row(first_new(tile) + i, held[i]);
    }
  }

  __device__ void keep_new(int tile) {
#pragma unroll
    for (int i = 0; i < NEW_ROWS; i++) {
      keep_row(first_new(tile) + i, held[i]);
    }
  }
};

// The products of a tile of pixels with the filters.
__device__ inline void multiply(Sums (&acc)[TILE_H], const Fragments& filters, const Input& input,
                                int tile) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < TILE_ROWS; i++) {
    const unsigned char* from =
        input.row_at(tile * NEXT_ROWS + i) + (lane / 4 * STRIDE_W + LEAD) * PITCH;
#pragma unroll
    for (int j = 0; j < PRODUCTS * OCTETS; j++) {
      const int product = j / OCTETS;
      const int octet = j % OCTETS;
      const auto pixel = *reinterpret_cast<const uint2*>(from + octet * (8 * STRIDE_W * PITCH) +
                                                         tap_bytes(product, lane % 4));
      const uint2 b = past_the_taps(product, lane % 4) ? uint2{0, 0} : operands(pixel);
#pragma unroll
      for (int row = 0; row < TILE_H; row++) {
        const int first = i - row * STRIDE_H;  // from the row's first tap
        if (first >= 0 && first % STEP_H == 0 && first / STEP_H < R) {
#pragma unroll
          for (int k = 0; k < ROW_TILES; k++) {
            multiply_add<Scalar>(acc[row][k][octet], filters[first / STEP_H][product][k], b.x, b.y);
          }
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    direct_mma(Params params, const Scalar* __restrict__ x, const Scalar* __restrict__ weight,
               const Scalar* __restrict__ bias, const Scalar* __restrict__ residual,
               Scalar* __restrict__ y) {
  wait_for_previous();
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  int block = blockIdx.x;
  const int worker = block % params.workers;
  block /= params.workers;
  const int m0 = block % params.m_tiles * TILE_M;
  const int group = block / params.m_tiles;
  unsigned char* ring = shared_memory() + FILTER_BYTES + warp * WARP_BYTES;
  Scalar* staged = reinterpret_cast<Scalar*>(ring + RING_BYTES);

  int task = worker * WARPS + warp;
  Strip strip(task, params);
  Input input(ring, x, group, strip, params);
  input.start();  // before the filters, which take as long to come
  Fragments filters;
  load_filters(filters, weight + (params.w_first + group * params.w_g), m0, params);
  float biases[FILTERS];
#pragma unroll
  for (int i = 0; i < FILTERS; i++) {
    const int m = min(m0 + filter_of(i, lane / 4), params.m - 1);
    biases[i] = to_float(bias[group * params.m + m]);
  }

  while (strip.rows) {
    const int first_place = params.y_base + group * params.y_g + strip.n * params.y_n +
                            strip.first_h * params.y_h + strip.first_w * params.y_w;
    const int columns = params.q_w - strip.first_w;
    for (int tile = 0; tile < strip.tiles(); tile++) {
      input.advance(tile);
      Sums acc[TILE_H] = {};
      multiply(acc, filters, input, tile);
#pragma unroll
      for (int i = 0; i < TILE_H; i++) {
        const int row = tile * TILE_H + i;
        const int place = first_place + row * params.y_h;
        if (row < strip.rows) {
          if constexpr (CHANNELS_LAST) {
            store_pixels(acc[i], biases, columns, m0, place, lane, params, residual, y);
          } else {
            store_filters(acc[i], biases, columns, m0, place, lane, params, staged, residual, y);
          }
        }
      }
    }
    __syncwarp();  // all have read the ring
    task += params.workers * WARPS;
    strip = Strip(task, params);
    input = Input(ring, x, group, strip, params);
    input.start();
  }
  wait_copies<0>();
}
