// Runs one CUDA kernel on the CPU: clusters of blocks one after the other, their threads as fibers.
//
// It takes the place of kernels/ptx.cuh and kernels/wgmma.cuh, with the same functions. What the
// hardware does together (barriers, ldmatrix, mma) happens when the last thread arrives.
// Asynchronous copies happen as late as the kernel's own waits allow, and in every other launch at
// once; asynchronous products as late as they may. Shared memory begins as NaN, and addresses are
// checked: a missing wait or barrier, a wrong place and a misaligned copy show as wrong results or
// end the launch.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __expf expf

struct int2 {
  int x, y;
};
struct int4 {
  int x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
static inline float __uint_as_float(unsigned bits) {
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}
static inline unsigned __float_as_uint(float v) {
  unsigned bits;
  std::memcpy(&bits, &v, 4);
  return bits;
}
static inline float __fdividef(float a, float b) { return a / b; }
static constexpr float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct Index {
  unsigned x = 0;
};

static Index threadIdx, blockIdx, gridDim;
static constexpr int min(int a, int b) { return a < b ? a : b; }
static constexpr int max(int a, int b) { return a < b ? b : a; }

namespace emulator {

static ucontext_t main_context;
static bool in_thread;
static char fault[200];  // what the kernel did wrong, the first time

struct Failure {};

// Ends the launch.
[[noreturn]] inline void fail(const char* what) {
  std::snprintf(fault, sizeof fault, "block %u thread %u: %s", blockIdx.x, threadIdx.x, what);
  if (in_thread) {
    setcontext(&main_context);
  }
  throw Failure();
}

struct Copy {
  unsigned to;
  const void* from;
  int bytes;
  bool valid;
  bool rounded = false;  // floats, to TF32
};

// acc[64 x 8 columns] += a * b. Matrix a lies in shared memory, or in fragments of the threads.
struct Product {
  float (*acc)[4];
  int columns;
  int bytes;  // of an element
  unsigned long long a, b;
  bool transposed_a;
  const unsigned* fragment;
  float (*element)(unsigned bits);
};

constexpr std::size_t STACK_BYTES = 256 << 10;

struct Fiber {
  ucontext_t context;
  // Not cleared, and given back: of hundreds of kernels they would fill the memory.
  std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
  std::deque<std::vector<Copy>> groups;  // of copies on their way
  std::vector<Copy> group;
  std::deque<std::vector<Copy>> stores;  // on their way out: their `from` is where they go
  std::vector<Copy> store;
  bool done = false;
  // Where it wrote to shared memory what the copy engine may not see yet: the first and the last.
  const unsigned char *unpublished = nullptr, *unpublished_last = nullptr;
  bool waited = false;  // for the kernel before
  // What the thread waits for: that the word, as far as the mask goes, is no longer this value.
  const unsigned* word = nullptr;
  unsigned value, mask;
  void* deposit[3];
  std::deque<std::vector<Product>> product_groups;
  std::vector<Product> products;
};

// What arrives at a barrier in shared memory by itself.
struct Arrival {
  std::vector<Copy> copies;
  unsigned barrier;
  bool bulk;
};

struct Barrier {
  int arrivals;
  int missing;
  long bytes = 0;  // that the phase waits for
  unsigned phase = 0;
};

// Threads that wait for each other: a block, a part of it, or a warp.
struct Meeting {
  int arrived = 0;
  unsigned turn = 0;
};

struct Block {
  Meeting all, parts[16];
  std::vector<Meeting> warps;
  std::vector<unsigned char> shared;  // NaN before the block begins and after it has ended
  std::map<unsigned, Barrier> barriers;
  std::deque<Arrival> arrivals;
  unsigned landed = 0;
  int running;
};

static std::vector<Fiber> fibers;
static std::vector<Block> blocks;  // of the cluster
static Meeting cluster;
static Block* block;  // whose thread runs
static int block_threads;
static std::vector<std::pair<const char*, const char*>> arrays;
static bool eager = true;  // copies land at once
static long progress;      // counts what other threads may wait for

inline Fiber& self() { return fibers[(block - blocks.data()) * block_threads + threadIdx.x]; }

inline void yield() { swapcontext(&self().context, &main_context); }

inline void wait_while(const unsigned& word, unsigned value, unsigned mask) {
  auto& fiber = self();
  fiber.word = &word;
  fiber.value = value;
  fiber.mask = mask;
  while (((word ^ value) & mask) == 0) {
    yield();
  }
  fiber.word = nullptr;
}

template <typename Action>
void meet(Meeting& meeting, int count, Action action) {
  progress++;
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    meeting.turn++;
    action();
    return;
  }
  wait_while(meeting.turn, meeting.turn, ~0u);
}

template <typename Action>
void meet_warp(Action action) {
  const int warp = threadIdx.x / 32;
  meet(block->warps[warp], 32, [&] { action(&self() - threadIdx.x % 32); });
}

// To nearest, ties to even, as the copy engine rounds. (Its NaN is 7fffe000.)
inline unsigned nearest_tf32(unsigned bits) {
  return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fffe000
                                          : (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
}

inline void land(const Copy& copy) {
  if (copy.valid) {
    std::memcpy(&block->shared[copy.to], copy.from, copy.bytes);
  } else {
    std::memset(&block->shared[copy.to], 0, copy.bytes);
  }
  for (int i = 0; copy.rounded && i < copy.bytes; i += 4) {
    auto* bits = reinterpret_cast<unsigned*>(&block->shared[copy.to + i]);
    *bits = nearest_tf32(*bits);
  }
}

inline Barrier& barrier_at(unsigned at) {
  const auto found = block->barriers.find(at);
  if (found == block->barriers.end()) {
    fail("no barrier has been set up there");
  }
  return found->second;
}

inline void arrive(unsigned at, int arrivals, long bytes) {
  auto& barrier = barrier_at(at);
  progress++;
  barrier.missing -= arrivals;
  barrier.bytes += bytes;
  if (barrier.missing < 0) {
    fail("more arrivals at a barrier than it was set up for");
  }
  if (barrier.missing == 0 && barrier.bytes == 0) {
    barrier.missing = barrier.arrivals;
    barrier.phase++;
  }
}

// They may land in any order: now the last one, now any other.
inline void land_next() {
  auto& all = block->arrivals;
  block->landed++;
  const auto last = all.size() - 1;
  const auto which = block->landed % 2 ? last : block->landed * 2654435761u / 65536 % all.size();
  const auto next = std::move(all[which]);
  all.erase(all.begin() + which);
  long bytes = 0;
  for (const auto& copy : next.copies) {
    land(copy);
    bytes += copy.bytes;
  }
  arrive(next.barrier, next.bulk ? 0 : 1, next.bulk ? -bytes : 0);
}

inline void begin_arrival(Arrival arrival) {
  block->arrivals.push_back(std::move(arrival));
  progress++;
  if (eager) {
    land_next();
  }
}

inline void check_source(const char* first, int bytes, int aligned) {
  if (!self().waited) {
    fail("a copy before the kernel has waited for the one before it");
  }
  for (auto [begin, end] : arrays) {
    if (begin <= first && first + bytes <= end && (first - begin) % aligned == 0) {
      return;
    }
  }
  fail("a copy from outside of all arrays, or misaligned");
}

inline void check_target(unsigned to, int bytes, int aligned) {
  if (to % aligned || to + bytes > block->shared.size()) {
    fail("a copy to a wrong place in shared memory");
  }
}

template <typename Argument>
Argument argument(void* given) {
  if constexpr (std::is_pointer_v<Argument>) {
    return static_cast<Argument>(given);
  } else {
    return *static_cast<const Argument*>(given);
  }
}

template <typename Params, typename... Arguments, std::size_t... I>
void call(void (*kernel)(Params, Arguments...), const void* params, void** given,
          std::index_sequence<I...>) {
  kernel(*static_cast<const Params*>(params), argument<Arguments>(given[I])...);
}

static void (*entry)();
inline void begin() {
  entry();
  self().done = true;
  yield();
}

inline void start(Fiber& fiber) {
  fiber.done = false;
  fiber.unpublished = nullptr;
  fiber.waited = false;
  fiber.word = nullptr;
  fiber.groups.clear();
  fiber.group.clear();
  fiber.stores.clear();
  fiber.store.clear();
  fiber.product_groups.clear();
  fiber.products.clear();
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = STACK_BYTES;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, begin, 0);
}

// Of every other launch, warps fall asleep for a while, each at another time: others get ahead.
inline bool asleep(int warp, long round) {
  const unsigned mixed = (warp * 2654435761u) ^ (static_cast<unsigned>(round / 4) * 2246822519u);
  return !eager && (mixed * 3266489917u) >> 31;
}

// Each thread of the block until it waits.
inline void run_threads(Fiber* first, long round) {
  for (int i = 0; i < block_threads; i++) {
    auto& fiber = first[i];
    if (fiber.done || (fiber.word && ((*fiber.word ^ fiber.value) & fiber.mask) == 0)) {
      continue;
    }
    if (asleep(i / 32, round)) {
      progress++;  // it has only to wake up
      continue;
    }
    threadIdx.x = i;
    in_thread = true;
    swapcontext(&main_context, &fiber.context);
    in_thread = false;
    if (*fault) {
      throw Failure();
    }
    if (fiber.done) {
      progress++;
      block->running--;
      if (!fiber.waited) {
        fail("the thread ended and has not waited for the kernel before");
      }
      if (!fiber.groups.empty() || !fiber.group.empty() || !fiber.stores.empty() ||
          !fiber.store.empty() || !fiber.product_groups.empty() || !fiber.products.empty()) {
        fail("copies or products were still on their way when the thread ended");
      }
    }
  }
  if (!block->running) {
    if (!block->arrivals.empty()) {
      fail("copies were still on their way when the block ended");
    }
    block->shared.assign(block->shared.size(), 0xff);
  }
}

inline void run_blocks(unsigned grid, int threads, unsigned shared_bytes, int cluster_blocks,
                       void (*kernel)()) {
  entry = kernel;
  block_threads = threads;
  gridDim.x = grid;
  eager = !eager;
  if (grid % cluster_blocks) {
    fail("the grid is no multiple of the cluster");
  }
  fibers.resize(threads * cluster_blocks);
  for (unsigned first = 0; first < grid; first += cluster_blocks) {
    cluster = {};
    blocks.assign(cluster_blocks, {});
    for (auto& each : blocks) {
      each.warps.assign(threads / 32, {});
      each.shared.assign(shared_bytes, 0xff);
      each.running = threads;
    }
    for (auto& fiber : fibers) {
      start(fiber);
    }
    long round = 0;
    for (bool running = true; running; round++) {
      const long before = progress;
      running = false;
      for (int i = 0; i < cluster_blocks; i++) {
        block = &blocks[i];
        blockIdx.x = first + i;
        if (block->running) {
          run_threads(&fibers[i * threads], round);
        }
        running |= block->running > 0;
      }
      if (running && progress == before) {
        for (auto& each : blocks) {
          block = &each;
          if (!block->arrivals.empty()) {
            land_next();
            break;
          }
        }
        if (progress == before) {
          fail("all threads wait for each other");
        }
      }
    }
  }
}

// Returns what the kernel did wrong, or nothing.
inline const char* launch(unsigned grid, int threads, unsigned shared_bytes, int cluster_blocks,
                          void (*kernel)()) {
  *fault = 0;
  try {
    run_blocks(grid, threads, shared_bytes, cluster_blocks, kernel);
  } catch (Failure) {
  }
  fibers.clear();
  return fault;
}

}  // namespace emulator

