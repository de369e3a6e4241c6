// What the tensor-core kernels share: the order of tiles in shared memory, the product of two
// staged tiles, and the way of the sums to the output.
//
// A tile is staged as rows of TILE_K elements, halves, bfloats or floats (which are multiplied as
// TF32): a row is a pixel (matrix A) or a filter (matrix B).
// ldmatrix reads the same 16 bytes of eight rows at once. So that these fall on different banks,
// the 16-byte chunks of a row are permuted by the row's number.
#pragma once

#include "ptx.cuh"
#include "activations.cuh"

// Where a chunk of a row lies, in bytes from the tile's beginning, which is aligned to 128.
template <int ROW_CHUNKS>
__device__ inline int swizzled(int row, int chunk) {
  static_assert(ROW_CHUNKS == 2 || ROW_CHUNKS == 4 || ROW_CHUNKS == 8);
  constexpr int ROWS = 8 / ROW_CHUNKS;  // that share 128 bytes, a word of each bank
  return (row * ROW_CHUNKS + (chunk ^ (row / ROWS & (ROW_CHUNKS - 1)))) * 16;
}

// What wgmma takes for a matrix of rows of k: groups of 8 rows of 16 bytes that lie side by side
// (128 bytes). Where the first such group lies, and how many bytes it is to the next along k and
// along the rows.
__device__ inline unsigned long long matrix(unsigned at, unsigned next_k, unsigned next_rows) {
  auto field = [](unsigned bytes) { return static_cast<unsigned long long>(bytes >> 4 & 0x3fff); };
  return field(at) | field(next_k) << 16 | field(next_rows) << 32;
}

// The same for rows of 128 bytes one after the other, whose chunks are permuted by their address, as
// swizzled<8> does it for a first row at a multiple of 1024; `at` is as many bytes further as k has
// advanced. (Bit 62 is that of permutation(8) in wgmma.cuh.)
__device__ inline unsigned long long swizzled_matrix(unsigned at) {
  return matrix(at, 16, 1024) | 1ull << 62;
}

// The place, among eight rows of two neighbouring chunks, of the row whose address a lane gives
// to load_matrices; chunk k of the row then lies at (place of chunk 0) ^ 32 k.
struct LaneRow {
  int row;    // of 16
  int chunk;  // of 2
};

// Matrix A: 16 rows. The four matrices come in the order that multiply_add wants.
__device__ inline LaneRow lane_row_a(int lane) { return {lane % 16, lane / 16}; }

// Matrix B: 16 filters, of which the first eight come in registers 0 and 1.
__device__ inline LaneRow lane_row_b(int lane) {
  return {lane % 8 + lane / 16 * 8, lane / 8 % 2};
}

// Rounds a fragment, where its elements are wider than what is multiplied.
template <typename T>
__device__ inline void round_operands(unsigned (&fragment)[4]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      fragment[i] = __float_as_uint(as_operand(__uint_as_float(fragment[i])));
    }
  }
}

// The sums of one warp: WARP_P pixels by WARP_M filters. acc[i][j] holds pixels 16 i + lane / 4
// (elements 0 and 1) and 8 more (2 and 3), of the filters 8 j + lane % 4 * 2 and one more.
template <int WARP_P, int WARP_M>
struct Sums {
  static_assert(WARP_P % 16 == 0 && WARP_M % 16 == 0);
  static constexpr int ROWS = WARP_P / 16;
  static constexpr int COLUMNS = WARP_M / 8;
  float acc[ROWS][COLUMNS][4] = {};

