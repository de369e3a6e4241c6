// Convolution on Hopper's tensor cores with the input's tile staged once for all taps: halves,
// bfloats, or floats as TF32, with sums in float.
//
// A team of warpgroups computes TILE_M filters of a tile of some rows and columns of output pixels,
// a warpgroup 64 of the filters. The input pixels that any tap of any pixel of the tile needs, its
// halo, are copied to shared memory once for each TILE_K channels, and a tap only shifts where the
// tensor cores read: the pixels lie side by side, row after row, and a product may begin at any of
// them. (Chunks of 16 bytes are permuted by their address in shared memory, both as the copy engine
// leaves them and as the tensor cores read them, wherever they begin.) With a stride, rows and
// columns are sorted by their remainders, so that what neighbouring output pixels need lies side by
// side. Matrix A is the weight, B the halo. The weight is packed, or, if the channels of each of its
// taps lie side by side, permuted like the halo.
//
// An instruction takes groups of eight pixels, each as far from the one before. Either a group is
// a row of its own: then a warpgroup's columns are eight, and the halo is small. Or groups lie side
// by side, and read on from the end of one row of the halo to the beginning of the next: then
// positions past the tile's last column compute what nobody stores, but rows may have any length,
// and what is stored lies in long runs.
//
// A block stays on its multiprocessor and goes from tile to tile. One thread sends for the weight,
// step by step of STEP_PRODUCTS products, or the whole of it once (RESIDENT), and one for the
// halos; the teams multiply. They meet at barriers in shared memory only: each buffer has one that
// says that it is full and one that says that it is free. With several TEAMS, one's products run
// while another stores its sums. Either each has tiles of its own, which needs a resident weight. Or
// they share the pixels of a tile, with filters of their own, and take turns: a chunk of channels is
// first multiplied by the first team, then by the next, while the first goes on to its next chunk.
//
// An input of few channels is read as it lies, element by element (GATHERED), by three warps, and
// one product takes two taps: a halo is a plane of 16 bytes a pixel. A second plane holds zeros, for
// the tap that is one too many.

#include "wgmma.cuh"
#include "mma.cuh"

using Scalar = Half;
constexpr int TILE_P = 224;
constexpr int GROUP_P = 224;  // positions of a warpgroup
constexpr int TILE_M = 64;  // of a team
constexpr int TILE_K = 64;
constexpr int TEAMS = 2;
constexpr bool SHARED = false;   // a tile is all teams', else one's
constexpr int HALO_BUFFERS = 1;  // of each tile that is computed at once
constexpr int STAGES = 9;
constexpr bool RESIDENT = true;   // all steps of a tile have their own stage
constexpr int STEPS = 9;          // of TILE_K channels
constexpr int STEP_PRODUCTS = 4;  // of 32 bytes of k each
constexpr int HALO_PIXELS = 300;  // with what fills each box to 128 bytes
constexpr bool PACKED = true;  // else the weight comes as it lies, through `packed_map`
constexpr int GATHERED = 0;  // channels of a group that are read one by one; 0: through `x_map`
constexpr bool CHANNELS_LAST = true;  // the output's order
constexpr int OUT_VECTOR = 8;         // elements of one store
constexpr Activation ACTIVATION = Activation::identity;
constexpr bool RESIDUAL = false;  // else `residual` is not read
constexpr int THREADS = 384;
constexpr int SHARED_BYTES = 171376;

// Those that the kernel does not read are in its tensor maps.
struct Params {
  int tiles;
  int blocks;
  int q_h;  // output pixels of this launch, of one image
  int q_w;
  int rows;  // of a tile
  int columns;
  int tiles_h;  // of one image
  int tiles_w;
  int in_h;
  int in_w;
  int in_stride_h;  // input pixels from one output pixel to the next
  int in_stride_w;
  int first_h;  // input pixels from an output pixel's place to the first that any tap needs
  int first_w;
  int sorted_h;  // rows and columns of the halo that have the same remainders
  int pitch;
  int next_group;      // pixels of the halo from one group of eight positions to the next
  int next_warpgroup;  // and from one warpgroup's positions to another's
  int x_g;       // strides of the input over groups, images, channels, rows, columns
  int x_n;
  int x_c;
  int x_h;
  int x_w;
  int channels;  // of a group
  int y_base;
  int y_g;  // strides of the output over groups, images, filters, rows, columns
  int y_n;
  int y_m;
  int y_h;
  int y_w;
  int m;  // filters of a group
  int m_tiles;  // of TILE_M filters
  int chunks;   // of TILE_K channels
  int groups;
  float act_a;
  float act_b;
};