inline void __syncthreads() {
  emulator::meet(emulator::block->all, emulator::block_threads, [] {});
}

inline void __syncwarp() {
  emulator::meet_warp([](emulator::Fiber*) {});
}

template <int COUNT>
void sync_some(int number) {
  static_assert(COUNT % 32 == 0);
  if (number < 1 || number > 15) {
    emulator::fail("no such barrier");
  }
  emulator::meet(emulator::block->parts[number], COUNT, [] {});
}

// ---- the functions of ptx.cuh ----

struct Half {
  unsigned short bits;
};
struct Bfloat {
  unsigned short bits;
};

inline void wait_for_previous() { emulator::self().waited = true; }
inline void let_next_start() {}

inline float to_float(float v) { return v; }
// The instructions of F16C by g++'s own names: immintrin.h takes longer to read than all the rest.
using Shorts = short __attribute__((vector_size(16)));
using Floats = float __attribute__((vector_size(16)));
inline float to_float(Half v) {
  return __builtin_ia32_vcvtph2ps(Shorts{static_cast<short>(v.bits)})[0];
}

inline float to_float(Bfloat v) { return __uint_as_float(unsigned{v.bits} << 16); }

template <typename T>
T from_float(float v);
template <>
inline float from_float<float>(float v) {
  return v;
}
template <>
inline Half from_float<Half>(float v) {
  return {static_cast<unsigned short>(__builtin_ia32_vcvtps2ph(Floats{v}, 0)[0])};
}
template <>
inline Bfloat from_float<Bfloat>(float v) {
  const unsigned bits = __float_as_uint(v);
  const unsigned odd = bits >> 16 & 1;
  return {static_cast<unsigned short>((std::isnan(v) ? 0x7fff0000u : bits + 0x7fff + odd) >> 16)};
}

