// Copies one array to another, four elements an invocation: how fast memory is read and written.
// (A probe of the device; no convolution uses it.)

alias Scalar = f32;
const WORKGROUP: u32 = 256u;

struct Params {
  count: u32,  // vectors of four elements
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> src: array<vec4<Scalar>>;
@group(0) @binding(2) var<storage, read_write> dst: array<vec4<Scalar>>;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) lane: u32,
) {
  let index = (workgroup.x + workgroup.y * workgroups.x) * WORKGROUP + lane;
  if (index < params.count) {
    dst[index] = src[index];
  }
}
