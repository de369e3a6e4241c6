// Hopper (compute capability 9.0): a warpgroup of four warps multiplies matrices that lie in shared
// memory, while it goes on; and barriers in shared memory, where copies arrive by themselves. On
// other GPUs these functions do nothing, and no algorithm uses them there.
#pragma once

#include "ptx.cuh"

// Makes what this thread has copied to shared memory visible to the tensor cores, which read it
// past the cache; before the barrier that tells the others.
__device__ inline void publish_copies() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Before the first product that adds to registers which other instructions have written.
__device__ inline void begin_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// Ends a group of products.
__device__ inline void commit_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until all but the last PENDING groups are done.
template <int PENDING>
__device__ inline void wait_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#endif
}

// A matrix of rows of k, as groups of 8 rows of 16 bytes that lie side by side (128 bytes): where
// the first such group lies (lower half), and how far it is to the next along k (upper half) and
// along the rows, all in units of 16 bytes.
__device__ inline unsigned long long core_matrices(unsigned at_and_next_k, unsigned next_rows) {
  return at_and_next_k | static_cast<unsigned long long>(next_rows) << 32;
}

// acc[64 x 8 COLUMNS] += a[64 x K] * b[8 COLUMNS x K], transposed; K elements take 32 bytes. Both
// lie in shared memory, floats rounded as operands. Warp w of the group holds the rows from 16 w
// on; acc[j] has columns 8 j + lane % 4 * 2 and one more, of row lane / 4 (elements 0 and 1) and of
// 8 more (2 and 3).
template <typename T, int COLUMNS>
__device__ void multiply_add_async(float (&acc)[COLUMNS][4], unsigned long long a,
                                   unsigned long long b);

// The registers of 4 columns of acc, as the instruction names them and as its operands.
#define NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_6 \
  "%96, %97, %98, %99, %100, %101, %102, %103, " \
  "%104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_7 \
  "%112, %113, %114, %115, %116, %117, %118, %119, " \
  "%120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS(j) "+f"(acc[j][0]), "+f"(acc[j][1]), "+f"(acc[j][2]), "+f"(acc[j][3])
#define SUMS_4(j) SUMS(j), SUMS(j + 1), SUMS(j + 2), SUMS(j + 3)
#define SUMS_8(j) SUMS_4(j), SUMS_4(j + 4)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define MULTIPLY_ADD_ASYNC_OF(T, COLUMNS, SHAPE, ORDER, NAMES, A, B, ...)                    \
  template <>                                                                                \
  __device__ inline void multiply_add_async<T, COLUMNS>(                                     \
      float (&acc)[COLUMNS][4], unsigned long long a, unsigned long long b) {                \
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned." SHAPE \
                 " {" NAMES "}, %" #A ", %" #B ", p, 1, 1" ORDER ";\n}"                       \
                 : __VA_ARGS__                                                               \
                 : "l"(a), "l"(b));                                                          \
  }
#else
#define MULTIPLY_ADD_ASYNC_OF(T, COLUMNS, ...)                                \
  template <>                                                                 \
  __device__ inline void multiply_add_async<T, COLUMNS>(                      \
      float (&)[COLUMNS][4], unsigned long long, unsigned long long) {}
#endif
#define MULTIPLY_ADD_ASYNC(COLUMNS, N, NAMES, A, B, ...)                                          \
  MULTIPLY_ADD_ASYNC_OF(Half, COLUMNS, "m64n" #N "k16.f32.f16.f16", ", 0, 0", NAMES, A, B,        \
                        __VA_ARGS__)                                                              \
  MULTIPLY_ADD_ASYNC_OF(float, COLUMNS, "m64n" #N "k8.f32.tf32.tf32", "", NAMES, A, B, __VA_ARGS__)

MULTIPLY_ADD_ASYNC(8, 64, NAMES_0 ", " NAMES_1, 32, 33, SUMS_8(0))
MULTIPLY_ADD_ASYNC(12, 96, NAMES_0 ", " NAMES_1 ", " NAMES_2, 48, 49, SUMS_8(0), SUMS_4(8))
MULTIPLY_ADD_ASYNC(16, 128, NAMES_0 ", " NAMES_1 ", " NAMES_2 ", " NAMES_3,
                   64, 65, SUMS_8(0), SUMS_8(8))
MULTIPLY_ADD_ASYNC(20, 160, NAMES_0 ", " NAMES_1 ", " NAMES_2 ", " NAMES_3 ", " NAMES_4,
                   80, 81, SUMS_8(0), SUMS_8(8), SUMS_4(16))
MULTIPLY_ADD_ASYNC(24, 192, NAMES_0 ", " NAMES_1 ", " NAMES_2 ", " NAMES_3 ", " NAMES_4
                   ", " NAMES_5,
                   96, 97, SUMS_8(0), SUMS_8(8), SUMS_8(16))
MULTIPLY_ADD_ASYNC(28, 224, NAMES_0 ", " NAMES_1 ", " NAMES_2 ", " NAMES_3 ", " NAMES_4
                   ", " NAMES_5 ", " NAMES_6,
                   112, 113, SUMS_8(0), SUMS_8(8), SUMS_8(16), SUMS_4(24))
MULTIPLY_ADD_ASYNC(32, 256, NAMES_0 ", " NAMES_1 ", " NAMES_2 ", " NAMES_3 ", " NAMES_4
                   ", " NAMES_5 ", " NAMES_6 ", " NAMES_7,
                   128, 129, SUMS_8(0), SUMS_8(8), SUMS_8(16), SUMS_8(24))

// ---- barriers in shared memory ----
//
// A barrier counts arrivals. When all have come, its phase is complete, and the next one begins;
// phases have the parities 0, 1, 0, ...

__device__ inline void barrier_init(unsigned barrier, int arrivals) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}

// By a thread that has set up barriers, before it tells the others.
__device__ inline void publish_barriers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ inline void barrier_arrive(unsigned barrier) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

// Arrives, and lets the phase wait for that many bytes of copy_bulk too.
__device__ inline void barrier_expect_bytes(unsigned barrier, int bytes) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

// Waits until the phase of that parity is complete: the present one, or the one before it. (Before
// the first one, there is one of parity 1.)
__device__ inline void barrier_wait(unsigned barrier, unsigned parity) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  unsigned done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
#endif
}

// Starts a copy to shared memory whose bytes the barrier expects; all a multiple of 16. The tensor
// cores see what it brings.
__device__ inline void copy_bulk(unsigned to, const void* from, int bytes, unsigned barrier) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
#endif
}

// All warps of a warpgroup call one of these: from then on a thread has that many registers.
template <int COUNT>
__device__ inline void give_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

template <int COUNT>
__device__ inline void take_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

// A barrier for the 128 threads of a warpgroup, each of its own number (1 to 15).
__device__ inline void sync_warpgroup(int number) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("bar.sync %0, 128;" ::"r"(number) : "memory");
#endif
}

// Rounds four 8 x 8 matrices to halves and stores them transposed. A lane holds two neighbouring
// elements of row lane / 4 of each, and gives the address of column lane % 8 of matrix lane / 8.
__device__ inline void store_transposed(unsigned to, const float (&v)[4][2]) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  unsigned packed[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed[i]) : "f"(v[i][1]), "f"(v[i][0]));
  }
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
               : "memory");
#endif
}
