"""Implicit GEMM on Hopper's warpgroup products, with warps that copy and warps that multiply.

That warpgroups are specialised, pass slots of shared memory through barriers and stay for all tiles
follows CUTLASS's persistent kernels for Hopper and FlashAttention-3 (Shah et al. 2024,
arXiv:2407.08608); the gather is that of implicit_gemm_mma. Of pointwise products in NCHW nothing is
gathered: wgmma takes pixels that lie side by side as well.

Plain float32 is multiplied as three products of TF32 (see the kernel), within the bound of sums in
f32. With u = 2^-24, relative to sum |x| |w|: what is left out of the factors is 2 u each, and the
product that is left out 4 u. An instruction adds up eight products, in one sum or in two, each of
which aligns its terms to the largest, keeps two bits more than f32 has, and cuts off first what is
below, then what f32 does not hold: 9/2 u + 2 u in one sum, 2 (5/2 u + 2 u) in two. (So it was
measured on Volta to Ampere by Fasi, Higham, Mikaitis, Pranesh: Numerical Behavior of NVIDIA Tensor
Cores, 2021; of Hopper it is assumed.) Four instructions of a step add products of the large parts,
36 u; the eight before them sum what is 2^-11 of these. Adding a step takes one rounding more, and
of m products there are at most m / 8 steps, since channels are padded to fours, or by half at most
for the copy engine. From LEAST_PRODUCTS on, 44 u + m / 8 u is less than the m u of a sum in order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ....algorithms.base import params
from ....algorithms.phases import Axis, SharedGather, phases, refuse_gather, shared_gathers
from ....facts import Facts, Limits
from ....plan import Config, Pass, Plan, Region, Shader, align, ceil_div, grid_1d
from ....problem import ConvProblem
from ..facts import cuda_facts
from ..tensor_maps import CORNERS, MOST_OFFSET, MOST_STRIDE, ROW_BYTES
from .base import CudaAlgorithm
from .gather import (
    count_tiles,
    most_splits,
    phase_params,
    phase_tiles,
    product_bindings,
    product_params,
)
from .lowering import Lowering, Source, caller_input, partial_bytes, split_counts
from .mma import (
    SHARED_OF_CORE,
    Step,
    out_vector,
    pack,
    refuse_wgmma,
    source,
    tap_copies,
    weight_offsets,
)


class Tile(NamedTuple):
    """A block computes p pixels by m filters, from so many slots of shared memory; a
    multiprocessor has so many blocks."""

    p: int
    m: int
    stages: int
    blocks: int

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply one or two times 64 pixels each."""
        return 3 if self.p % 128 else 2


TILES = (
    Tile(128, 128, 5, 1),
    Tile(128, 256, 4, 1),
    Tile(256, 128, 4, 1),
    Tile(128, 64, 6, 1),
    Tile(256, 64, 4, 1),
    Tile(128, 64, 3, 2),
    # that fill the last round of blocks better
    Tile(192, 128, 4, 1),
    Tile(192, 64, 5, 1),
    Tile(128, 192, 4, 1),
    Tile(128, 160, 5, 1),
    Tile(128, 96, 6, 1),
    # with less on its way, for what memory bounds
    Tile(128, 64, 2, 2),
    Tile(128, 96, 4, 1),
)
WHOLE_TILES = (Tile(128, 128, 4, 1), Tile(128, 64, 6, 1))
"""For plain float32, whose filters take twice the room and whose sums twice the registers."""
LEAST_PRODUCTS = 64
"""Of each sum of plain float32, those with what pads the image included."""
FILLS = (1, 2)
"""Blocks a multiprocessor that a split sum should make."""
MOST_CLUSTER = 8
"""Blocks of a cluster, on every GPU that has them."""
MOST_PADDED = 1.5
"""Channels of a tap with what fills its last step, over those that there are; beyond it threads
gather steps that may go over several taps."""
MOST_WASTE = 2.0
"""Tiles that compute that many times what the best one does are left out."""


