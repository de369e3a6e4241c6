// Packs the weight into the order in which the GEMM kernels read it: one tile of TILE_M filters
// after the other, and in it for each k the TILE_M filters side by side. Filters and products
// past the end become zeros, so that those kernels need no edge on this side.
//
// Which weight stands at k is the host's choice, through `taps`: (input offset, dh, dw, weight
// offset) for each k.

alias Scalar = f32;
const TILE_M: u32 = 64u;
const WORKGROUP: u32 = 64u;

struct Params {
  m: u32,  // filters of a group
  m_tiles: u32,
  reduction: u32,  // products of an output element
  k_padded: u32,  // the same, rounded up to whole steps
  groups: u32,
  w_g: u32,  // strides of the weight over groups and filters
  w_m: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> weight: array<Scalar>;
@group(0) @binding(2) var<storage, read> taps: array<vec4<i32>>;
@group(0) @binding(3) var<storage, read_write> packed: array<Scalar>;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) lane: u32,
) {
  let index = (workgroup.x + workgroup.y * workgroups.x) * WORKGROUP + lane;
  let k = index / TILE_M % params.k_padded;
  let tile = index / TILE_M / params.k_padded;
  let group = tile / params.m_tiles;
  if (group >= params.groups) {
    return;
  }
  let m = tile % params.m_tiles * TILE_M + index % TILE_M;
  var v = Scalar(0.0);
  if (k < params.reduction && m < params.m) {
    v = weight[group * params.w_g + m * params.w_m + u32(taps[k].w)];
  }
  packed[index] = v;
}
