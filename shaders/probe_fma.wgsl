// Long chains of multiply-adds in registers: how fast a device computes at best. The chains are
// independent of each other, so that none waits for its own last step, and all are stored in the
// end, so that no compiler leaves one out. (A probe of the device; no convolution uses it.)

alias Scalar = f32;
const WORKGROUP: u32 = 256u;
const CHAINS: u32 = 32u;
const STEPS: u32 = 8u;  // of each chain in one turn of the loop

struct Params {
  turns: u32,
  factor: f32,  // not known to the compiler, so that it can't compute the chains itself
  term: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> sums: array<Scalar>;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(local_invocation_index) lane: u32,
) {
  let index = workgroup.x * WORKGROUP + lane;
  let factor = Scalar(params.factor);
  let term = Scalar(params.term);
  var chain: array<Scalar, CHAINS>;
  for (var i = 0u; i < CHAINS; i++) { // @unroll
    chain[i] = Scalar(index % 64u) + Scalar(i);
  }
  for (var turn = 0u; turn < params.turns; turn++) {
    for (var step = 0u; step < STEPS; step++) { // @unroll
      for (var i = 0u; i < CHAINS; i++) { // @unroll
        chain[i] = fma(chain[i], factor, term);
      }
    }
  }
  var sum = Scalar(0.0);
  for (var i = 0u; i < CHAINS; i++) { // @unroll
    sum += chain[i];
  }
  sums[index] = sum;
}
