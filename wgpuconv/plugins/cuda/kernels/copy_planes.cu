// Copies a range of `count` elements out of each of `planes` planes: it cuts a slab of rows out
// of a tensor that is too large for 32-bit offsets, and puts a computed slab back.

#include "ptx.cuh"

using Scalar = float;
constexpr int THREADS = 256;

struct Params {
  int planes;
  int count;
  int src_base;
  int src_plane;  // elements from one plane to the next
  int dst_base;
  int dst_plane;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_planes(Params params, const Scalar* __restrict__ src, Scalar* __restrict__ dst) {
  wait_for_previous();
  const unsigned index = blockIdx.x * THREADS + threadIdx.x;
  const int plane = index / params.count;
  if (plane >= params.planes) {
    return;
  }
  const int i = index % params.count;
  dst[params.dst_base + static_cast<long long>(plane) * params.dst_plane + i] =
      src[params.src_base + static_cast<long long>(plane) * params.src_plane + i];
}