constexpr int VECTOR = 16 / sizeof(Scalar);
constexpr int PIXEL_CHUNKS = TILE_K / VECTOR;  // of 16 bytes, in the halo
constexpr int PLANE_BYTES = HALO_PIXELS * PIXEL_CHUNKS * 16;
constexpr int HALO_BYTES = (GATHERED ? 2 : 1) * PLANE_BYTES;
constexpr int SHARERS = SHARED ? TEAMS : 1;  // of a tile
constexpr int AT_ONCE = TEAMS / SHARERS;     // tiles of a block
constexpr int HALOS = AT_ONCE * HALO_BUFFERS;
constexpr int STAGE_BYTES = STEP_PRODUCTS * TILE_M * 32;
constexpr int TEAM_WARPGROUPS = TILE_M / 64 * (TILE_P / GROUP_P);
constexpr int WARPGROUPS = TEAMS * TEAM_WARPGROUPS;  // that multiply
constexpr int LOADER_WARPS = 3;
// Small halos are each gathered by one warp, so that several are on their way.
constexpr int LOADERS = HALOS < LOADER_WARPS ? 1 : LOADER_WARPS;
constexpr int LOADER_THREADS = LOADER_WARPS / LOADERS * 32;
// Of the registers that all begin with the same number of, those who copy give most away.
constexpr int COPIER_REGISTERS = 88;
constexpr int MULTIPLIER_REGISTERS = 208;
static_assert(WARPGROUPS <= 2, "registers for the sums");
static_assert(TILE_P % GROUP_P == 0 && GROUP_P % 32 == 0 && TILE_M % 64 == 0, "whole warpgroups");
static_assert(THREADS == WARPGROUPS * 128 + 32 + LOADER_WARPS * 32, "a role for each warp");
static_assert(AT_ONCE == 1 || RESIDENT, "teams wait for no common step");
// A parity does not tell that a stage must be filled twice before it is a waiting team's. So what has
// a turn's steps in between must be there: one stage more than them, and see copy_weights.
static_assert(!SHARED || RESIDENT || STAGES > STEPS, "more stages than another's turn takes");
static_assert(!GATHERED || TILE_K == VECTOR, "16 bytes of channels are gathered");
static_assert(GATHERED || HALO_BYTES % 128 == 0, "where the copy engine may begin");
static_assert(PACKED || (!GATHERED && STEP_PRODUCTS * 2 % PIXEL_CHUNKS == 0), "steps of whole taps");

// On its way out, a slice of a warpgroup's positions lies in shared memory: one row for each pixel,
// of 64 filters, or one for each filter, of 128 bytes of pixels. Rows begin on other banks.
constexpr int SLICE = CHANNELS_LAST ? 32 : 128 / static_cast<int>(sizeof(Scalar));
constexpr int PITCH = (CHANNELS_LAST ? 64 : SLICE) + 16 / static_cast<int>(sizeof(Scalar));
constexpr int SLICE_BYTES =
    (CHANNELS_LAST ? SLICE : 64) * PITCH * static_cast<int>(sizeof(Scalar));
constexpr int SLICES = CHANNELS_LAST ? 2 : 1;  // in shared memory, of a warpgroup

constexpr int STAGES_AT = HALOS * HALO_BYTES;
constexpr int SLICES_AT = STAGES_AT + STAGES * STAGE_BYTES;
constexpr int BARRIERS_AT = SLICES_AT + WARPGROUPS * SLICES * SLICE_BYTES;
constexpr int WORDS_AT = BARRIERS_AT + 16 * (HALOS + STAGES);
constexpr int PLACES_AT = WORDS_AT + 4 * STEPS * STEP_PRODUCTS;
constexpr int SPOTS_AT = PLACES_AT + (GATHERED ? 4 * HALO_PIXELS : 0);
static_assert(SHARED_BYTES >= SPOTS_AT + 4 * TILE_P, "the host asks for enough");