class ImplicitGemmWgmma(CudaAlgorithm):
    name = "implicit_gemm_wgmma"
    summary = "Hopper's warpgroup products of gathered columns; f16, bf16, TF32, and f32 as three"
    tf32 = True
    ops = ("conv2d", "conv_transpose2d")
    shaders = ("implicit_gemm_wgmma", "pack_filters", "to_channels_last", "reduce_splits")

    def refuse(self, problem: ConvProblem, facts: Facts) -> str | None:
        return refuse_wgmma(facts) or refuse_gather(problem) or _refuse_few_products(problem)

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        p = problem
        tiles = [
            t
            for t in (WHOLE_TILES if _whole(p) else TILES)
            if t.m < 2 * max(p.k_group, 64)
            and _shared_bytes(t, p, facts.limits, bulk_out=False, split=False)
            <= facts.limits.max_workgroup_storage
        ]
        computed = {t: count_tiles(p, t) * t.p * t.m for t in tiles}
        configs: list[Config] = []
        for tile in tiles:
            if computed[tile] > MOST_WASTE * min(computed.values()):
                continue
            cores = facts.cores * tile.blocks
            wanted = (fill * cores // count_tiles(p, tile) for fill in FILLS)
            _, *several = split_counts(wanted, most_splits(_most_steps(p, facts.limits)))
            clusters = sorted({min(splits, MOST_CLUSTER) for splits in several[:1]})
            configs += [
                _config(tile, splits, cluster)
                for splits, cluster in [
                    (1, 1),
                    *((c, c) for c in clusters),
                    *((s, 1) for s in several),
                ]
            ]
        return configs

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p = problem
        x = _source(p, facts.limits)
        lowering = Lowering(p, facts, workspace_limit, x, slices=_slices(config))
        step = Step(_tile_of(config).m, ROW_BYTES // p.itemsize)
        im2col = _im2col(p, facts.limits)
        channels = _channels(p, facts.limits)
        block = step.k if im2col else _channel_block(p, channels)
        for gather in shared_gathers(p):
            phase = gather.phase
            steps = ceil_div(phase.taps * channels, step.k)
            if _packed(p, facts.limits):
                offsets = weight_offsets(p, phase, channels, block)
                filters = pack(
                    lowering,
                    step,
                    steps,
                    offsets,
                    rows=gather.rows,
                    columns=gather.columns,
                    cores=True,
                    whole=_whole(p),
                )
            else:
                filters = Region("weight")
            if _in_planes(p) or im2col:
                taps = filters  # not read
            else:
                # The kernel reads the taps of one step ahead, so one more step than there is.
                copies = (steps + 1) * step.k // x.vector
                taps = lowering.tables.add(tap_copies(phase, x, copies, block))
            lowering.passes.append(self._pass(lowering, config, gather, steps, filters, taps))
        return lowering.plan(self.name, config)

    @staticmethod
    def _pass(
        lowering: Lowering,
        config: Config,
        gather: SharedGather,
        steps: int,
        filters: Region,
        taps: Region,
    ) -> Pass:
        p, facts = lowering.problem, lowering.facts
        tile, splits, cluster = _tile_of(config), int(config["splits"]), int(config["cluster"])
        tiles = gather.phases * phase_tiles(p, gather.phase, tile) * splits
        im2col = _im2col(p, facts.limits)
        bulk_out = splits == 1 and _bulk_out(p, tile, gather, facts.limits)
        stays = steps if splits == 1 and _resident(p, tile, gather, facts) else 0
        blocks = min(tiles, facts.cores * tile.blocks)
        if stays:  # each has the same filters always
            blocks = blocks // _kinds(p, tile, gather) * _kinds(p, tile, gather)
        shader = Shader.of(
            "implicit_gemm_wgmma",
            p.dtype,
            TILE_P=tile.p,
            TILE_M=tile.m,
            STAGES=tile.stages,
            BLOCKS=tile.blocks,
            PLANES=_in_planes(p),
            IM2COL=im2col,
            PACKED=_packed(p, facts.limits),
            RESIDENT=stays > 0,
            K_STEPS=max(stays, 1),
            WHOLE=_whole(p),
            CACHED=not im2col and _cached(p, tiles, facts),
            CHANNELS_LAST=p.layout == "NHWC",
            OUT_VECTOR=out_vector(p),
            STORED_M=_stored_columns(tile, p),
            BULK_OUT=bulk_out,
            SPLIT=lowering.split,
            CLUSTER=cluster,
            THREADS=(tile.consumers + 1) * 128,
            SHARED_BYTES=_shared_bytes(
                tile, p, facts.limits, bulk_out=bulk_out, split=splits > 1, resident=stays
            ),
            Out="f32" if lowering.split else p.dtype,
        )
        return Pass(
            lowering.ending(shader),
            params(
                **product_params(lowering, gather.phase, tile, steps=steps, splits=splits),
                **phase_params(p, gather),
                x_c=lowering.source.strides.x_c,
                channels=lowering.source.channels,
                tiles=tiles,
            ),
            product_bindings(lowering, filters, taps),
            grid_1d(tiles if cluster > 1 else blocks, facts.limits),
        )

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        p, tile, splits = problem, _tile_of(config), int(config["splits"])
        cluster, slices = int(config["cluster"]), _slices(config)
        x = _source(p, facts.limits)
        steps = ceil_div(_most_steps(p, facts.limits), splits)
        tiles = count_tiles(p, tile) * splits
        # Blocks of a cluster run on neighbours, in groups of uneven size: those of more than two
        # find room on 8/9 of an H200. (This and the figures below were fitted there.)
        places = facts.cores * tile.blocks
        if cluster > 2:
            places = places * 8 // 9 // cluster * cluster
        rounds = ceil_div(tiles, max(places, 1))  # tiles of one block
        # wgmma is faster than the mma.sync that was probed; TF32 runs at half the rate.
        rate = 1.4 * cuda_facts(facts).matrix_flops / 2 / facts.cores * 2 / p.itemsize
        compute = tile.p * tile.m * ROW_BYTES / p.itemsize / rate
        if p.itemsize == 2:
            # Each product of 64 pixels reads its rows and all filters' from shared memory.
            rows = tile.p + tile.p // 64 * tile.m + (tile.p + tile.m)
            compute = max(compute, ROW_BYTES * rows / 240e9)
        if _whole(p):
            compute *= 2.33 * (1 + 64 / tile.m)  # narrow products feed the tensor cores less well
        im2col = _im2col(p, facts.limits)
        loads = _stage_bytes(tile, p) / (96e9 if im2col else 65e9)
        lines = im2col or _in_planes(p) or x.channels * p.itemsize >= ROW_BYTES
        if not lines:  # copies of 16 bytes here and there
            loads = max(loads, ROW_BYTES * tile.p / 40e9)
        multiplied = steps * max(compute, loads) + 2 * facts.latency
        stored = facts.latency + p.itemsize * tile.p * min(tile.m, p.k_group) / 70e9
        # Of two blocks, one stores while the other multiplies.
        neighbours = min(ceil_div(tiles, facts.cores), tile.blocks)
        seconds = rounds * max(multiplied + stored, neighbours * multiplied)
        if cluster > 1:  # each reads the others' sums
            seconds += 4 * tile.p * tile.m / 25e9
        traffic = p.input_bytes + p.residual_bytes + p.out_bytes + p.weight_bytes + 2 * x.nbytes
        # What is written and read again stays in the second-level cache in part.
        memory = traffic / facts.bandwidth + partial_bytes(p, slices) / (0.35 * facts.bandwidth)
        seconds = max(seconds, memory) + 0.3 * min(seconds, memory)
        products = len(shared_gathers(p))
        launches = products + len(x.passes) + (slices > 1)
        if _packed(p, facts.limits):
            launches += products
            seconds += (3 if _whole(p) else 2) * p.weight_bytes / (0.7 * facts.bandwidth)
        return seconds + launches * facts.launch


def _config(tile: Tile, splits: int, cluster: int) -> Config:
    return {
        "tile_p": tile.p,
        "tile_m": tile.m,
        "stages": tile.stages,
        "blocks": tile.blocks,
        "splits": splits,
        "cluster": cluster,
    }


def _slices(config: Config) -> int:
    """Of partial sums in workspace: the blocks of a cluster need none."""
    return int(config["splits"]) // int(config["cluster"])


def _tile_of(config: Config) -> Tile:
    return Tile(*(int(config[name]) for name in ("tile_p", "tile_m", "stages", "blocks")))


def _in_planes(p: ConvProblem) -> bool:
    """Whether an NCHW input is read as it lies.

    The product is pointwise then, and copies along the pixels are aligned and cross no image.
    """
    # A dilation of one tap means nothing, but allows an output padding.
    pointwise = (p.r, p.s, p.stride, p.padding) == (1, 1, (1, 1), (0, 0, 0, 0)) and (
        (p.out_h, p.out_w) == (p.h, p.w)
    )
    return pointwise and p.layout == "NCHW" and p.h * p.w % (16 // p.itemsize) == 0


@lru_cache(maxsize=64)
def _im2col(p: ConvProblem, limits: Limits) -> bool:
    """Whether the copy engine gathers the pixels: whole steps of channels under one tap."""
    channels, k = _source(p, limits).channels, ROW_BYTES // p.itemsize
    padded = align(channels, k)
    # What a step has beyond its channels is multiplied as well. (Of groups it would be the next
    # one's channels, by zeros, but an infinity of these would become NaN.)
    if _in_planes(p) or padded > MOST_PADDED * channels or (p.groups > 1 and padded > channels):
        return False
    return all(
        _axis_fits(axis, size)
        for phase in phases(p)
        for axis, size in ((phase.h, p.h), (phase.w, p.w))
    )


def _axis_fits(axis: Axis, size: int) -> bool:
    """Whether a tensor map can hold where the taps lie."""
    offsets = [tap.offset for tap in axis.taps] or [0]
    lower = min(offsets)
    return (
        lower in CORNERS
        and lower + (axis.count - 1) * axis.in_stride - (size - 1) in CORNERS
        and max(offsets) - lower <= MOST_OFFSET
        and axis.in_stride <= MOST_STRIDE
    )


def _channels(p: ConvProblem, limits: Limits) -> int:
    """Of each tap, with what fills its last copy or step."""
    channels = _source(p, limits).channels
    return align(channels, ROW_BYTES // p.itemsize) if _im2col(p, limits) else channels


def _whole(p: ConvProblem) -> bool:
    """Whether floats are multiplied whole."""
    return p.arithmetic == "f32"


def _refuse_few_products(p: ConvProblem) -> str | None:
    fewest = min(phase.taps for phase in phases(p)) * p.c_group
    if not _whole(p) or fewest >= LEAST_PRODUCTS:
        return None
    return (
        f"adds up at least {LEAST_PRODUCTS} products of f32 (else its error may exceed that of a "
        f"sum in order), got {fewest}"
    )


def _packed(p: ConvProblem, limits: Limits) -> bool:
    """Whether the weight is packed first.

    It need not be if the channels of each tap lie side by side, in whole copies, and it has but one
    tap or the copy engine brings it. Floats must be rounded on the way, as that does.
    """
    im2col = _im2col(p, limits)
    as_it_lies = (p.r, p.s) == (1, 1) or (p.weight_last and im2col)
    rounded = p.itemsize == 2 or (im2col and not _whole(p))
    return not as_it_lies or not rounded or p.transposed or p.c_group % (16 // p.itemsize) != 0


def _source(p: ConvProblem, limits: Limits) -> Source:
    return caller_input(p) if _in_planes(p) else source(p, limits, vector=16 // p.itemsize)


def _cached(p: ConvProblem, tiles: int, facts: Facts) -> bool:
    """Whether copies go through the first-level cache.

    It helps where taps share pixels: those of one tile, or neighbours in a line of memory. Where
    lines are whole, and a block goes from tile to tile, it only costs.
    """
    taps = max(phase.taps for phase in phases(p))
    return taps > 1 and (tiles <= facts.cores or p.c_group * p.itemsize < ROW_BYTES)


def _channel_block(p: ConvProblem, channels: int) -> int | None:
    """Channels that all taps go over before the next ones come.

    A block of few channels, of all pixels of a tile, stays in the first-level cache for all taps.
    """
    k = ROW_BYTES // p.itemsize
    return k if channels % k == 0 and channels > k else None


def _most_steps(p: ConvProblem, limits: Limits) -> int:
    channels, k = _channels(p, limits), ROW_BYTES // p.itemsize
    return max(ceil_div(phase.taps * channels, k) for phase in phases(p))


def _filter_bytes(tile: Tile, p: ConvProblem) -> int:
    """Of all filters of a tile, in one step."""
    return ROW_BYTES * tile.m * (2 if _whole(p) else 1)


def _stage_bytes(tile: Tile, p: ConvProblem) -> int:
    return ROW_BYTES * tile.p + _filter_bytes(tile, p)


def _stored_columns(tile: Tile, p: ConvProblem) -> int:
    """Filters of a slice of a consumer's sums on their way out: a line of memory, or less."""
    line = ROW_BYTES // p.itemsize
    return line if tile.m % line == 0 else 32


def _stored_bytes(tile: Tile, p: ConvProblem, *, bulk_out: bool) -> int:
    """Of a consumer's slices of 64 pixels: two that the copy engine brings to memory, or one, whose
    rows begin on different banks."""
    columns = _stored_columns(tile, p)
    if bulk_out:
        elements = 2 * 64 * columns
    elif p.layout == "NHWC":
        elements = 64 * (columns + 8)
    else:
        elements = columns * (64 + 16 // p.itemsize)
    return p.itemsize * elements


def _shared_bytes(
    tile: Tile, p: ConvProblem, limits: Limits, *, bulk_out: bool, split: bool, resident: int = 0
) -> int:
    """With the filters of so many steps beside the slots, or in them."""
    barriers = 8 * (2 * tile.stages + 1 + 2 * tile.consumers)
    places = (0 if bulk_out else 4 * tile.p) + (0 if _im2col(p, limits) else 16 * tile.p)
    stored = 0 if split else tile.consumers * _stored_bytes(tile, p, bulk_out=bulk_out)
    filters = (resident or tile.stages) * _filter_bytes(tile, p)
    return tile.stages * ROW_BYTES * tile.p + filters + stored + places + barriers


def _bulk_out(p: ConvProblem, tile: Tile, gather: SharedGather, limits: Limits) -> bool:
    """Whether the copy engine brings a sum that is not split to memory: pixels that follow each
    other there, and whole copies of filters."""
    follow = (gather.phase.h.step, gather.phase.w.step) == (1, 1)
    whole = p.k_group * p.itemsize % 16 == 0
    nbytes = _shared_bytes(tile, p, limits, bulk_out=True, split=False)
    return p.layout == "NHWC" and follow and whole and nbytes <= limits.max_workgroup_storage


def _kinds(p: ConvProblem, tile: Tile, gather: SharedGather) -> int:
    """Tiles of the same pixels."""
    return ceil_div(p.k_group, tile.m) * gather.phases


def _resident(p: ConvProblem, tile: Tile, gather: SharedGather, facts: Facts) -> bool:
    """Whether the filters of all steps of a sum have room beside the slots, and serve several tiles
    of a block; those that they leave without a block must not take a round of their own."""
    kinds, blocks = _kinds(p, tile, gather), facts.cores * tile.blocks
    tiles = gather.phases * phase_tiles(p, gather.phase, tile)
    steps = ceil_div(gather.phase.taps * _channels(p, facts.limits), ROW_BYTES // p.itemsize)
    bulk_out = _bulk_out(p, tile, gather, facts.limits)
    nbytes = _shared_bytes(tile, p, facts.limits, bulk_out=bulk_out, split=False, resident=steps)
    return (
        steps > 0
        and p.groups == 1
        and (_im2col(p, facts.limits) or _packed(p, facts.limits))
        and tiles > blocks >= kinds
        and ceil_div(tiles, blocks // kinds * kinds) == ceil_div(tiles, blocks)
        and nbytes
        <= (facts.limits.max_workgroup_storage + SHARED_OF_CORE) // tile.blocks - SHARED_OF_CORE
    )
