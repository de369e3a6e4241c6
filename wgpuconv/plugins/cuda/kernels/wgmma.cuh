// Hopper (compute capability 9.0): a warpgroup of four warps multiplies matrices that lie in shared
// memory, while it goes on; and barriers in shared memory, at which copies arrive by themselves. On
// other GPUs these functions do nothing, and no algorithm uses them there.
#pragma once

#include "ptx.cuh"

// ---- barriers in shared memory ----
//
// A barrier counts arrivals. When all have come, its phase is complete, and the next one begins.
// Phases have the parities 0, 1, 0, ...

__device__ inline void set_up_barrier(unsigned barrier, int arrivals) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}

// After the barriers have been set up, by the thread that did it; before the others are told.
__device__ inline void publish_barriers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ inline void arrive(unsigned barrier) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

// Arrives once for the whole warp, when all of its lanes have done with what the barrier guards. 0
// is no barrier.
__device__ inline void arrive_warp(unsigned barrier, int lane) {
  __syncwarp();
  if (barrier != 0 && lane == 0) {
    arrive(barrier);
  }
}

// Arrives, and lets the phase wait for that many bytes as well, of copies that one thread starts.
__device__ inline void arrive_expecting(unsigned barrier, int bytes) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

// Arrives once all copies that this thread has begun with copy_async are there.
__device__ inline void arrive_with_copies(unsigned barrier) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}

// Waits until the barrier's phase of that parity is complete. (Of a new barrier, the phase before
// its first one counts as complete.)
__device__ inline void wait_barrier(unsigned barrier, unsigned parity) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra AGAIN;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// ---- copies that arrive at barriers; one thread starts each ----

// Contiguous bytes. Both sides and the size are multiples of 16.
__device__ inline void copy_bulk(unsigned to, const void* from, int bytes, unsigned barrier) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
#endif
}

// How an array lies in global memory, and which part of it one copy brings; as the driver writes
// it (a CUtensorMap). Copies by it permute the chunks of rows of 128, 64 or 32 bytes by their address
// in shared memory, those of 128 bytes as swizzled<8> does, and bring zeros for what lies outside of
// the array.
struct alignas(64) TensorMap {
  unsigned char description[128];
};

// Channels, from `c` on, of one tap of several filters, from `row` on; or of what else has three such
// axes.
__device__ inline void copy_rows(unsigned to, const TensorMap& map, int c, int tap, int row,
                                 unsigned barrier) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(&map), "r"(c), "r"(tap), "r"(row), "r"(barrier)
      : "memory");
#endif
}

// Channels, from `c` on, of the pixels under one tap: of the first one, whose first tap is at (n, h,
// w), and of those that follow it, in as many rows and images as it takes. The tap is that many
// pixels beyond the first one.
__device__ inline void copy_columns(unsigned to, const TensorMap& map, int c, int w, int h, int n,
                                    int tap_w, int tap_h, unsigned barrier) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8};" ::"r"(to),
      "l"(&map), "r"(c), "r"(w), "r"(h), "r"(n), "r"(barrier), "h"(static_cast<short>(tap_w)),
      "h"(static_cast<short>(tap_h))
      : "memory");
#endif
}

// Channels of a group, from `c` on, of a box of pixels, from (n, h, w) on; all of one image, and as
// far apart as the map says.
__device__ inline void copy_box(unsigned to, const TensorMap& map, int c, int group, int w, int h,
                                int n, unsigned barrier) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
      "l"(&map), "r"(c), "r"(group), "r"(w), "r"(h), "r"(n), "r"(barrier)
      : "memory");
#endif
}

// ---- copies to global memory; one thread starts each, and waits for its own ----

// Writes a box to an array of filters, groups and pixels, from that place on; what lies outside of
// the array is left out. Rows of the box lie in shared memory as copies by maps bring them. Threads
// that wrote there have called publish_copies.
__device__ inline void store_box(const TensorMap& map, unsigned from, int m, int group, int pixel) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(
          &map),
      "r"(m), "r"(group), "r"(pixel), "r"(from)
      : "memory");
#endif
}

// Ends a group of such copies.
__device__ inline void commit_stores() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// Waits until all but the last PENDING groups have read shared memory.
template <int PENDING>
__device__ inline void wait_stores() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
#endif
}

// ---- clusters: blocks that run at the same time and read each other's shared memory ----