struct Tile {
  int m_tile;  // the first team's
  int group;
  int x;  // the first output pixel
  int y;
  int image;
};

// Neighbouring tiles have the same pixels, and a block's all the same filters where the weight is
// resident.
__device__ inline Tile tile_at(int index, const Params& params) {
  Tile tile;
  const int m_tiles = (params.m_tiles + SHARERS - 1) / SHARERS;
  tile.m_tile = index % m_tiles * SHARERS;
  index /= m_tiles;
  tile.group = index % params.groups;
  index /= params.groups;
  tile.x = index % params.tiles_w * params.columns;
  index /= params.tiles_w;
  tile.y = index % params.tiles_h * params.rows;
  tile.image = index / params.tiles_h;
  return tile;
}

// Of buffers that are filled and emptied over and over: which is next, and how often it has been.
template <int COUNT>
struct Turn {
  int buffer = 0;
  unsigned round = 0;

  __device__ void next() {
    buffer++;
    if (buffer == COUNT) {
      buffer = 0;
      round ^= 1;
    }
  }

  __device__ void skip(int times) {
    round ^= (buffer + times) / COUNT & 1;
    buffer = (buffer + times) % COUNT;
  }
};

// What all roles know. A buffer's barriers lie side by side; those of stages follow the halos'.
struct Block {
  const Params& params;
  unsigned char* shared;

  __device__ unsigned at(int offset) const { return shared_address(shared) + offset; }
  __device__ unsigned halo_full(int buffer) const { return at(BARRIERS_AT) + buffer * 16; }
  __device__ unsigned halo_free(int buffer) const { return halo_full(buffer) + 8; }
  __device__ unsigned stage_full(int stage) const { return halo_full(HALOS + stage); }
  __device__ unsigned stage_free(int stage) const { return stage_full(stage) + 8; }
};

// The warp that copies the weight, of which one thread is enough.
__device__ inline void copy_weights(const Block& block, const Scalar* packed,
                                    const TensorMap& map) {
  const Params& params = block.params;
  constexpr int STAGE = STAGE_BYTES / static_cast<int>(sizeof(Scalar));
  constexpr int TAPS = STEP_PRODUCTS * 2 / PIXEL_CHUNKS;  // of a step, not packed
  Turn<STAGES> turn;
  for (int index = blockIdx.x; index < params.tiles; index += params.blocks) {
    const Tile tile = tile_at(index, params);
    for (int i = 0; i < params.chunks * SHARERS; i++) {
      // The last team may have no filters, and multiplies others.
      const int m_tile = min(tile.m_tile + i % SHARERS, params.m_tiles - 1);
      const int chunk = i / SHARERS;
      const int before = (tile.group * params.m_tiles + m_tile) * params.chunks + chunk;
      const Scalar* from = packed + static_cast<long long>(before) * (STEPS * STAGE);
      for (int step = 0; step < STEPS; step++) {
        const unsigned full = block.stage_full(turn.buffer);
        wait_barrier(block.stage_free(turn.buffer), turn.round ^ 1);
        if constexpr (SHARED && !RESIDENT) {
          // Copies land in any order. A team that has seen this one must not find the next stage as
          // it was a round before.
          Turn<STAGES> after = turn;
          after.next();
          wait_barrier(block.stage_full(after.buffer), after.round ^ 1);
        }
        arrive_expecting(full, STAGE_BYTES);
        const unsigned to = block.at(STAGES_AT) + turn.buffer * STAGE_BYTES;
        if constexpr (PACKED) {
          copy_bulk(to, from, STAGE_BYTES, full);
          from += STAGE;
        } else {
#pragma unroll
          for (int tap = 0; tap < TAPS; tap++) {
            copy_rows(to + tap * (STAGE_BYTES / TAPS), map, chunk * TILE_K, step * TAPS + tap,
                      tile.group * params.m + m_tile * TILE_M, full);
          }
        }
        turn.next();
      }
    }
    if (RESIDENT) {
      return;
    }
  }
}