template <typename T>
void store_pair(T* to, float first, float second) {
  if (reinterpret_cast<std::uintptr_t>(to) % (2 * sizeof(T))) {
    emulator::fail("a misaligned pair");
  }
  to[0] = from_float<T>(first);
  to[1] = from_float<T>(second);
  auto& fiber = emulator::self();
  const auto* at = reinterpret_cast<const unsigned char*>(to);
  fiber.unpublished_last = fiber.unpublished ? std::max(fiber.unpublished_last, at) : at;
  fiber.unpublished = fiber.unpublished ? std::min(fiber.unpublished, at) : at;
}

inline float from_lane(float v, int lane) {
  auto& deposit = emulator::self().deposit;
  deposit[0] = &v;
  deposit[1] = &lane;
  float found;
  deposit[2] = &found;
  emulator::meet_warp([](emulator::Fiber* lanes) {
    for (int i = 0; i < 32; i++) {
      const int from = *static_cast<int*>(lanes[i].deposit[1]);
      *static_cast<float*>(lanes[i].deposit[2]) = *static_cast<float*>(lanes[from].deposit[0]);
    }
  });
  return found;
}

inline unsigned char* shared_memory() { return emulator::block->shared.data(); }

inline unsigned shared_address(const void* pointer) {
  return static_cast<const unsigned char*>(pointer) - emulator::block->shared.data();
}

