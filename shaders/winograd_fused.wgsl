// Winograd's convolution F(2 x 2, 3 x 3) in one dispatch: Y = A^T [sum over channels of U * V] A with
// V = B^T d B, for a few channels, where passes of their own would write and read much more than they
// compute. The weights U were transformed before (winograd_weight.wgsl, in tiles of FILTERS filters).
//
// A workgroup computes TILES tiles, of 2 x 2 outputs, of FILTERS filters. In steps of CHANNELS channels
// it transforms the tiles' 4 x 4 pixels into workgroup memory, and multiplies: each invocation sums a
// row of 4 of the 16 points, for 4 tiles and 4 filters, so that it can transform half of the way back
// by itself. The other half crosses rows, and hence invocations, through workgroup memory.
//
// Tiles are counted along rows, over all images. Pixels are read and written COLUMNS at a time: offsets
// and strides of x and y, along w too, count such vectors. B^T, A and U are those of bilinear.py.

alias Scalar = f32;
alias Vector = vec2f;  // COLUMNS pixels as they are stored
alias Sums = vec2f;
const COLUMNS: u32 = 2u;
const SHIFT: u32 = 0u;  // 1 where a tile begins within a pair
const TILES: u32 = 32u;  // a multiple of 32
const FILTERS: u32 = 16u;  // a multiple of 8
const CHANNELS: u32 = 4u;  // at most FILTERS / 4: an invocation transforms a tile of one channel
const STAGED: u32 = 768u;  // quads of workgroup memory
const MASKED: bool = true;  // false where all pixels lie inside, and all steps have all channels
const UNROLL: bool = true;  // write out loops, so that sums live in registers

const QUADS = FILTERS / 4u;
const LANES_T = TILES / 4u;
const WORKGROUP = 4u * LANES_T * QUADS;
const SEGMENT = (SHIFT + 4u + COLUMNS - 1u) / COLUMNS;  // vectors of a tile's row
const TILE_VECTORS = 2u / COLUMNS;  // from one tile to the next
const PAIRS = COLUMNS - 1u;  // vectors of a tile's row of outputs, if these are pairs,
const SINGLES = 2u - 2u * PAIRS;  // and if they are not
const WEIGHTS_AT = CHANNELS * 4u * TILES;
const WEIGHTS = 16u * CHANNELS * QUADS;
const WEIGHT_LOADS = (WEIGHTS + WORKGROUP - 1u) / WORKGROUP;

