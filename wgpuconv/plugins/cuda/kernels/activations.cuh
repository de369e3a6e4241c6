// Activations, applied to a sum in the last step of a kernel. A NaN stays one.
#pragma once

enum class Activation { identity, relu, leaky_relu, clip, sigmoid, tanh, gelu, silu };

template <Activation ACTIVATION>
__device__ inline float activate(float v, float a, float b) {
  if constexpr (ACTIVATION == Activation::relu) {
    return v < 0.0f ? 0.0f : v;
  } else if constexpr (ACTIVATION == Activation::leaky_relu) {
    return v < 0.0f ? v * a : v;
  } else if constexpr (ACTIVATION == Activation::clip) {
    return v < a ? a : v > b ? b : v;
  } else if constexpr (ACTIVATION == Activation::sigmoid) {
    return 1.0f / (1.0f + expf(-v));
  } else if constexpr (ACTIVATION == Activation::tanh) {
    return tanhf(v);
  } else if constexpr (ACTIVATION == Activation::gelu) {
    return 0.5f * v * erfcf(-0.70710678f * v);
  } else if constexpr (ACTIVATION == Activation::silu) {
    return v / (1.0f + expf(-v));
  } else {
    return v;
  }
}