constexpr int NOWHERE = -16;

template <typename T>
T load_or_zero(const T* from, bool valid) {
  if (valid) {
    emulator::check_source(reinterpret_cast<const char*>(from), sizeof(T), sizeof(T));
  }
  return valid ? *from : T{};
}

template <bool STREAMED, typename T>
void store_run(T* to, T v) {
  *to = v;
}

template <int BYTES, bool CACHED = BYTES != 16>
void copy_async(unsigned to, const void* from, bool valid) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16);
  static_assert(CACHED || BYTES == 16);
  emulator::check_target(to, BYTES, BYTES);
  if (valid) {
    emulator::check_source(static_cast<const char*>(from), BYTES, BYTES);
  } else if (reinterpret_cast<std::uintptr_t>(from) % BYTES) {
    emulator::fail("a misaligned copy, if of nothing");
  }
  const emulator::Copy copy{to, from, BYTES, valid};
  if (emulator::eager) {
    emulator::land(copy);
  } else {
    emulator::self().group.push_back(copy);
  }
}

inline void commit_copies() {
  auto& fiber = emulator::self();
  fiber.groups.push_back(std::move(fiber.group));
  fiber.group.clear();
}

template <int PENDING>
void wait_copies() {
  auto& groups = emulator::self().groups;
  while (groups.size() > PENDING) {
    for (const auto& copy : groups.front()) {
      emulator::land(copy);
    }
    groups.pop_front();
  }
}

inline void load_matrices(unsigned (&to)[4], unsigned from) {
  if (from % 16 || from + 16 > emulator::block->shared.size()) {
    emulator::fail("a matrix row from a wrong place in shared memory");
  }
  auto& deposit = emulator::self().deposit;
  deposit[0] = to;
  deposit[1] = &from;
  emulator::meet_warp([](emulator::Fiber* lanes) {
    for (int lane = 0; lane < 32; lane++) {
      for (int matrix = 0; matrix < 4; matrix++) {
        const auto row = *static_cast<unsigned*>(lanes[matrix * 8 + lane / 4].deposit[1]);
        std::memcpy(static_cast<unsigned*>(lanes[lane].deposit[0]) + matrix,
                    &emulator::block->shared[row + lane % 4 * 4], 4);
      }
    }
  });
}