  // Adds the product of one step. `a` has, for each 16 pixels, the lane's address for chunk 0;
  // `b` is the same for the first 16 filters, whose elements have been rounded as operands.
  template <typename T, int TILE_K>
  __device__ void add(const unsigned (&a)[ROWS], unsigned b) {
    constexpr int ROW_BYTES = TILE_K * sizeof(T);
#pragma unroll
    for (int k = 0; k < ROW_BYTES / 32; k++) {
      unsigned fragment_a[ROWS][4];
      unsigned fragment_b[COLUMNS / 2][4];
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
        load_matrices(fragment_a[i], a[i] ^ (32 * k));
        round_operands<T>(fragment_a[i]);
      }
#pragma unroll
      for (int j = 0; j < COLUMNS / 2; j++) {
        load_matrices(fragment_b[j], (b ^ (32 * k)) + j * 16 * ROW_BYTES);
      }
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
          multiply_add<T>(acc[i][j], fragment_a[i], fragment_b[j / 2][j % 2 * 2],
                       fragment_b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }
};

// Where the sums go. Filter m (within the group) of the tile's pixel p is element
// y_of_pixel[p] + m * y_m; pixels with a negative place do not exist.
template <typename T>
struct Target {
  const int* y_of_pixel;
  const T* bias;  // of the group
  int m0;         // the tile's first filter
  int m;          // filters of the group
  int y_m;
  float act_a;
  float act_b;
  const T* residual = nullptr;  // laid out as y, where there is one
};

// Copies elements that lie side by side and are aligned to all of them.
template <int VECTOR, typename T>
__device__ inline void copy_run(T* to, const T* from) {
  if constexpr (VECTOR * sizeof(T) == 16) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
  } else if constexpr (VECTOR * sizeof(T) == 8) {
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
  } else if constexpr (VECTOR * sizeof(T) == 4) {
    *reinterpret_cast<unsigned*>(to) = *reinterpret_cast<const unsigned*>(from);
  } else {
    static_assert(VECTOR == 1);
    *to = *from;
  }
}

// The threads that store a tile together: all of the block,
template <int COUNT>
struct WholeBlock {
  static constexpr int THREADS = COUNT;
  __device__ static int thread() { return threadIdx.x; }
  __device__ static void sync() { __syncthreads(); }
};

// or one of its first three warpgroups.
struct Warpgroup {
  static constexpr int THREADS = 128;
  __device__ static int thread() { return threadIdx.x % 128; }
  // Numbers that the compiler sees: else it reserves all barriers that a block may have.
  __device__ static void sync() {
    if (threadIdx.x < 128) {
      sync_some<128>(1);
    } else if (threadIdx.x < 256) {
      sync_some<128>(2);
    } else {
      sync_some<128>(3);
    }
  }
};

// Calls action(place in the staged tile, place in y) for the runs of a tile that a thread moves.
template <typename Crew, int TILE_P, int TILE_M, bool CHANNELS_LAST, int VECTOR, int PITCH,
          typename T, typename Action>
__device__ inline void for_runs(const Target<T>& target, int m0, Action action) {
  constexpr int ROWS = CHANNELS_LAST ? TILE_P : TILE_M;
  constexpr int RUNS = (CHANNELS_LAST ? TILE_M : TILE_P) / VECTOR;
  for (int run = Crew::thread(); run < ROWS * RUNS; run += Crew::THREADS) {
    const int row = run / RUNS;
    const int column = run % RUNS * VECTOR;
    const int p = CHANNELS_LAST ? row : column;
    const int m = m0 + (CHANNELS_LAST ? column : row);
    const int place = target.y_of_pixel[p];
    if (place >= 0 && m < target.m) {
      action(row * PITCH + column, place + m * target.y_m);
    }
  }
}

// Bias, residual and activation, rounding, and the way out: through shared memory, so that
// neighbouring threads store VECTOR elements each of one contiguous run. The residual comes in as
// the result goes out. The caller has made sure that nobody reads `staged` any more. All threads
// of the Crew call it, and agree on the tile.
//
// A thread's sums are those of Sums; each 16 pixels are STEP_P after the last, from warp_p on, and
// the filters begin at warp_m. `staged` holds TILE_P pixels by TILE_M filters; where the threads
// have more filters than that, it is filled several times. VECTOR filters of a pixel
// (CHANNELS_LAST) or VECTOR pixels of a filter lie side by side in y and are aligned.
template <typename Crew, int TILE_P, int TILE_M, bool CHANNELS_LAST, int VECTOR,
          Activation ACTIVATION, int STEP_P, int ROWS_P, int COLUMNS, typename T>