// A row and a column, both in one word.
constexpr int ROW_BITS = 16;
__device__ inline int word_of(int row, int column) { return row << ROW_BITS | column; }
__device__ inline int row_of(int word) { return word >> ROW_BITS; }
__device__ inline int column_of(int word) { return word & ((1 << ROW_BITS) - 1); }

// Of the pixels of a halo that is gathered, relative to the first one.
__device__ inline int halo_place(int pixel, const Params& params) {
  const int column = pixel % params.pitch;
  pixel /= params.pitch;
  const int row = pixel % params.sorted_h;
  const int remainders = pixel / params.sorted_h;
  return word_of(row * params.in_stride_h + remainders / params.in_stride_w,
                 column * params.in_stride_w + remainders % params.in_stride_w);
}

__device__ inline int halo_pixels(const Params& params) {
  return params.in_stride_h * params.in_stride_w * params.sorted_h * params.pitch;
}

// Of the tile's positions, -1 where there is no pixel.
__device__ inline int spot_of(int position, const Params& params) {
  const int in_group = position % GROUP_P;
  const int pixel = position / GROUP_P * params.next_warpgroup +
                    in_group / 8 * params.next_group + in_group % 8;
  const int row = pixel / params.pitch;
  const int column = pixel % params.pitch;
  return row < params.rows && column < params.columns ? word_of(row, column) : -1;
}

// Tells the copy engine of one chunk of channels of a tile's halo: a box of pixels for each pair of
// remainders.
__device__ inline void send_for_halo(const Block& block, const Tile& tile, int chunk, int buffer,
                                     const TensorMap& map) {
  const Params& params = block.params;
  const unsigned full = block.halo_full(buffer);
  const int boxes = params.in_stride_h * params.in_stride_w;
  const int first_h = tile.y * params.in_stride_h + params.first_h;
  const int first_w = tile.x * params.in_stride_w + params.first_w;
  arrive_expecting(full, boxes * params.sorted_h * params.pitch * (PIXEL_CHUNKS * 16));
  unsigned to = block.at(buffer * HALO_BYTES);
  for (int h = 0; h < params.in_stride_h; h++) {
    for (int w = 0; w < params.in_stride_w; w++) {
      copy_box(to, map, chunk * TILE_K, tile.group, first_w + w, first_h + h, tile.image, full);
      to += HALO_BYTES / boxes;
    }
  }
}

// A tile's halo of few channels, by the threads of a loader; each begins with another `first`.
__device__ inline void gather_halo(const Block& block, const Tile& tile, int first, int buffer,
                                   const Scalar* x) {
  const Params& params = block.params;
  const int* places = reinterpret_cast<const int*>(block.shared + PLACES_AT);
  const int first_h = tile.y * params.in_stride_h + params.first_h;
  const int first_w = tile.x * params.in_stride_w + params.first_w;
  const Scalar* image = x + (tile.group * params.x_g + tile.image * params.x_n);
  const int pixels = halo_pixels(params);
  const int to = buffer * HALO_BYTES;
  // The element at which a pixel begins; the border is NOWHERE.
  auto origin = [&](int pixel) {
    const int h = first_h + row_of(places[pixel]);
    const int w = first_w + column_of(places[pixel]);
    const bool inside = static_cast<unsigned>(h) < static_cast<unsigned>(params.in_h) &&
                        static_cast<unsigned>(w) < static_cast<unsigned>(params.in_w);
    return inside ? h * params.x_h + w * params.x_w : NOWHERE;
  };
  constexpr int PIXELS = GATHERED > 4 ? 4 : 8;  // whose loads are on their way together
  for (int pixel = first; pixel < pixels; pixel += PIXELS * LOADER_THREADS) {
    // Loads outside of branches: where a value is needed at once, each would be waited for.
    Scalar loaded[PIXELS][GATHERED > 0 ? GATHERED : 1];
    bool inside[PIXELS];
#pragma unroll
    for (int i = 0; i < PIXELS; i++) {
      const int each = pixel + i * LOADER_THREADS;
      const int at = each < pixels ? origin(each) : NOWHERE;
      inside[i] = at >= 0;
#pragma unroll
      for (int c = 0; c < GATHERED; c++) {
        loaded[i][c] = image[max(at, 0) + c * params.x_c];
      }
    }
#pragma unroll
    for (int i = 0; i < PIXELS; i++) {
      union {
        Scalar scalars[VECTOR];
        uint4 all;
      } v;
      v.all = uint4{0, 0, 0, 0};
#pragma unroll
      for (int c = 0; c < GATHERED; c++) {
        v.scalars[c] = inside[i] ? as_operand(loaded[i][c]) : from_float<Scalar>(0.0f);
      }
      if (pixel + i * LOADER_THREADS < pixels) {
        *reinterpret_cast<uint4*>(block.shared + to + (pixel + i * LOADER_THREADS) * 16) = v.all;
      }
    }
  }
}