inline Half as_operand(Half v) { return v; }
inline Bfloat as_operand(Bfloat v) { return v; }

// To nearest, halfway cases away from zero, as cvt.rna.tf32.f32 does.
inline float as_operand(float v) {
  return std::isfinite(v) ? __uint_as_float((__float_as_uint(v) + 0x1000) & ~0x1fffu) : v;
}

// Element i of the words of a fragment, as tensor cores see it.
template <typename T>
float operand(T, const unsigned* words, int word, int i) {
  return to_float(T{static_cast<unsigned short>(words[word] >> 16 * i)});
}
inline float operand(float, const unsigned* words, int word, int) {
  if (words[word] & 0x1fff && std::isfinite(__uint_as_float(words[word]))) {
    emulator::fail("an operand that was not rounded to TF32");
  }
  return __uint_as_float(words[word]);
}

template <typename T>
void multiply_add(float (&acc)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  unsigned b[2] = {b0, b1};
  auto& deposit = emulator::self().deposit;
  deposit[0] = acc;
  deposit[1] = const_cast<unsigned*>(a);
  deposit[2] = b;
  emulator::meet_warp([](emulator::Fiber* lanes) {
    constexpr int PACKED = 4 / sizeof(T), K = 8 * PACKED;  // elements of a word, and of a product
    float left[16][K], right[K][8];
    for (int lane = 0; lane < 32; lane++) {
      const auto* words = static_cast<const unsigned*>(lanes[lane].deposit[1]);
      const auto* columns = static_cast<const unsigned*>(lanes[lane].deposit[2]);
      for (int i = 0; i < PACKED; i++) {
        const int k = lane % 4 * PACKED + i;
        for (int word = 0; word < 4; word++) {
          left[lane / 4 + word % 2 * 8][k + word / 2 * 4 * PACKED] = operand(T{}, words, word, i);
        }
        for (int word = 0; word < 2; word++) {
          right[k + word * 4 * PACKED][lane / 4] = operand(T{}, columns, word, i);
        }
      }
    }
    for (int lane = 0; lane < 32; lane++) {
      auto* sums = static_cast<float*>(lanes[lane].deposit[0]);
      for (int i = 0; i < 4; i++) {
        for (int k = 0; k < K; k++) {
          sums[i] += left[lane / 4 + i / 2 * 8][k] * right[k][lane % 4 * 2 + i % 2];
        }
      }
    }
  });
}

// ---- the functions of wgmma.cuh ----

inline void publish_copies() { emulator::self().unpublished = nullptr; }
inline void begin_products() {}

inline void commit_products() {
  auto& fiber = emulator::self();
  fiber.product_groups.push_back(std::move(fiber.products));
  fiber.products.clear();
}

// The element (row, k) of a matrix that is described as wgmma wants it.
inline unsigned described(unsigned long long matrix, int row, int k, int bytes, bool transposed) {
  auto field = [&](int bit) { return static_cast<unsigned>(matrix >> bit & 0x3fff) * 16; };
  const int permuted = matrix >> 62;
  const int pitch = 256 >> permuted;  // of rows that are permuted: 128, 64 or 32 bytes
  const int in_row = k * bytes;
  unsigned at = field(0);
  if (transposed) {  // lines of 64 rows, eight of them for as many k
    if (permuted != 1 || bytes != 2 || at % 1024) {
      emulator::fail("a transposed matrix is described otherwise");
    }
    at += row / 64 * field(16) + k / 8 * field(32) + k % 8 * 128 + row % 64 * bytes;
  } else if (permuted) {
    at += row / 8 * field(32) + row % 8 * pitch + in_row;
  } else {
    at += row / 8 * field(32) + row % 8 * 16 + in_row / 16 * field(16) + in_row % 16;
  }
  if (permuted) {
    at ^= (at >> 7 & (pitch / 16 - 1)) << 4;
  }
  if (matrix & 0x3fffc000c000c000 || at + bytes > emulator::block->shared.size()) {
    emulator::fail("a matrix outside of shared memory");
  }
  unsigned bits = 0;
  std::memcpy(&bits, &emulator::block->shared[at], bytes);
  return bits;
}

