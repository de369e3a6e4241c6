// Copies a range of `count` elements out of each of `planes` planes: it cuts a slab of rows out
// of a tensor that is too large for one binding, and puts a computed slab back.

alias Scalar = f32;
const WORKGROUP: u32 = 256u;

struct Params {
  planes: u32,
  count: u32,
  src_base: u32,
  src_plane: u32,  // elements from one plane to the next
  dst_base: u32,
  dst_plane: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> src: array<Scalar>;
@group(0) @binding(2) var<storage, read_write> dst: array<Scalar>;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) lane: u32,
) {
  let index = (workgroup.x + workgroup.y * workgroups.x) * WORKGROUP + lane;
  let plane = index / params.count;
  if (plane >= params.planes) {
    return;
  }
  let i = index % params.count;
  dst[params.dst_base + plane * params.dst_plane + i] =
    src[params.src_base + plane * params.src_plane + i];
}
