// Packs the weight into the order in which the GEMM kernels read it: one tile of TILE_M filters
// after the other, and in it for each k the TILE_M filters side by side. Filters and products
// past the end become zeros, so that those kernels need no edge on this side.
//
// Which weight goes where is the host's choice, through `taps`: in the order of the weight's
// memory, the third component is k and the last one the weight's offset. Since neighbouring
// entries mostly lie side by side in the weight, and neighbouring filters in the packed one, a
// workgroup turns a block of 16 x 16 around.

alias Scalar = f32;
const TILE_M: u32 = 64u;

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

var<workgroup> block: array<Scalar, 272>;  // 16 rows of 17: columns fall on different banks

@compute @workgroup_size(256)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) lane: u32,
) {
  let index = workgroup.x + workgroup.y * workgroups.x;
  let k_blocks = (params.k_padded + 15u) / 16u;
  let entry0 = index % k_blocks * 16u;
  let m_blocks = params.m_tiles * (TILE_M / 16u);
  let m0 = index / k_blocks % m_blocks * 16u;
  let group = index / k_blocks / m_blocks;
  if (group >= params.groups) {
    return;
  }
  let fast = lane % 16u;
  let slow = lane / 16u;

  let m_in = m0 + slow;
  var v = Scalar(0.0);
  if (entry0 + fast < params.reduction && m_in < params.m) {
    v = weight[group * params.w_g + m_in * params.w_m + u32(taps[entry0 + fast].w)];
  }
  block[slow * 17u + fast] = v;
  workgroupBarrier();  // the block is complete before it is read the other way

  let m = m0 + fast;
  let entry = entry0 + slow;
  if (entry < params.k_padded) {
    let tile = group * params.m_tiles + m / TILE_M;
    let k = u32(taps[entry].z);
    packed[(tile * params.k_padded + k) * TILE_M + m % TILE_M] = block[fast * 17u + slow];
  }
}