// Fills all halos, by one thread, or the threads of all loaders. A buffer is always gathered by the
// same one, in the order of its use: a barrier's parity tells only neighbouring rounds apart.
__device__ inline void fill_halos(const Block& block, int thread, const Scalar* x,
                                  const TensorMap& map) {
  const Params& params = block.params;
  const int loader = thread / LOADER_THREADS;
  Turn<HALO_BUFFERS> turn;
  for (int first = blockIdx.x; first < params.tiles; first += AT_ONCE * params.blocks) {
    for (int chunk = 0; chunk < params.chunks; chunk++) {
      for (int i = 0; i < AT_ONCE; i++) {
        const int index = first + i * params.blocks;
        const int buffer = i * HALO_BUFFERS + turn.buffer;
        if (index >= params.tiles || (GATHERED && buffer % LOADERS != loader)) {
          continue;
        }
        const Tile tile = tile_at(index, params);
        wait_barrier(block.halo_free(buffer), turn.round ^ 1);
        if constexpr (GATHERED > 0) {
          gather_halo(block, tile, thread % LOADER_THREADS, buffer, x);
          publish_copies();
          arrive(block.halo_full(buffer));
        } else {
          send_for_halo(block, tile, chunk, buffer, map);
        }
      }
      turn.next();
    }
  }
}

// The way out of the sums of one warpgroup, as multiply_add_async leaves them: of 64 filters and
// GROUP_P positions.
struct Store {
  const Params& params;
  const int* spots;  // of the positions
  int y_at;          // the tile's first pixel's element of the first filter
  int rows;          // of the tile that exist
  int columns;
  int filters;
  float bias[2];
  unsigned char* slices;
  int thread;  // of the warpgroup

  // `added` is the residual's element, where there is one.
  __device__ float value(const float (&sums)[4], int i, const Scalar* added) const {
    float v = sums[i] + bias[i / 2];
    if constexpr (RESIDUAL) {
      v += to_float(*added);
    }
    return activate<ACTIVATION>(v, params.act_a, params.act_b);
  }

  // The element of the first filter at a position, -1 where there is none.
  __device__ int element(int position) const {
    const int spot = position < GROUP_P ? spots[position] : -1;
    const int h = row_of(spot);
    const int w = column_of(spot);
    return spot >= 0 && h < rows && w < columns ? y_at + h * params.y_h + w * params.y_w : -1;
  }

  // Channels last, a thread moves these runs of a slice, of OUT_VECTOR filters of a pixel each.
  static constexpr int RUNS = 64 / OUT_VECTOR;  // of a pixel
  static constexpr int OWN_RUNS = SLICE * RUNS / 128;

  // Their elements in y, -1 where there is none.
  __device__ void find_runs(int (&runs)[OWN_RUNS], int first) const {
    const int m = thread % RUNS * OUT_VECTOR;
#pragma unroll
    for (int i = 0; i < OWN_RUNS; i++) {
      const int at = element(first + (i * 128 + thread) / RUNS);
      runs[i] = at >= 0 && m < filters ? at + m : -1;
    }
  }

  // Calls action(place in the staged slice, place in y) for those that there are,
  template <typename Action>
  __device__ void each_run_of_filters(const int (&runs)[OWN_RUNS], Action action) const {
#pragma unroll
    for (int i = 0; i < OWN_RUNS; i++) {
      if (runs[i] >= 0) {
        action((i * 128 + thread) / RUNS * PITCH + thread % RUNS * OUT_VECTOR, runs[i]);
      }
    }
  }