// In a kernel's declaration: how many neighbouring blocks are a cluster.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define CLUSTER_OF(BLOCKS) __cluster_dims__(BLOCKS, 1, 1)
#else
#define CLUSTER_OF(BLOCKS)
#endif

// Waits until all threads of the cluster have come.
__device__ inline void sync_cluster() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// The same for those that have read each other's shared memory, before any of it goes away. It does
// not wait for what they have written.
__device__ inline void leave_cluster() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
#endif
}

// COUNT floats (1, 2 or 4), aligned to all of them, of the shared memory of a block of the cluster.
template <int COUNT>
__device__ inline void load_remote(float* to, unsigned from, int block) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(from), "r"(block));
  if constexpr (COUNT == 4) {
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                 : "r"(remote));
  } else if constexpr (COUNT == 2) {
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                 : "=f"(to[0]), "=f"(to[1])
                 : "r"(remote));
  } else {
    static_assert(COUNT == 1);
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(to[0]) : "r"(remote));
  }
#endif
}

// ---- registers ----

// All warps of a warpgroup call one of these: from then on each thread may hold COUNT registers.
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

// ---- products ----

// Makes what has been written to shared memory visible to the tensor cores and the copy engine, which
// read it past the cache: called by the thread that wrote, before the barrier that tells the others,
// or by the one that has waited there, before its products. (Not needed for copies that one thread
// starts.)
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

// Added to `next_rows` of core_matrices: that rows of so many chunks of 16 bytes lie one after the
// other, as a tensor map's copy leaves them; from eight of them it is `next_rows` to the next eight.
// The tensor cores permute chunks by their address, as the copy did, so the first row may be any.
// (The manual speaks of rows at multiples of 1024 bytes; that others are right, too, is measured.)
__device__ constexpr unsigned permutation(int chunks) {
  return chunks == 8 ? 1u << 30 : chunks == 4 ? 2u << 30 : chunks == 2 ? 3u << 30 : 0;
}

// A word of shared memory.
__device__ inline unsigned load_word(unsigned from) {
  unsigned word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from));
  return word;
}

// acc[64 x 8 COLUMNS] += a[64 x K] * b[8 COLUMNS x K], transposed; K of T take 32 bytes. Both lie
// in shared memory, floats rounded as operands. Warp w of the group holds the rows from 16 w on;
// acc[j] has columns 8 j + lane % 4 * 2 and one more, of row lane / 4 (elements 0 and 1) and of 8
// more (2 and 3). With TRANSPOSED_A, for elements of 2 bytes only, it is the columns of `a` that lie
// in one piece each.
template <typename T, bool TRANSPOSED_A = false, int COLUMNS>
__device__ void multiply_add_async(float (&acc)[COLUMNS][4], unsigned long long a,
                                   unsigned long long b);

// The same with `a` in registers, as load_matrices puts it there for the rows of each warp. They
// belong to the product until it is done.
template <typename T, int COLUMNS>
__device__ void multiply_add_async(float (&acc)[COLUMNS][4], const unsigned (&a)[4],
                                   unsigned long long b);

// The registers of the sums as the instruction's text counts them, and as its operands.
#define REGISTERS_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_48 \
  REGISTERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS_64 \
  REGISTERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_80 \
  REGISTERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, " \
  "%72, %73, %74, %75, %76, %77, %78, %79"
#define REGISTERS_96 \
  REGISTERS_80 ", %80, %81, %82, %83, %84, %85, %86, %87, " \
  "%88, %89, %90, %91, %92, %93, %94, %95"
#define REGISTERS_112 \
  REGISTERS_96 ", %96, %97, %98, %99, %100, %101, %102, %103, " \
  "%104, %105, %106, %107, %108, %109, %110, %111"
#define REGISTERS_128 \
  REGISTERS_112 ", %112, %113, %114, %115, %116, %117, %118, %119, " \
  "%120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS_4(j) "+f"(acc[j][0]), "+f"(acc[j][1]), "+f"(acc[j][2]), "+f"(acc[j][3])
