// First step of Winograd's convolution: transforms tiles of the input, V = B^T d B.
//
// A tile is ALPHA_H x ALPHA_W input pixels, from which the last step makes OUT_H x OUT_W outputs;
// neighbouring tiles overlap. Each invocation transforms one tile of one channel; V holds, for
// each of the ALPHA_H * ALPHA_W points, a matrix of channels by tiles, the B of one matrix product.
// With CHANNELS_LAST, the matrix is one of tiles by channels, of which some at the end are zeros.
//
// With a stride, the input is taken apart into stride_h * stride_w images of stride 1 (polyphase),
// which become channels of their own: their outputs add up like channels'.

alias Scalar = f32;
const WORKGROUP: u32 = 64u;
const ALPHA_H: u32 = 4u;
const ALPHA_W: u32 = 4u;
const OUT_H: u32 = 2u;
const OUT_W: u32 = 2u;
const CHANNELS_LAST: bool = false;  // neighbouring invocations take neighbouring channels
// The rows of B^T, here of F(2, 3).
const BT_H = array<f32, 16>(1.0, 0.0, -1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, -1.0, 1.0, 0.0, 0.0, -1.0, 0.0, 1.0);
const BT_W = array<f32, 16>(1.0, 0.0, -1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, -1.0, 1.0, 0.0, 0.0, -1.0, 0.0, 1.0);

struct Params {
  tiles: u32,  // of this part
  first_tile: u32,
  image_tiles: u32,  // of an image
  row_tiles: u32,  // of a row of an image
  pitch: u32,  // elements from one row of V to the next
  channels: u32,  // of the input
  c_group: u32,
  h: u32,
  w: u32,
  stride_h: u32,
  stride_w: u32,
  pad_top: u32,
  pad_left: u32,
  x_n: u32,  // strides of the input, in elements
  x_c: u32,
  x_h: u32,
  x_w: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<Scalar>;
@group(0) @binding(2) var<storage, read_write> transformed: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) lane: u32,
) {
  let index = workgroup.x + workgroup.y * workgroups.x;
  let phases = params.stride_h * params.stride_w;
  let groups = params.channels / params.c_group;
  let rows = params.c_group * phases;  // of a group's matrix, its channels with each phase
  var tile: u32;
  var group: u32;
  var row: u32;
  var v_at: u32;
  var v_point: u32;  // from one point to the next
  if (CHANNELS_LAST) {
    let column = index * WORKGROUP + lane;
    row = column % params.pitch;
    group = column / params.pitch % groups;
    tile = column / params.pitch / groups;
    v_at = (group * params.tiles + tile) * params.pitch + row;
    v_point = groups * params.tiles * params.pitch;
  } else {
    // The phases of a channel, which read the same lines, come one after the other.
    let blocks = (params.tiles + WORKGROUP - 1u) / WORKGROUP;
    let channel = index / blocks / phases;
    tile = index % blocks * WORKGROUP + lane;
    group = channel / params.c_group;
    row = index / blocks % phases * params.c_group + channel % params.c_group;
    v_at = (group * rows + row) * params.pitch + tile;
    v_point = groups * rows * params.pitch;
  }
  if (group >= groups || tile >= params.tiles) {
    return;
  }
  let phase = row / params.c_group;
  let channel = group * params.c_group + row % params.c_group;

  let at = params.first_tile + tile;
  let image = at / params.image_tiles;
  let tile_y = at % params.image_tiles / params.row_tiles;
  let tile_x = at % params.row_tiles;
  // Rows and columns before the image wrap to huge numbers: one comparison checks both sides.
  let top = tile_y * OUT_H * params.stride_h + phase / params.stride_w - params.pad_top;
  let left = tile_x * OUT_W * params.stride_w + phase % params.stride_w - params.pad_left;
  let counts = row < rows;
  let origin = image * params.x_n + channel * params.x_c;

  var v: array<f32, ALPHA_H * ALPHA_W>;
  for (var i = 0u; i < ALPHA_H * ALPHA_W; i++) { // @unroll
    v[i] = 0.0;
  }
  for (var i = 0u; i < ALPHA_H; i++) { // @unroll
    let y = top + i * params.stride_h;
    let row_at = origin + min(y, params.h - 1u) * params.x_h;
    var d: array<f32, ALPHA_W>;
    for (var j = 0u; j < ALPHA_W; j++) { // @unroll
      let column = left + j * params.stride_w;
      let value = f32(x[row_at + min(column, params.w - 1u) * params.x_w]);
      d[j] = select(0.0, value, counts && y < params.h && column < params.w);
    }
    for (var b = 0u; b < ALPHA_W; b++) { // @unroll
      var sum = 0.0;
      for (var j = 0u; j < ALPHA_W; j++) { // @unroll
        if (BT_W[b * ALPHA_W + j] != 0.0) { sum = fma(BT_W[b * ALPHA_W + j], d[j], sum); }
      }
      for (var a = 0u; a < ALPHA_H; a++) { // @unroll
        if (BT_H[a * ALPHA_H + i] != 0.0) { v[a * ALPHA_W + b] = fma(BT_H[a * ALPHA_H + i], sum, v[a * ALPHA_W + b]); }
      }
    }
  }

  for (var i = 0u; i < ALPHA_H * ALPHA_W; i++) { // @unroll
    transformed[v_at + i * v_point] = v[i];
  }
}
