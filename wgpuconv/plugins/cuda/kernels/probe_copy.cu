// Copies one array to another, 16 bytes a thread: how fast memory is read and written. (A probe of
// the benchmark; no convolution uses it.)

#include "ptx.cuh"

constexpr int THREADS = 256;

struct Params {
  int count;  // of 16 bytes
};

extern "C" __global__ void __launch_bounds__(THREADS)
    probe_copy(Params params, const uint4* __restrict__ src, uint4* __restrict__ dst) {
  wait_for_previous();
  const unsigned index = blockIdx.x * THREADS + threadIdx.x;
  if (index < static_cast<unsigned>(params.count)) {
    dst[index] = src[index];
  }
}
