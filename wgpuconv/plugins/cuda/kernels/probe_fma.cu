// Long chains of multiply-adds in registers: how fast a device computes at best. The chains are
// independent of each other, so that none waits for its own last step, and all are stored in the
// end, so that no compiler leaves one out. (A probe of the benchmark; no convolution uses it.)

#include "ptx.cuh"

constexpr int THREADS = 256;
constexpr int CHAINS = 32;
constexpr int STEPS = 8;  // of each chain in one turn of the loop

struct Params {
  int turns;
  float factor;  // not known to the compiler, so that it can't compute the chains itself
  float term;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    probe_fma(Params params, float* __restrict__ sums) {
  wait_for_previous();
  const unsigned index = blockIdx.x * THREADS + threadIdx.x;
  float chain[CHAINS];
#pragma unroll
  for (int i = 0; i < CHAINS; i++) {
    chain[i] = index % 64 + i;
  }
  for (int turn = 0; turn < params.turns; turn++) {
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
      for (int i = 0; i < CHAINS; i++) {
        chain[i] = fmaf(chain[i], params.factor, params.term);
      }
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < CHAINS; i++) {
    sum += chain[i];
  }
  sums[index] = sum;
}
