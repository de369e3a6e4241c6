// Activations. The specialiser copies the body of one of these into `activate` of the shader
// that ends with it. `params.act_a` and `params.act_b` are the activation's own parameters.

struct Params {
  act_a: f32,
  act_b: f32,
}

@group(0) @binding(0) var<uniform> params: Params;

// A NaN must stay one, but WGSL lets drivers assume that there are none: `v < 0 ? 0 : v` may become
// max(v, 0), which drops it, and v == v may become true. So it is told by its bits.

fn act_relu(v: f32) -> f32 {
  let is_nan = (bitcast<u32>(v) & 0x7fffffffu) > 0x7f800000u;
  return select(max(v, 0.0), v, is_nan);
}

fn act_leaky_relu(v: f32) -> f32 {
  return select(v, v * params.act_a, v < 0.0);
}

fn act_clip(v: f32) -> f32 {
  let is_nan = (bitcast<u32>(v) & 0x7fffffffu) > 0x7f800000u;
  return select(min(max(v, params.act_a), params.act_b), v, is_nan);
}

fn act_sigmoid(v: f32) -> f32 {
  let is_nan = (bitcast<u32>(v) & 0x7fffffffu) > 0x7f800000u;
  return select(1.0 / (1.0 + exp(-v)), v, is_nan);
}

fn act_tanh(v: f32) -> f32 {
  // The built-in tanh overflows to NaN on some drivers; past 10 the result is 1 in f32.
  let is_nan = (bitcast<u32>(v) & 0x7fffffffu) > 0x7f800000u;
  return select(tanh(clamp(v, -10.0, 10.0)), v, is_nan);
}

fn act_silu(v: f32) -> f32 {
  return v / (1.0 + exp(-v));
}

// v * Phi(v), with erfc by Abramowitz and Stegun 7.1.26 (absolute error below 1.5e-7).
fn act_gelu(v: f32) -> f32 {
  let z = abs(v) * 0.70710678;
  let t = 1.0 / (1.0 + 0.3275911 * z);
  let poly = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t
    + 0.254829592) * t;
  let half_erfc = 0.5 * poly * exp(-z * z);  // Phi(-|v|)
  return v * select(half_erfc, 1.0 - half_erfc, v >= 0.0);
}

@compute @workgroup_size(1)
fn main() {
}