  // or for the runs of pixels of 16 filters that a warp moves.
  template <typename Action>
  __device__ void each_run_of_pixels(int first, Action action) const {
    constexpr int LANES = SLICE / OUT_VECTOR < 32 ? SLICE / OUT_VECTOR : 32;  // of one filter
    const int lane = thread % 32;
    const int first_m = thread / 32 * 16;
#pragma unroll
    for (int p = 0; p < SLICE; p += LANES * OUT_VECTOR) {
      const int position = p + lane % LANES * OUT_VECTOR;
      const int at = element(first + position);
      if (at < 0) {
        continue;
      }
#pragma unroll
      for (int i = 0; i < 16; i += 32 / LANES) {
        const int m = first_m + i + lane / LANES;
        if (m < filters) {
          action(m * PITCH + position, at + m * params.y_m);
        }
      }
    }
  }

  // Neighbouring threads store neighbouring filters of a pixel. The residual comes in as the result
  // goes out.
  __device__ void filters_of_pixels(const float (&acc)[GROUP_P / 8][4], const Scalar* residual,
                                    Scalar* y) const {
    constexpr int COUNT = GROUP_P / SLICE;
    const int lane = thread % 32;
    const int first_m = thread / 32 * 16;
    if constexpr (COUNT % 2) {
      Warpgroup::sync();  // all have read the last slice of the tile before, which lay here too
    }
#pragma unroll
    for (int slice = 0; slice < COUNT; slice++) {
      int runs[OWN_RUNS];  // found before all wait for each other
      find_runs(runs, slice * SLICE);
      // The other slice may still be read.
      Scalar* staged = reinterpret_cast<Scalar*>(slices + slice % 2 * SLICE_BYTES);
      if constexpr (RESIDUAL) {
        each_run_of_filters(runs, [&](int at, int place) {
          copy_run<OUT_VECTOR>(staged + at, residual + place);
        });
        Warpgroup::sync();  // each element is replaced by the warp that reads it
      }
      Scalar* own = staged + lane % 4 * 2 * PITCH + first_m + lane / 4;
#pragma unroll
      for (int j = 0; j < SLICE / 8; j += 2) {
        const auto sum = [&](int second, int i) {
          return value(acc[slice * (SLICE / 8) + j + second], i,
                       own + ((j + second) * 8 + i % 2) * PITCH + i / 2 * 8);
        };
        if constexpr (sizeof(Scalar) == 2) {
          const float v[4][2] = {{sum(0, 0), sum(0, 1)},
                                 {sum(0, 2), sum(0, 3)},
                                 {sum(1, 0), sum(1, 1)},
                                 {sum(1, 2), sum(1, 3)}};
          const int pixel = j * 8 + lane / 16 * 8 + lane % 8;
          store_transposed<Scalar>(
              shared_address(staged + pixel * PITCH + first_m + lane / 8 % 2 * 8), v);
        } else {
#pragma unroll
          for (int i = 0; i < 4; i++) {
            Scalar* to = own + (j * 8 + i % 2) * PITCH + i / 2 * 8;
            to[0] = from_float<Scalar>(sum(0, i));
            to[8 * PITCH] = from_float<Scalar>(sum(1, i));
          }
        }
      }
      Warpgroup::sync();  // the slice is complete, and the one before has been read
      each_run_of_filters(
          runs, [&](int at, int place) { copy_run<OUT_VECTOR>(y + place, staged + at); });
    }
  }

  // Neighbouring threads store neighbouring pixels of a filter. A warp has all pixels of its
  // filters, so none waits for another.
  __device__ void pixels_of_filters(const float (&acc)[GROUP_P / 8][4], const Scalar* residual,
                                    Scalar* y) const {
    Scalar* staged = reinterpret_cast<Scalar*>(slices);
    const int lane = thread % 32;
    Scalar* own = staged + (thread / 32 * 16 + lane / 4) * PITCH + lane % 4 * 2;
#pragma unroll
    for (int first = 0; first < GROUP_P; first += SLICE) {
      __syncwarp();  // all lanes have read the slice before
      if constexpr (RESIDUAL) {
        each_run_of_pixels(first, [&](int at, int place) {
          copy_run<OUT_VECTOR>(staged + at, residual + place);
        });
        __syncwarp();  // the residual is there
      }
#pragma unroll
      for (int j = 0; j < SLICE / 8 && first + j * 8 < GROUP_P; j++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          Scalar* to = own + half * 8 * PITCH + j * 8;
          const float(&sums)[4] = acc[first / 8 + j];
          store_pair(to, value(sums, 2 * half, to), value(sums, 2 * half + 1, to + 1));
        }
      }
      __syncwarp();  // the slice is complete
      each_run_of_pixels(first, [&](int at, int place) {
        copy_run<OUT_VECTOR>(y + place, staged + at);
      });
    }
  }
};

