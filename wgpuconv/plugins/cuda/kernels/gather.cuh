// Which taps of an output pixel lie inside of the input.
#pragma once

// Bit i tells whether first + i * step lies in 0 .. size - 1, for i below count (at most 16).
__device__ inline int taps_inside(int first, int step, int count, int size) {
  if (step < 0) {  // the same seen from the other end
    first = size - 1 - first;
    step = -step;
  }
  step = max(step, 1);  // it is 0 where there is but one tap
  const int begin = first < 0 ? (step - 1 - first) / step : 0;
  const int end = first < size ? min((size - first + step - 1) / step, count) : 0;
  return begin < end ? (1 << end) - (1 << begin) : 0;
}