#define SUMS_16(j) SUMS_4(j), SUMS_4(j + 1), SUMS_4(j + 2), SUMS_4(j + 3)
#define SUMS_32 SUMS_16(0), SUMS_16(4)
#define SUMS_48 SUMS_32, SUMS_16(8)
#define SUMS_64 SUMS_48, SUMS_16(12)
#define SUMS_80 SUMS_64, SUMS_16(16)
#define SUMS_96 SUMS_80, SUMS_16(20)
#define SUMS_112 SUMS_96, SUMS_16(24)
#define SUMS_128 SUMS_112, SUMS_16(28)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define PRODUCT(SHAPE, SUMS, OPERANDS, ...)                                                    \
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned." SHAPE    \
               " {" REGISTERS_##SUMS "}, " OPERANDS ";\n}"                                      \
               : SUMS_##SUMS                                                                   \
               : __VA_ARGS__)
#else
#define PRODUCT(...)
#endif
#define PRODUCT_OF_SHARED(T, TRANSPOSED_A, SHAPE, ORDER, COLUMNS, SUMS, A, B)                   \
  template <>                                                                                  \
  __device__ inline void multiply_add_async<T, TRANSPOSED_A>(                                  \
      float (&acc)[COLUMNS][4], unsigned long long a, unsigned long long b) {                  \
    PRODUCT(SHAPE, SUMS, "%" #A ", %" #B ", p, 1, 1" ORDER, "l"(a), "l"(b));                    \
  }
#define PRODUCTS_OF_HALVES(T, SHAPE, ...)                                                      \
  PRODUCT_OF_SHARED(T, false, SHAPE, ", 0, 0", __VA_ARGS__)                                    \
  PRODUCT_OF_SHARED(T, true, SHAPE, ", 1, 0", __VA_ARGS__)
// For one width: columns of b, and of sums, a thread's sums, and the numbers of the operands
// behind them.
#define PRODUCTS(N, COLUMNS, SUMS, A, B, C, D, E)                                              \
  PRODUCTS_OF_HALVES(Half, "m64n" #N "k16.f32.f16.f16", COLUMNS, SUMS, A, B)                    \
  PRODUCTS_OF_HALVES(Bfloat, "m64n" #N "k16.f32.bf16.bf16", COLUMNS, SUMS, A, B)                \
  PRODUCT_OF_SHARED(float, false, "m64n" #N "k8.f32.tf32.tf32", "", COLUMNS, SUMS, A, B)        \
  template <>                                                                                  \
  __device__ inline void multiply_add_async<float>(                                            \
      float (&acc)[COLUMNS][4], const unsigned (&a)[4], unsigned long long b) {                \
    PRODUCT("m64n" #N "k8.f32.tf32.tf32", SUMS,                                                \
            "{%" #A ", %" #B ", %" #C ", %" #D "}, %" #E ", p, 1, 1", "r"(a[0]), "r"(a[1]),      \
            "r"(a[2]), "r"(a[3]), "l"(b));                                                     \
  }
PRODUCTS(64, 8, 32, 32, 33, 34, 35, 36)
PRODUCTS(96, 12, 48, 48, 49, 50, 51, 52)
PRODUCTS(128, 16, 64, 64, 65, 66, 67, 68)
PRODUCTS(160, 20, 80, 80, 81, 82, 83, 84)
PRODUCTS(192, 24, 96, 96, 97, 98, 99, 100)
PRODUCTS(224, 28, 112, 112, 113, 114, 115, 116)
PRODUCTS(256, 32, 128, 128, 129, 130, 131, 132)
#undef PRODUCTS
#undef PRODUCTS_OF_HALVES
#undef PRODUCT_OF_SHARED
#undef PRODUCT
#undef SUMS_128
#undef SUMS_112
#undef SUMS_96
#undef SUMS_80
#undef SUMS_64
#undef SUMS_48
#undef SUMS_32
#undef SUMS_16
#undef SUMS_4
#undef REGISTERS_128
#undef REGISTERS_112
#undef REGISTERS_96
#undef REGISTERS_80
#undef REGISTERS_64
#undef REGISTERS_48
#undef REGISTERS_32

// Rounds four 8 x 8 matrices to T, of 2 bytes, and stores them transposed. A lane holds two
// neighbouring elements of row lane / 4 of each, and gives the address of column lane % 8 of matrix
// lane / 8.
template <typename T>
__device__ inline void store_transposed(unsigned to, const float (&v)[4][2]) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  unsigned packed[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    packed[i] = pair_of<T>(v[i][0], v[i][1]);
  }
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
               : "memory");
#endif
}
