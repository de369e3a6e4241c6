// Adds the partial sums of a split GEMM, then bias, residual and activation. Each invocation
// finishes one output element; the slices lie one after the other, each of the output's own layout.

alias Scalar = f32;
const WORKGROUP: u32 = 256u;

struct Params {
  elements: u32,
  splits: u32,
  k: u32,  // output channels
  y_k: u32,  // elements from one output channel to the next
  act_a: f32,
  act_b: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> partial: array<f32>;
@group(0) @binding(2) var<storage, read> bias: array<Scalar>;
@group(0) @binding(3) var<storage, read_write> y: array<Scalar>;

fn activate(v: f32) -> f32 { return v; }
fn add_residual(v: f32, at: u32) -> f32 { return v; }

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) lane: u32,
) {
  let index = (workgroup.x + workgroup.y * workgroups.x) * WORKGROUP + lane;
  if (index >= params.elements) {
    return;
  }
  var sum = 0.0;
  for (var split = 0u; split < params.splits; split++) {
    sum += partial[split * params.elements + index];
  }
  sum += f32(bias[index / params.y_k % params.k]);
  y[index] = Scalar(activate(add_residual(sum, index)));
}