// Where a stage has the filters of its i-th product, in units of 16 bytes.
__device__ constexpr int filters_at(int i) {
  if constexpr (PACKED) {
    return i * TILE_M * 2;
  } else {
    return i * 2 / PIXEL_CHUNKS * TILE_M * PIXEL_CHUNKS + i * 2 % PIXEL_CHUNKS;
  }
}

// A warpgroup that multiplies.
__device__ inline void multiply(const Block& block, int thread, const Scalar* bias,
                                const Scalar* residual, Scalar* y) {
  const Params& params = block.params;
  const int warpgroup = thread / 128;
  const int team = warpgroup / TEAM_WARPGROUPS;
  const int first_p = warpgroup % TEAM_WARPGROUPS / (TILE_M / 64) * GROUP_P;
  const int first_m = warpgroup % (TILE_M / 64) * 64;
  const int own_tile = SHARED ? 0 : team;  // of those of a block
  const int turn = SHARED ? team : 0;      // with the same tile
  const int lane = thread % 32;
  // In units of 16 bytes.
  const unsigned halos =
      block.at(0) / 16 + first_p / GROUP_P * params.next_warpgroup * PIXEL_CHUNKS;
  const unsigned next_group = params.next_group * PIXEL_CHUNKS | permutation(PIXEL_CHUNKS);
  const unsigned weights = PACKED ? (block.at(STAGES_AT) / 16 + first_m) | TILE_M << 16
                                  : block.at(STAGES_AT) / 16 + first_m * PIXEL_CHUNKS;
  constexpr unsigned NEXT_FILTERS = PACKED ? 8 : 8 * PIXEL_CHUNKS | permutation(PIXEL_CHUNKS);
  const unsigned* words = reinterpret_cast<const unsigned*>(block.shared + WORDS_AT);

  Turn<HALO_BUFFERS> halo;
  Turn<STAGES> stage;
  for (int index = blockIdx.x + own_tile * params.blocks; index < params.tiles;
       index += AT_ONCE * params.blocks) {
    const Tile tile = tile_at(index, params);
    const int own_m = (tile.m_tile + turn) * TILE_M + first_m;
    const int filter = own_m + thread % 128 / 32 * 16 + lane / 4;
    const Scalar* own_bias = bias + tile.group * params.m;
    const Store store{params,
                      reinterpret_cast<const int*>(block.shared + SPOTS_AT) + first_p,
                      params.y_base + tile.group * params.y_g + tile.image * params.y_n +
                          own_m * params.y_m + tile.y * params.y_h + tile.x * params.y_w,
                      params.q_h - tile.y,
                      params.q_w - tile.x,
                      params.m - own_m,
                      {to_float(own_bias[min(filter, params.m - 1)]),
                       to_float(own_bias[min(filter + 8, params.m - 1)])},
                      block.shared + SLICES_AT + warpgroup * SLICES * SLICE_BYTES,
                      thread % 128};
    float acc[GROUP_P / 8][4] = {};
    // The barriers of what the products before the last ones read.
    unsigned read_stage = 0;
    unsigned read_halo = 0;
    for (int chunk = 0; chunk < params.chunks; chunk++) {
      const int buffer = own_tile * HALO_BUFFERS + halo.buffer;
      const unsigned from_halo = halos + buffer * (HALO_BYTES / 16);
      wait_barrier(block.halo_full(buffer), halo.round);
      if constexpr (SHARED) {
        stage.skip(turn * STEPS);
      }
#pragma unroll 1
      for (int step = 0; step < STEPS; step++) {
        unsigned b[STEP_PRODUCTS];
#pragma unroll
        for (int i = 0; i < STEP_PRODUCTS; i++) {
          b[i] = from_halo + words[step * STEP_PRODUCTS + i];
        }
        wait_barrier(block.stage_full(stage.buffer), RESIDENT ? 0 : stage.round);
        begin_products();
#pragma unroll
        for (int i = 0; i < STEP_PRODUCTS; i++) {
          const unsigned a = weights + stage.buffer * (STAGE_BYTES / 16) + filters_at(i);
          multiply_add_async<Scalar>(acc, core_matrices(a, NEXT_FILTERS),
                                     core_matrices(b[i], next_group));
        }
        commit_products();
        wait_products<1>();
        if constexpr (!RESIDENT) {
          arrive_warp(read_stage, lane);
        }
        if (step == 0) {
          arrive_warp(read_halo, lane);
        }
        read_stage = block.stage_free(stage.buffer);
        stage.next();
      }
      if (HALO_BUFFERS > 1 && !SHARED) {
        read_halo = block.halo_free(buffer);
      } else {  // the next chunk comes, or another's turn, only when what this one read is free
        wait_products<0>();
        if constexpr (!RESIDENT) {
          arrive_warp(read_stage, lane);
          read_stage = 0;
        }
        arrive_warp(block.halo_free(buffer), lane);
      }
      halo.next();
      if constexpr (SHARED) {
        stage.skip((SHARERS - 1 - turn) * STEPS);
      }
    }
    wait_products<0>();
    if constexpr (!RESIDENT) {
      arrive_warp(read_stage, lane);
    }
    arrive_warp(read_halo, lane);
    if constexpr (CHANNELS_LAST) {
      store.filters_of_pixels(acc, residual, y);
    } else {
      store.pixels_of_filters(acc, residual, y);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    halo_wgmma(Params params, const Scalar* __restrict__ x, const Scalar* __restrict__ packed,
               const unsigned* __restrict__ words, const Scalar* __restrict__ bias,
               const Scalar* __restrict__ residual, Scalar* __restrict__ y,
               const __grid_constant__ TensorMap x_map,
               const __grid_constant__ TensorMap packed_map) {
  const int thread = threadIdx.x;
  const Block block{params, shared_memory()};
  unsigned* own_words = reinterpret_cast<unsigned*>(block.shared + WORDS_AT);
  int* places = reinterpret_cast<int*>(block.shared + PLACES_AT);
  int* spots = reinterpret_cast<int*>(block.shared + SPOTS_AT);
  for (int i = thread; i < TILE_P; i += THREADS) {
    spots[i] = spot_of(i, params);
  }
  if constexpr (GATHERED > 0) {
    for (int i = thread; i < halo_pixels(params); i += THREADS) {
      places[i] = halo_place(i, params);
    }
    for (int i = thread; i < HALOS * HALO_PIXELS; i += THREADS) {
      const int at = i / HALO_PIXELS * HALO_BYTES + PLANE_BYTES + i % HALO_PIXELS * 16;
      *reinterpret_cast<uint4*>(block.shared + at) = uint4{0, 0, 0, 0};
    }
    publish_copies();
  }
  for (int i = thread; i < HALOS + STAGES; i += THREADS) {
    set_up_barrier(block.halo_full(i), GATHERED && i < HALOS ? LOADER_THREADS : 1);
    set_up_barrier(block.halo_free(i), (i < HALOS ? SHARERS : 1) * TEAM_WARPGROUPS * 4);
    publish_barriers();
  }
  wait_for_previous();
  for (int i = thread; i < STEPS * STEP_PRODUCTS; i += THREADS) {
    own_words[i] = words[i];
  }
  __syncthreads();

  const int helper = thread - WARPGROUPS * 128;
  if (helper < 0) {
    if constexpr (WARPGROUPS > 1) {
      take_registers<MULTIPLIER_REGISTERS>();
    }
    multiply(block, thread, bias, residual, y);
  } else {
    if constexpr (WARPGROUPS > 1) {
      give_registers<COPIER_REGISTERS>();
    }
    if (helper == 0) {
      copy_weights(block, packed, packed_map);
    } else if (GATHERED ? helper >= 32 : helper == 32) {
      fill_halos(block, helper - 32, x, x_map);
    }
  }
}
