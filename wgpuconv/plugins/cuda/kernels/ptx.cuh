// The instructions that C++ has no words for, each as one function. Nothing else holds assembly.
//
// cuda_fp16.h is not needed: NVRTC finds it on some machines only.
#pragma once

struct Half {
  unsigned short bits;
};

// The upper half of a float's bits.
struct Bfloat {
  unsigned short bits;
};

__device__ inline float to_float(float v) { return v; }

__device__ inline float to_float(Half v) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v.bits));
  return f;
}

__device__ inline float to_float(Bfloat v) {
  return __uint_as_float(static_cast<unsigned>(v.bits) << 16);
}

template <typename T>
__device__ T from_float(float v);

template <>
__device__ inline float from_float<float>(float v) {
  return v;
}

template <>
__device__ inline Half from_float<Half>(float v) {
  Half h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(v));
  return h;
}

// To nearest, ties to even.
template <>
__device__ inline Bfloat from_float<Bfloat>(float v) {
  Bfloat b;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(b.bits) : "f"(v));
#else
  const unsigned bits = __float_as_uint(v);
  const unsigned nearest = bits + 0x7fff + (bits >> 16 & 1);
  b.bits = (v == v ? nearest : bits | 0x400000) >> 16;  // a NaN stays one
#endif
  return b;
}

// Two elements of 2 bytes, the first one in the lower half.
template <typename T>
__device__ unsigned pair_of(float first, float second);

template <>
__device__ inline unsigned pair_of<Half>(float first, float second) {
#if __CUDA_ARCH__ >= 800
  unsigned packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  return packed;
#else
  return from_float<Half>(first).bits | from_float<Half>(second).bits << 16;
#endif
}

template <>
__device__ inline unsigned pair_of<Bfloat>(float first, float second) {
#if __CUDA_ARCH__ >= 800
  unsigned packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  return packed;
#else
  return from_float<Bfloat>(first).bits | from_float<Bfloat>(second).bits << 16;
#endif
}

// Stores two neighbouring elements, which are aligned to both.
template <typename T>
__device__ inline void store_pair(T* to, float first, float second) {
  *reinterpret_cast<unsigned*>(to) = pair_of<T>(first, second);
}

template <>
__device__ inline void store_pair(float* to, float first, float second) {
  *reinterpret_cast<float2*>(to) = make_float2(first, second);
}

// The value of another lane of the warp, all of which call this.
__device__ inline float from_lane(float v, int lane) { return __shfl_sync(~0u, v, lane); }

// ---- one kernel after the other ----

// From Hopper on, a kernel may be started while the one before it in the stream still runs
// (programmatic dependent launch), which hides what a launch takes. So each kernel calls this before
// it touches global memory, and waits until all that came before has ended. (A kernel that did not
// wait might end before its predecessor does, and whoever waits for it alone would read what is not
// yet written.)
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start as soon as all blocks of this one run and leave room: for those that
// only prepare what another one reads. (Behind a product it would find room on few
// multiprocessors, and crowd there.)
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- global memory ----

// The place of an element that does not exist: negative, and aligned as any copy's is.
[[maybe_unused]] constexpr int NOWHERE = -16;

// What lies there, 2, 4, 8 or 16 bytes that nobody writes meanwhile, or zeros if it is not valid.
// There is no branch, so that several of these wait together. (Volatile, so that none comes before
// wait_for_previous.)
template <typename T>
__device__ inline T load_or_zero(const T* from, bool valid) {
  T v;
  if constexpr (sizeof(T) == 2) {
    unsigned short bits;
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b16 %0, 0; @p ld.global.nc.b16 %0, [%1];}"
        : "=&h"(bits)
        : "l"(from), "r"(static_cast<int>(valid)));
    *reinterpret_cast<unsigned short*>(&v) = bits;
  } else if constexpr (sizeof(T) == 4) {
    unsigned bits;
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.nc.b32 %0, [%1];}"
        : "=&r"(bits)
        : "l"(from), "r"(static_cast<int>(valid)));
    *reinterpret_cast<unsigned*>(&v) = bits;
  } else if constexpr (sizeof(T) == 16) {
    uint4 bits;
    asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; "
        "mov.b32 %3, 0; @p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];}"
        : "=&r"(bits.x), "=&r"(bits.y), "=&r"(bits.z), "=&r"(bits.w)
        : "l"(from), "r"(static_cast<int>(valid)));
    *reinterpret_cast<uint4*>(&v) = bits;
  } else {
    static_assert(sizeof(T) == 8);
    unsigned long long bits;
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b64 %0, 0; @p ld.global.nc.b64 %0, [%1];}"
        : "=&l"(bits)
        : "l"(from), "r"(static_cast<int>(valid)));
    *reinterpret_cast<unsigned long long*>(&v) = bits;
  }
  return v;
}