__device__ void store(const float (&acc)[ROWS_P][COLUMNS][4], int warp_p, int warp_m, int lane,
                      const Target<T>& target, unsigned char* staged, T* y) {
  // Rows begin on other banks, and on whole chunks of 16 bytes.
  constexpr int PITCH = CHANNELS_LAST ? TILE_M + 8 : TILE_P + 16 / static_cast<int>(sizeof(T));
  constexpr int ROUND = COLUMNS * 8 > TILE_M ? TILE_M / 8 : COLUMNS;
  static_assert(COLUMNS % ROUND == 0, "whole rounds");
  T* tile = reinterpret_cast<T*>(staged);
#pragma unroll
  for (int first = 0; first < COLUMNS; first += ROUND) {
    if (first) {
      Crew::sync();  // all have read the round before
    }
    const int m0 = target.m0 + first * 8;
    const auto each_run = [&](auto action) {
      for_runs<Crew, TILE_P, TILE_M, CHANNELS_LAST, VECTOR, PITCH>(target, m0, action);
    };
    if (target.residual != nullptr) {
      each_run([&](int at, int place) { copy_run<VECTOR>(tile + at, target.residual + place); });
      Crew::sync();  // the residual is complete, and each element is replaced by who reads it
    }
#pragma unroll
    for (int j = 0; j < ROUND; j++) {
      const int m = warp_m + j * 8 + lane % 4 * 2;  // within the tile
      const int last = target.m - 1;
      const float bias0 = to_float(target.bias[min(m0 + m, last)]);
      const float bias1 = to_float(target.bias[min(m0 + m + 1, last)]);
#pragma unroll
      for (int i = 0; i < ROWS_P; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int p = warp_p + i * STEP_P + half * 8 + lane / 4;
          T* const one = tile + (CHANNELS_LAST ? p * PITCH + m : m * PITCH + p);
          T* const two = one + (CHANNELS_LAST ? 1 : PITCH);
          float v0 = acc[i][first + j][2 * half] + bias0;
          float v1 = acc[i][first + j][2 * half + 1] + bias1;
          if (target.residual != nullptr) {
            v0 += to_float(*one);
            v1 += to_float(*two);
          }
          v0 = activate<ACTIVATION>(v0, target.act_a, target.act_b);
          v1 = activate<ACTIVATION>(v1, target.act_a, target.act_b);
          if constexpr (CHANNELS_LAST) {
            store_pair(one, v0, v1);
          } else {
            *one = from_float<T>(v0);
            *two = from_float<T>(v1);
          }
        }
      }
    }
    Crew::sync();  // the tile is complete
    each_run([&](int at, int place) { copy_run<VECTOR>(y + place, tile + at); });
  }
}

// The partial sums of a split product, as they are: reduce_splits finishes. With PAIRS two
// neighbouring filters lie side by side in y, aligned to both.
template <int STEP_P, bool PAIRS = false, int ROWS_P, int COLUMNS, typename T>
__device__ void store_partial(const float (&acc)[ROWS_P][COLUMNS][4], int warp_p, int warp_m,
                              int lane, const Target<T>& target, float* y) {
#pragma unroll
  for (int i = 0; i < ROWS_P; i++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int place = target.y_of_pixel[warp_p + i * STEP_P + half * 8 + lane / 4];
#pragma unroll
      for (int j = 0; j < COLUMNS; j++) {
        const int m = target.m0 + warp_m + j * 8 + lane % 4 * 2;
        if constexpr (PAIRS) {
          if (place >= 0 && m < target.m) {
            store_pair(y + place + m, acc[i][j][2 * half], acc[i][j][2 * half + 1]);
          }
        } else {
#pragma unroll
          for (int one = 0; one < 2; one++) {
            if (place >= 0 && m + one < target.m) {
              y[place + (m + one) * target.y_m] = acc[i][j][2 * half + one];
            }
          }
        }
      }
    }
  }
}