namespace emulator {

// The part of a product that the threads of one warp hold.
inline void multiply(Fiber* lanes, std::size_t number) {
  const int warp = (lanes - fibers.data()) % block_threads / 32 % 4;
  auto product = [&](int lane) { return lanes[lane].product_groups.front()[number]; };
  const Product first = product(0);
  const int depth = 32 / first.bytes;
  float left[16][16], right[256][16];
  for (int k = 0; k < depth; k++) {
    for (int row = 0; row < 16; row++) {
      const unsigned bits = first.fragment
                                ? product(row % 8 * 4 + k % 4).fragment[row / 8 + k / 4 * 2]
                                : described(first.a, warp * 16 + row, k, first.bytes,
                                            first.transposed_a);
      left[row][k] = first.element(bits);
    }
    for (int column = 0; column < first.columns * 8; column++) {
      right[column][k] = first.element(described(first.b, column, k, first.bytes, false));
    }
  }
  for (int lane = 0; lane < 32; lane++) {
    float(*acc)[4] = product(lane).acc;
    for (int j = 0; j < first.columns; j++) {
      for (int i = 0; i < 4; i++) {
        const float* row = left[lane / 4 + i / 2 * 8];
        const float* column = right[j * 8 + lane % 4 * 2 + i % 2];
        for (int k = 0; k < depth; k++) {
          acc[j][i] += row[k] * column[k];
        }
      }
    }
  }
}

}  // namespace emulator

// As late as it may; fragments must not have changed until then.
template <int PENDING>
void wait_products() {
  emulator::meet_warp([](emulator::Fiber* lanes) {
    while (lanes[0].product_groups.size() > PENDING) {
      for (std::size_t i = 0; i < lanes[0].product_groups.front().size(); i++) {
        emulator::multiply(lanes, i);
      }
      for (int lane = 0; lane < 32; lane++) {
        lanes[lane].product_groups.pop_front();
      }
    }
  });
}

template <typename T>
float operand_of_bits(unsigned bits) {
  return operand(T{}, &bits, 0, 0);
}

template <typename T, bool TRANSPOSED_A = false, int COLUMNS>
void multiply_add_async(float (&acc)[COLUMNS][4], unsigned long long a, unsigned long long b) {
  static_assert(!TRANSPOSED_A || sizeof(T) == 2, "floats lie with their k side by side");
  emulator::self().products.push_back(
      {acc, COLUMNS, sizeof(T), a, b, TRANSPOSED_A, nullptr, operand_of_bits<T>});
}

template <typename T, int COLUMNS>
void multiply_add_async(float (&acc)[COLUMNS][4], const unsigned (&a)[4], unsigned long long b) {
  static_assert(sizeof(T) == 4, "fragments of halves lie otherwise");
  emulator::self().products.push_back(
      {acc, COLUMNS, sizeof(T), 0, b, false, a, operand_of_bits<T>});
}

// Each lane's word comes from another bank.
inline unsigned load_word(unsigned from) {
  emulator::check_target(from, 4, 4);
  emulator::self().deposit[0] = &from;
  emulator::meet_warp([](emulator::Fiber* lanes) {
    unsigned banks = 0;
    for (int lane = 0; lane < 32; lane++) {
      banks |= 1u << *static_cast<unsigned*>(lanes[lane].deposit[0]) / 4 % 32;
    }
    if (~banks) {
      emulator::fail("two lanes load words of one bank");
    }
  });
  unsigned word;
  std::memcpy(&word, &emulator::block->shared[from], 4);
  return word;
}

inline unsigned long long core_matrices(unsigned at_and_next_k, unsigned next_rows) {
  return at_and_next_k | static_cast<unsigned long long>(next_rows) << 32;
}

constexpr unsigned permutation(int chunks) {
  return chunks == 8 ? 1u << 30 : chunks == 4 ? 2u << 30 : chunks == 2 ? 3u << 30 : 0;
}

