// Adds the partial sums of a split product, then bias, residual and activation. Each thread
// finishes one output element; the slices lie one after the other, each of the output's own layout.
// The order of the additions is fixed, so that two runs agree to the bit.

#include "ptx.cuh"
#include "activations.cuh"

using Scalar = Half;
constexpr int THREADS = 256;
constexpr Activation ACTIVATION = Activation::identity;
constexpr bool RESIDUAL = false;  // else `residual` is not read

struct Params {
  int elements;
  int splits;
  int k;    // output channels
  int y_k;  // elements from one output channel to the next
  float act_a;
  float act_b;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_splits(Params params, const float* __restrict__ partial,
                  const Scalar* __restrict__ bias, const Scalar* __restrict__ residual,
                  Scalar* __restrict__ y) {
  wait_for_previous();
  const unsigned index = blockIdx.x * THREADS + threadIdx.x;
  if (index >= static_cast<unsigned>(params.elements)) {
    return;
  }
  float sum = 0.0f;
#pragma unroll 4
  for (int split = 0; split < params.splits; split++) {
    sum += partial[static_cast<long long>(split) * params.elements + index];
  }
  sum += to_float(bias[index / params.y_k % params.k]);
  if (RESIDUAL) {
    sum += to_float(residual[index]);
  }
  y[index] = from_float<Scalar>(activate<ACTIVATION>(sum, params.act_a, params.act_b));
}
