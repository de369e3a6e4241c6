// Activations, applied to a sum in the last step of a kernel. A NaN stays one. Where memory bounds a
// kernel they take longer than all else, if they are not made of few instructions: exponentials and
// divisions are those of the hardware, within the accuracies that WGSL gives them. (A division by more
// than 2^126 gives 0: silu from -87.3 on, where it is below 1e-36.)
#pragma once

enum class Activation { identity, relu, leaky_relu, clip, sigmoid, tanh, gelu, silu };

// erfc of what is not negative, within 1.2e-7 of itself (Press et al., Numerical Recipes in C, 1992,
// section 6.2).
__device__ inline float erfc_of_positive(float z) {
  const float t = __fdividef(1.0f, 1.0f + 0.5f * z);
  float p = 0.17087277f;
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  return t * __expf(p - z * z);
}

template <Activation ACTIVATION>
__device__ inline float activate(float v, float a, float b) {
  if constexpr (ACTIVATION == Activation::relu) {
    return v < 0.0f ? 0.0f : v;
  } else if constexpr (ACTIVATION == Activation::leaky_relu) {
    return v < 0.0f ? v * a : v;
  } else if constexpr (ACTIVATION == Activation::clip) {
    return v < a ? a : v > b ? b : v;
  } else if constexpr (ACTIVATION == Activation::sigmoid) {
    return __fdividef(1.0f, 1.0f + __expf(-v));
  } else if constexpr (ACTIVATION == Activation::tanh) {
    return tanhf(v);
  } else if constexpr (ACTIVATION == Activation::gelu) {
    const float beyond = 0.5f * erfc_of_positive(0.70710678f * fabsf(v));
    return v * (v < 0.0f ? beyond : 1.0f - beyond);
  } else if constexpr (ACTIVATION == Activation::silu) {
    return __fdividef(v, 1.0f + __expf(-v));
  } else {
    return v;
  }
}