template <typename T>
void store_transposed(unsigned to, const float (&v)[4][2]) {
  emulator::check_target(to, 16, 16);
  auto& deposit = emulator::self().deposit;
  deposit[0] = &to;
  deposit[1] = const_cast<float(*)[2]>(v);
  emulator::meet_warp([](emulator::Fiber* lanes) {
    for (int lane = 0; lane < 32; lane++) {
      for (int matrix = 0; matrix < 4; matrix++) {
        for (int i = 0; i < 2; i++) {
          const int column = lane % 4 * 2 + i;
          const auto at = *static_cast<unsigned*>(lanes[matrix * 8 + column].deposit[0]);
          const auto value = static_cast<const float(*)[2]>(lanes[lane].deposit[1])[matrix][i];
          const T rounded = from_float<T>(value);
          std::memcpy(&emulator::block->shared[at + lane / 4 * 2], &rounded, 2);
        }
      }
    }
  });
}

inline void set_up_barrier(unsigned barrier, int arrivals) {
  emulator::check_target(barrier, 8, 8);
  emulator::block->barriers[barrier] = {arrivals, arrivals};
}

inline void publish_barriers() {}

// Others run at once: what they do too early shows.
inline void arrive(unsigned barrier) {
  emulator::arrive(barrier, 1, 0);
  emulator::yield();
}

inline void arrive_warp(unsigned barrier, int lane) {
  __syncwarp();
  if (barrier != 0 && lane == 0) {
    arrive(barrier);
  }
}

inline void arrive_expecting(unsigned barrier, int bytes) { emulator::arrive(barrier, 1, bytes); }

inline void arrive_with_copies(unsigned barrier) {
  auto& fiber = emulator::self();
  if (!fiber.groups.empty()) {
    emulator::fail("copies of a group that has been ended do not arrive at a barrier");
  }
  emulator::begin_arrival({std::move(fiber.group), barrier, false});
  fiber.group.clear();
}

inline void wait_barrier(unsigned barrier, unsigned parity) {
  emulator::wait_while(emulator::barrier_at(barrier).phase, parity, 1);
}

inline void copy_bulk(unsigned to, const void* from, int bytes, unsigned barrier) {
  emulator::check_target(to, bytes, 16);
  emulator::check_source(static_cast<const char*>(from), bytes, 16);
  emulator::begin_arrival({{{to, from, bytes, true}}, barrier, true});
}

// As tensor_map in cuda_emulator.py writes it.
struct alignas(64) TensorMap {
  const char* array;
  int bytes;  // of an element
  int axes;
  int rounded;
  int sizes[5], box[5], steps[5];
  int lower[2], upper[2];
  long long strides[4];  // in bytes, from the second axis on
};
static_assert(sizeof(TensorMap) == 128, "the size of the driver's own");

namespace emulator {

// Appends the copies of one row along the first axis, whose element `first` lies at this place of the
// other ones.
inline void copy_row(std::vector<Copy>& copies, unsigned to, const TensorMap& map, int first,
                     const int* place) {
  const int row_bytes = map.box[0] * map.bytes;
  bool inside = true;
  long long offset = 0;
  for (int axis = 1; axis < map.axes; axis++) {
    inside &= place[axis - 1] >= 0 && place[axis - 1] < map.sizes[axis];
    offset += place[axis - 1] * map.strides[axis - 1];
  }
  for (int chunk = 0; chunk < row_bytes / 16; chunk++) {
    const int element = first + chunk * 16 / map.bytes;
    const char* from = map.array + offset + element * map.bytes;
    const bool valid = inside && element < map.sizes[0];
    if (valid) {
      check_source(from, 16, 16);
    }
    const unsigned at = to + chunk * 16;
    copies.push_back(
        {at ^ (at >> 7 & (row_bytes / 16 - 1)) << 4, from, 16, valid, map.rounded != 0});
  }
}

}  // namespace emulator

inline void copy_rows(unsigned to, const TensorMap& map, int c, int tap, int row,
                      unsigned barrier) {
  const int row_bytes = map.box[0] * map.bytes;
  emulator::check_target(to, map.box[2] * row_bytes, 128);
  emulator::Arrival arrival{{}, barrier, true};
  for (int i = 0; i < map.box[2]; i++) {
    const int place[] = {tap, row + i};
    emulator::copy_row(arrival.copies, to + i * row_bytes, map, c, place);
  }
  emulator::begin_arrival(std::move(arrival));
}