// Stores 2, 4, 8 or 16 bytes; STREAMED tells the caches that they need not keep them.
template <bool STREAMED, typename T>
__device__ inline void store_run(T* to, T v) {
  if constexpr (!STREAMED) {
    *to = v;
  } else if constexpr (sizeof(T) == 2) {
    __stcs(reinterpret_cast<unsigned short*>(to), *reinterpret_cast<unsigned short*>(&v));
  } else if constexpr (sizeof(T) == 4) {
    __stcs(reinterpret_cast<unsigned*>(to), *reinterpret_cast<unsigned*>(&v));
  } else if constexpr (sizeof(T) == 8) {
    __stcs(reinterpret_cast<uint2*>(to), *reinterpret_cast<uint2*>(&v));
  } else {
    static_assert(sizeof(T) == 16);
    __stcs(reinterpret_cast<uint4*>(to), *reinterpret_cast<uint4*>(&v));
  }
}

// ---- shared memory ----

// The dynamic shared memory of the block.
__device__ inline unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}

// What the instructions below take as an address.
__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Waits until COUNT threads, whole warps, have come to the barrier of that number (1 to 15).
template <int COUNT>
__device__ inline void sync_some(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(COUNT) : "memory");
}

// Starts a copy of BYTES (4, 8 or 16) to shared memory, of zeros where it is not valid. Both sides
// are aligned to BYTES. Those of 16 bytes go past the first-level cache unless CACHED.
template <int BYTES, bool CACHED = BYTES != 16>
__device__ inline void copy_async(unsigned to, const void* from, bool valid) {
#if __CUDA_ARCH__ >= 800
  const int size = valid ? BYTES : 0;
  if constexpr (!CACHED) {
    static_assert(BYTES == 16);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES),
                 "r"(size));
  }
#else  // Turing copies through registers, and has done so when it goes on
  if constexpr (BYTES == 16) {
    const uint4 v = valid ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
  } else if constexpr (BYTES == 4) {
    const unsigned v = valid ? *static_cast<const unsigned*>(from) : 0;
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
  } else {
    const uint2 v = valid ? *static_cast<const uint2*>(from) : make_uint2(0, 0);
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(v.x), "r"(v.y) : "memory");
  }
#endif
}

// Ends a group of copies.
__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}

// Waits until all but the last PENDING groups of this thread have arrived.
template <int PENDING>
__device__ inline void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// ---- tensor cores ----
//
// Those of compute capability 7.5 and later. Before, these functions do nothing, and no algorithm uses
// them.

// What tensor cores multiply: halves and bfloats as they are, floats rounded to TF32, to nearest.
// (They would cut off what TF32 does not hold, which errs twice as much.)
__device__ inline Half as_operand(Half v) { return v; }
__device__ inline Bfloat as_operand(Bfloat v) { return v; }

__device__ inline float as_operand(float v) {
#if __CUDA_ARCH__ >= 800
  unsigned rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(v));
  return __uint_as_float(rounded);
#else
  return v;  // Turing's multiply no floats
#endif
}

// Four 8x8 matrices of halves; lane i gives the address of row i % 8 of matrix i / 8, and gets
// two neighbouring elements of row i / 4 of each.
__device__ inline void load_matrices(unsigned (&to)[4], unsigned from) {
#if __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from));
#endif
}

// acc[16 x 8] += a[16 x K] * b[K x 8], elements of T in, floats out; K of them take 32 bytes, so
// that load_matrices finds floats where they belong, as if each were a pair of halves.
template <typename T>
__device__ void multiply_add(float (&acc)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

template <>
__device__ inline void multiply_add<Half>(float (&acc)[4], const unsigned (&a)[4],
                                          unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif __CUDA_ARCH__ >= 750
  // Turing multiplies 16 x 8 by 8 x 8.
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

#if __CUDA_ARCH__ >= 800
template <>
__device__ inline void multiply_add<Bfloat>(float (&acc)[4], const unsigned (&a)[4], unsigned b0,
                                            unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Floats have been rounded by the caller.
template <>
__device__ inline void multiply_add<float>(float (&acc)[4], const unsigned (&a)[4], unsigned b0,
                                           unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif
