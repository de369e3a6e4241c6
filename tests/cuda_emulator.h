// Runs one CUDA kernel on the CPU: blocks one after the other, the threads of a block as fibers.
//
// It takes the place of kernels/ptx.cuh and wgmma.cuh, with the same functions. What the hardware
// does together (barriers, ldmatrix, mma) happens when the last thread arrives. Asynchronous copies
// and products happen as late as the kernel's own waits allow, shared memory begins as NaN, and
// addresses are checked: a missing wait or barrier, a wrong place and a misaligned copy show as wrong
// results or abort.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)

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

static Index threadIdx, blockIdx;
static constexpr int min(int a, int b) { return a < b ? a : b; }
static constexpr int max(int a, int b) { return a < b ? b : a; }

namespace emulator {

static ucontext_t main_context;
static char fault[200];

// Ends the launch, which returns what is wrong.
[[noreturn]] inline void fail(const char* what) {
  std::snprintf(fault, sizeof fault, "emulated kernel, block %u thread %u: %s", blockIdx.x,
                threadIdx.x, what);
  setcontext(&main_context);
  std::abort();
}

struct Copy {
  unsigned to;
  const void* from;
  int bytes;
  bool valid;
};

struct Product {
  float (*acc)[4];
  int columns, depth;
  unsigned long long a, b;
  float (*element)(unsigned long long matrix, int row, int k);
};

// A barrier in shared memory: arrivals and bytes that its present phase still waits for.
struct Barrier {
  int count, arrivals;
  int bytes = 0;
  unsigned phase = 0;
  std::vector<Copy> copies;  // on their way
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(256 << 10);
  std::deque<std::vector<Copy>> groups;  // of copies on their way
  std::vector<Copy> group;
  bool done = false;
  void* deposit[3];
  std::deque<std::vector<Product>> product_groups;
  std::vector<Product> products;
};

// Threads that wait for each other: a block, or a warp.
struct Meeting {
  int arrived = 0;
  unsigned turn = 0;
};

static std::vector<Fiber> fibers;
static std::vector<Meeting> warps;
static Meeting block;
static std::map<int, Meeting> warpgroups;
static std::map<unsigned, Barrier> barriers;
static int block_threads;
static std::vector<unsigned char> shared;
static std::vector<std::pair<const char*, const char*>> arrays;

inline Fiber& self() { return fibers[threadIdx.x]; }

inline void yield() {
  const unsigned me = threadIdx.x;
  swapcontext(&fibers[me].context, &main_context);
  threadIdx.x = me;
}

template <typename Action>
void meet(Meeting& meeting, int count, Action action) {
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    meeting.turn++;
    action();
    return;
  }
  const unsigned turn = meeting.turn;
  while (meeting.turn == turn) {
    yield();
  }
}

template <typename Action>
void meet_warp(Action action) {
  const int first = threadIdx.x / 32 * 32;
  meet(warps[first / 32], 32, [&] { action(&fibers[first]); });
}

inline void land(const Copy& copy) {
  if (copy.valid) {
    std::memcpy(&shared[copy.to], copy.from, copy.bytes);
  } else {
    std::memset(&shared[copy.to], 0, copy.bytes);
  }
}

template <typename Params, typename... Pointers, std::size_t... I>
void call(void (*kernel)(Params, Pointers...), const void* params, void** pointers,
          std::index_sequence<I...>) {
  kernel(*static_cast<const Params*>(params), static_cast<Pointers>(pointers[I])...);
}

static void (*entry)();
inline void begin() {
  entry();
  self().done = true;
  yield();
}

inline const char* launch(unsigned grid, int threads, unsigned shared_bytes, void (*start)()) {
  entry = start;
  fault[0] = 0;
  block_threads = threads;
  fibers.resize(threads);
  warps.assign(threads / 32, {});
  for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) {
    shared.assign(shared_bytes, 0xff);
    block = {};
    warpgroups.clear();
    barriers.clear();
    for (auto& fiber : fibers) {
      fiber.done = false;
      fiber.groups.clear();
      fiber.group.clear();
      fiber.product_groups.clear();
      fiber.products.clear();
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, begin, 0);
    }
    int running = threads;
    while (running) {
      for (int i = 0; i < threads; i++) {
        if (!fibers[i].done) {
          threadIdx.x = i;
          swapcontext(&main_context, &fibers[i].context);
          if (fault[0]) {
            return fault;
          }
          running -= fibers[i].done;
        }
      }
    }
    for (auto& fiber : fibers) {
      if (!fiber.groups.empty() || !fiber.group.empty() || !fiber.product_groups.empty() ||
          !fiber.products.empty()) {
        return "copies or products were still on their way when the emulated kernel ended";
      }
    }
  }
  return nullptr;
}

}  // namespace emulator

inline void __syncthreads() { emulator::meet(emulator::block, emulator::block_threads, [] {}); }

// ---- the functions of ptx.cuh ----

struct Half {
  unsigned short bits;
};

inline float to_float(float v) { return v; }
// The instructions of F16C by g++'s own names: immintrin.h takes longer to read than all the rest.
using Shorts = short __attribute__((vector_size(16)));
using Floats = float __attribute__((vector_size(16)));
inline float to_float(Half v) {
  return __builtin_ia32_vcvtph2ps(Shorts{static_cast<short>(v.bits)})[0];
}

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

template <typename T>
void store_pair(T* to, float first, float second) {
  if (reinterpret_cast<std::uintptr_t>(to) % (2 * sizeof(T))) {
    emulator::fail("a misaligned pair");
  }
  to[0] = from_float<T>(first);
  to[1] = from_float<T>(second);
}

inline unsigned char* shared_memory() { return emulator::shared.data(); }

inline unsigned shared_address(const void* pointer) {
  return static_cast<const unsigned char*>(pointer) - emulator::shared.data();
}

template <int BYTES>
void copy_async(unsigned to, const void* from, bool valid) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16);
  if (to % BYTES || to + BYTES > emulator::shared.size()) {
    emulator::fail("a copy to a wrong place in shared memory");
  }
  if (valid) {
    const char* first = static_cast<const char*>(from);
    bool inside = false;
    for (auto [begin, end] : emulator::arrays) {
      inside |= begin <= first && first + BYTES <= end && (first - begin) % BYTES == 0;
    }
    if (!inside) {
      emulator::fail("a copy from outside of all arrays, or misaligned");
    }
  }
  emulator::self().group.push_back({to, from, BYTES, valid});
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
  if (from % 16 || from + 16 > emulator::shared.size()) {
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
                    &emulator::shared[row + lane % 4 * 4], 4);
      }
    }
  });
}

inline Half as_operand(Half v) { return v; }

// To nearest, halfway cases away from zero, as cvt.rna.tf32.f32 does.
inline float as_operand(float v) {
  return std::isfinite(v) ? __uint_as_float((__float_as_uint(v) + 0x1000) & ~0x1fffu) : v;
}

// Element i of the words of a fragment, as tensor cores see it.
inline float operand(Half, const unsigned* words, int word, int i) {
  return to_float(Half{static_cast<unsigned short>(words[word] >> 16 * i)});
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

inline void publish_copies() {}
inline void begin_products() {}

inline void commit_products() {
  auto& fiber = emulator::self();
  fiber.product_groups.push_back(std::move(fiber.products));
  fiber.products.clear();
}

// The element (row, k) of a matrix that is described as wgmma wants it, without a swizzle.
template <typename T>
float described(unsigned long long matrix, int row, int k) {
  constexpr int CHUNK = 16 / sizeof(T);
  auto field = [&](int bit) { return static_cast<unsigned>(matrix >> bit & 0x3fff) * 16; };
  const unsigned at = field(0) + row / 8 * field(32) + row % 8 * 16 + k / CHUNK * field(16) +
                      k % CHUNK * sizeof(T);
  if (matrix & 0xffffc000c000c000 || at + sizeof(T) > emulator::shared.size()) {
    emulator::fail("a matrix outside of shared memory");
  }
  unsigned word = 0;
  std::memcpy(&word, &emulator::shared[at], sizeof(T));
  return operand(T{}, &word, 0, 0);
}

// As late as it may: each thread computes its own part of the products that it waits for.
template <int PENDING>
void wait_products() {
  auto& groups = emulator::self().product_groups;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  while (groups.size() > PENDING) {
    for (const auto& product : groups.front()) {
      float a[2][16];
      for (int i = 0; i < 2; i++) {
        for (int k = 0; k < product.depth; k++) {
          a[i][k] = product.element(product.a, warp * 16 + lane / 4 + i * 8, k);
        }
      }
      for (int j = 0; j < product.columns; j++) {
        for (int one = 0; one < 2; one++) {
          for (int k = 0; k < product.depth; k++) {
            const float b = product.element(product.b, j * 8 + lane % 4 * 2 + one, k);
            product.acc[j][one] += a[0][k] * b;
            product.acc[j][2 + one] += a[1][k] * b;
          }
        }
      }
    }
    groups.pop_front();
  }
}

inline unsigned long long core_matrices(unsigned at_and_next_k, unsigned next_rows) {
  return at_and_next_k | static_cast<unsigned long long>(next_rows) << 32;
}

template <typename T, int COLUMNS>
void multiply_add_async(float (&acc)[COLUMNS][4], unsigned long long a, unsigned long long b) {
  emulator::self().products.push_back({acc, COLUMNS, 32 / sizeof(T), a, b, described<T>});
}

inline emulator::Barrier& barrier_at(unsigned barrier) {
  const auto found = emulator::barriers.find(barrier);
  if (found == emulator::barriers.end()) {
    emulator::fail("a barrier where none was set up");
  }
  return found->second;
}

inline void barrier_init(unsigned barrier, int arrivals) {
  if (barrier % 8 || barrier + 8 > emulator::shared.size() || emulator::barriers.count(barrier)) {
    emulator::fail("a barrier at a wrong place in shared memory");
  }
  emulator::barriers[barrier] = {arrivals, arrivals};
}

inline void publish_barriers() {}

template <int COUNT>
void give_registers() {}
template <int COUNT>
void take_registers() {}

inline void end_phase(emulator::Barrier& barrier) {
  if (barrier.arrivals == 0 && barrier.bytes == 0 && barrier.copies.empty()) {
    barrier.arrivals = barrier.count;
    barrier.phase++;
  }
}

inline void barrier_arrive(unsigned barrier) {
  auto& at = barrier_at(barrier);
  if (at.arrivals-- == 0) {
    emulator::fail("one arrival too many at a barrier");
  }
  end_phase(at);
}

inline void barrier_expect_bytes(unsigned barrier, int bytes) {
  barrier_at(barrier).bytes += bytes;
  barrier_arrive(barrier);
}

// Bulk copies land when all that is missing is they, and somebody waits.
inline void barrier_wait(unsigned barrier, unsigned parity) {
  auto& at = barrier_at(barrier);
  for (int turns = 0; (at.phase & 1) == (parity & 1); turns++) {
    if (at.arrivals == 0) {
      for (const auto& copy : at.copies) {
        emulator::land(copy);
        at.bytes -= copy.bytes;
      }
      at.copies.clear();
      end_phase(at);
    } else if (turns == 3000) {
      emulator::fail("a barrier that waits for ever");
    } else {
      emulator::yield();
    }
  }
}

inline void copy_bulk(unsigned to, const void* from, int bytes, unsigned barrier) {
  const char* first = static_cast<const char*>(from);
  bool inside = false;
  for (auto [begin, end] : emulator::arrays) {
    inside |= begin <= first && first + bytes <= end && (first - begin) % 16 == 0;
  }
  if (!inside || to % 16 || bytes % 16 || to + bytes > emulator::shared.size()) {
    emulator::fail("a bulk copy from or to a wrong place");
  }
  barrier_at(barrier).copies.push_back({to, from, bytes, true});
}

inline void sync_warpgroup(int number) {
  emulator::meet(emulator::warpgroups[number], 128, [] {});
}

inline void __syncwarp() {
  emulator::meet_warp([](emulator::Fiber*) {});
}

inline void store_transposed(unsigned to, const float (&v)[4][2]) {
  if (to % 16 || to + 16 > emulator::shared.size()) {
    emulator::fail("a matrix column to a wrong place in shared memory");
  }
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
          const Half half = from_float<Half>(value);
          std::memcpy(&emulator::shared[at + lane / 4 * 2], &half, 2);
        }
      }
    }
  });
}