struct Params {
  tiles: u32,  // over all images
  image_tiles: u32,
  row_tiles: u32,
  tile_blocks: u32,
  filter_blocks: u32,  // of a group
  groups: u32,
  steps: u32,
  weight_point: u32,  // quads of U from one point to the next
  c_group: u32,
  k_group: u32,
  h: u32,
  w_vectors: u32,
  out_h: u32,
  out_vectors: u32,  // of a row
  pad_top: u32,
  pad_vectors: u32,  // at the left, rounded up
  x_n: u32,  // strides of the input
  x_c: u32,
  x_h: u32,
  y_n: u32,  // strides of the output
  y_k: u32,
  y_h: u32,
  act_a: f32,
  act_b: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<Vector>;
@group(0) @binding(2) var<storage, read> packed: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> bias: array<Scalar>;
@group(0) @binding(4) var<storage, read_write> y: array<Vector>;

// In each step V by channel, row of points and tile, a quad being the points of the row; behind it U
// by point, channel and four filters. After the last step, half-transformed sums by row of points,
// four filters and tile, a quad being two columns of outputs of two of the filters.
var<workgroup> staged: array<vec4<f32>, STAGED>;

fn activate(v: f32) -> f32 { return v; }
fn add_residual(v: Sums, at: u32) -> Sums { return v; }

// Invocations that write side by side hold two quads of filters: this keeps them apart in the banks.
fn sums_at(row: u32, quad: u32, tile: u32) -> u32 {
  return (row * QUADS + quad) * TILES + (tile ^ (quad % 2u * 4u));
}

@compute @workgroup_size(WORKGROUP)
fn main(
  @builtin(workgroup_id) workgroup: vec3<u32>,
  @builtin(num_workgroups) workgroups: vec3<u32>,
  @builtin(local_invocation_index) lane: u32,
) {
  let index = workgroup.x + workgroup.y * workgroups.x;
  let block = index % params.filter_blocks;
  let group = index / params.filter_blocks / params.tile_blocks;
  if (group >= params.groups) {
    return;
  }

  // The tile that this invocation transforms, first of one channel, at last of four filters. Tiles
  // past the end transform the last one again, and write nothing.
  let own = lane % TILES;
  let own_plane = lane / TILES;
  let tile = index / params.filter_blocks % params.tile_blocks * TILES + own;
  let used = min(tile, params.tiles - 1u);
  let image = used / params.image_tiles;
  let tile_y = used % params.image_tiles / params.row_tiles;
  let tile_x = used % params.row_tiles;
  let top = tile_y * 2u - params.pad_top;  // before the image these wrap to huge numbers
  let left = tile_x * TILE_VECTORS - params.pad_vectors;
  let reads = own_plane < CHANNELS;
  var x_at = image * params.x_n + (group * params.c_group + own_plane) * params.x_c
    + top * params.x_h + left;
  var channel = own_plane;

  // What it multiplies. Neighbours differ in filters, those next to them in tiles, so that a read of
  // workgroup memory meets few different addresses at a time.
  let points = lane / (LANES_T * QUADS);  // a row of 4
  let within = lane % (LANES_T * QUADS);
  let lane_f = within % 2u + within / 16u % (QUADS / 2u) * 2u;
  let lane_t = within / 2u % 8u + within / (8u * QUADS) * 8u;
  var acc: array<f32, 64>;  // by tile, point and filter
  for (var i = 0u; i < 64u; i++) { // @unroll if UNROLL
    acc[i] = 0.0;
  }

  // Each step's pixels and weights are loaded to registers while the step before is computed, and
  // stay as they are until then: masks would make the arithmetic in between wait for them.
  var next: array<Vector, 4u * SEGMENT>;
  var next_weights: array<vec4<f32>, WEIGHT_LOADS>;
  let step_weights = CHANNELS * QUADS;
  var weights_at = (group * params.filter_blocks + block) * params.steps * step_weights;
  for (var step = 0u; step <= params.steps; step++) {
    if (step > 0u) {
      if (reads) {
        var rows: array<vec4<f32>, 4>;
        for (var i = 0u; i < 4u; i++) { // @unroll if UNROLL
          var d: array<f32, 4>;
          for (var j = 0u; j < 4u; j++) { // @unroll if UNROLL
            d[j] = vec2f(Sums(next[i * SEGMENT + (SHIFT + j) / COLUMNS]))[(SHIFT + j) % COLUMNS];
            if (MASKED) {
              let counts = channel - CHANNELS < params.c_group && top + i < params.h
                && left + (SHIFT + j) / COLUMNS < params.w_vectors;
              d[j] = select(0.0, d[j], counts);
            }
          }
          rows[i] = vec4<f32>(d[2] - d[0], d[1] + d[2], d[2] - d[1], d[3] - d[1]);
        }
        let v_at = own_plane * 4u * TILES + own;
        staged[v_at] = rows[2] - rows[0];
        staged[v_at + TILES] = rows[1] + rows[2];
        staged[v_at + 2u * TILES] = rows[2] - rows[1];
        staged[v_at + 3u * TILES] = rows[3] - rows[1];
      }
      for (var i = 0u; i < WEIGHT_LOADS; i++) { // @unroll if UNROLL
        if (i * WORKGROUP + lane < WEIGHTS) {
          staged[WEIGHTS_AT + i * WORKGROUP + lane] = next_weights[i];
        }
      }
      workgroupBarrier();  // the step is complete before any invocation reads it
    }
    if (step < params.steps) {
      if (reads) {
        for (var i = 0u; i < 4u; i++) { // @unroll if UNROLL
          for (var j = 0u; j < SEGMENT; j++) { // @unroll if UNROLL
            // Outside of the image this may read anything, which masks drop.
            next[i * SEGMENT + j] = x[x_at + i * params.x_h + j];
          }
        }
      }
      for (var i = 0u; i < WEIGHT_LOADS; i++) { // @unroll if UNROLL
        let at = i * WORKGROUP + lane;
        next_weights[i] =
          packed[weights_at + at / step_weights * params.weight_point + at % step_weights];
      }
      x_at += CHANNELS * params.x_c;
      channel += CHANNELS;
      weights_at += step_weights;
    }
    if (step > 0u) {
      for (var c = 0u; c < CHANNELS; c++) { // @unroll if UNROLL
        var v: array<vec4<f32>, 4>;
        for (var t = 0u; t < 4u; t++) { // @unroll if UNROLL
          v[t] = staged[(c * 4u + points) * TILES + t * LANES_T + lane_t];
        }
        for (var j = 0u; j < 4u; j++) { // @unroll if UNROLL
          let u = staged[WEIGHTS_AT + ((points * 4u + j) * CHANNELS + c) * QUADS + lane_f];
          for (var t = 0u; t < 4u; t++) { // @unroll if UNROLL
            for (var f = 0u; f < 4u; f++) { // @unroll if UNROLL
              acc[(t * 4u + j) * 4u + f] = fma(v[t][j], u[f], acc[(t * 4u + j) * 4u + f]);
            }
          }
        }
      }
      workgroupBarrier();  // all have read the step before the next one, or sums, overwrite it
    }
  }

  let k0 = block * FILTERS + own_plane * 4u;  // within the group
  let y_tile = image * params.y_n + tile_y * 2u * params.y_h + tile_x * TILE_VECTORS;
  var bias_k: array<f32, 4>;
  for (var f = 0u; f < 4u; f++) { // @unroll if UNROLL
    bias_k[f] = f32(bias[group * params.k_group + min(k0 + f, params.k_group - 1u)]);
  }
  for (var half = 0u; half < 2u; half++) { // @unroll if UNROLL
    for (var t = 0u; t < 4u; t++) { // @unroll if UNROLL
      var two: array<vec2<f32>, 2>;
      for (var f = 0u; f < 2u; f++) { // @unroll if UNROLL
        let m0 = acc[t * 16u + half * 2u + f];
        let m1 = acc[t * 16u + 4u + half * 2u + f];
        let m2 = acc[t * 16u + 8u + half * 2u + f];
        let m3 = acc[t * 16u + 12u + half * 2u + f];
        two[f] = vec2<f32>(m0 + m1 + m2, m1 - m2 + m3);
      }
      staged[sums_at(points, lane_f, t * LANES_T + lane_t)] = vec4<f32>(two[0], two[1]);
    }
    workgroupBarrier();  // the sums of all rows of points are there before they meet
    let s1 = staged[sums_at(1u, own_plane, own)];
    let s2 = staged[sums_at(2u, own_plane, own)];
    var outputs: array<vec4<f32>, 2>;  // by row
    outputs[0] = staged[sums_at(0u, own_plane, own)] + s1 + s2;
    outputs[1] = s1 - s2 + staged[sums_at(3u, own_plane, own)];
    if (half == 0u) {
      workgroupBarrier();  // all have read them before those of the other filters take their place
    }

    // Loaded at once, as biases are: one after the other, each in its branch, would take longer.
    var four: array<vec2<f32>, 4>;  // by filter and row
    for (var i = 0u; i < 4u; i++) { // @unroll if UNROLL
      let k = group * params.k_group + min(k0 + half * 2u + i / 2u, params.k_group - 1u);
      let at = y_tile + k * params.y_k + i % 2u * params.y_h;
      let o = vec2<f32>(outputs[i % 2u][i / 2u * 2u], outputs[i % 2u][i / 2u * 2u + 1u])
        + bias_k[half * 2u + i / 2u];
      for (var pair = 0u; pair < PAIRS; pair++) { // @unroll
        four[i] = vec2f(add_residual(Sums(o), at));
      }
      for (var b = 0u; b < SINGLES; b++) { // @unroll
        four[i][b] = vec2f(add_residual(Sums(o[b]), at + b)).x;
      }
    }
    for (var i = 0u; i < 4u; i++) { // @unroll if UNROLL
      let k = k0 + half * 2u + i / 2u;
      if (tile < params.tiles && k < params.k_group && tile_y * 2u + i % 2u < params.out_h) {
        let at = y_tile + (group * params.k_group + k) * params.y_k + i % 2u * params.y_h;
        let o = vec2<f32>(activate(four[i].x), activate(four[i].y));
        for (var pair = 0u; pair < PAIRS; pair++) { // @unroll
          y[at] = Vector(Sums(o));
        }
        for (var b = 0u; b < SINGLES; b++) { // @unroll
          if (tile_x * 2u + b < params.out_vectors) {
            y[at + b] = Vector(Sums(o[b]));
          }
        }
      }
    }
  }
}