inline void copy_box(unsigned to, const TensorMap& map, int c, int group, int w, int h, int n,
                     unsigned barrier) {
  const int row_bytes = map.box[0] * map.bytes;
  const int columns = (map.box[2] - 1) / map.steps[2] + 1;
  const int rows = (map.box[3] - 1) / map.steps[3] + 1;
  if (map.box[1] != 1 || map.box[4] != 1) {
    emulator::fail("a box of several groups or images");
  }
  emulator::check_target(to, rows * columns * row_bytes, 128);
  emulator::Arrival arrival{{}, barrier, true};
  for (int i = 0; i < rows * columns; i++) {
    const int place[] = {group, w + i % columns * map.steps[2], h + i / columns * map.steps[3], n};
    emulator::copy_row(arrival.copies, to + i * row_bytes, map, c, place);
  }
  emulator::begin_arrival(std::move(arrival));
}

inline void store_box(const TensorMap& map, unsigned from, int m, int group, int pixel) {
  const int row_bytes = map.box[0] * map.bytes;
  emulator::check_target(from, map.box[2] * row_bytes, 128);
  const auto* begin = &emulator::block->shared[from];
  for (const auto& fiber : emulator::fibers) {
    if (fiber.unpublished && fiber.unpublished < begin + map.box[2] * row_bytes &&
        fiber.unpublished_last >= begin) {
      emulator::fail("the copy engine may not see what a thread has written");
    }
  }
  for (int i = 0; i < map.box[2]; i++) {
    const long long offset = group * map.strides[0] + (pixel + i) * map.strides[1];
    for (int chunk = 0; chunk < row_bytes / 16; chunk++) {
      const int element = m + chunk * 16 / map.bytes;
      const char* to = map.array + offset + element * map.bytes;
      if (group < map.sizes[1] && pixel + i < map.sizes[2] && element < map.sizes[0]) {
        emulator::check_source(to, 16, 16);
        const unsigned at = from + i * row_bytes + chunk * 16;
        emulator::self().store.push_back({at ^ (at >> 7 & (row_bytes / 16 - 1)) << 4, to, 16, true});
      }
    }
  }
}

template <int PENDING>
void wait_stores() {
  auto& stores = emulator::self().stores;
  while (stores.size() > PENDING) {
    for (const auto& copy : stores.front()) {
      std::memcpy(const_cast<void*>(copy.from), &emulator::block->shared[copy.to], copy.bytes);
    }
    stores.pop_front();
  }
}

inline void commit_stores() {
  auto& fiber = emulator::self();
  fiber.stores.push_back(std::move(fiber.store));
  fiber.store.clear();
  if (emulator::eager) {
    wait_stores<0>();
  }
}

inline void copy_columns(unsigned to, const TensorMap& map, int c, int w, int h, int n, int tap_w,
                         int tap_h, unsigned barrier) {
  const int pixels = map.box[1];
  emulator::check_target(to, pixels * 128, 1024);
  if (tap_w < 0 || tap_w > 255 || tap_h < 0 || tap_h > 255) {
    emulator::fail("a tap that lies too far from the first one");
  }
  emulator::Arrival arrival{{}, barrier, true};
  for (int i = 0; i < pixels; i++) {
    const int place[] = {w + tap_w, h + tap_h, n};
    emulator::copy_row(arrival.copies, to + i * 128, map, c, place);
    w += map.steps[1];
    if (w > map.sizes[1] - 1 + map.upper[0]) {
      w = map.lower[0];
      h += map.steps[2];
    }
    if (h > map.sizes[2] - 1 + map.upper[1]) {
      h = map.lower[1];
      n++;
    }
  }
  emulator::begin_arrival(std::move(arrival));
}

template <int COUNT>
void give_registers() {}
template <int COUNT>
void take_registers() {}

#define CLUSTER_OF(BLOCKS)

inline void sync_cluster() {
  emulator::meet(emulator::cluster, emulator::block_threads * emulator::blocks.size(), [] {});
}
inline void leave_cluster() { sync_cluster(); }

template <int COUNT>
void load_remote(float* to, unsigned from, int block) {
  emulator::check_target(from, 4 * COUNT, 4 * COUNT);
  std::memcpy(to, &emulator::blocks.at(block).shared[from], 4 * COUNT);
}
