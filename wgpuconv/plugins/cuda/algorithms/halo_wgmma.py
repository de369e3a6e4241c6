"""Convolution on Hopper's warpgroup products, with the input's tile staged once for all taps.

Persistent blocks whose warps have roles follow CUTLASS's kernels for Hopper ("warp-specialized",
"pingpong").
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ....algorithms.base import activation_params, params
from ....algorithms.phases import Axis, Phase, phases, refuse_phases
from ....errors import AlgorithmRefusedError
from ....facts import Facts
from ....plan import Config, Pass, Plan, Region, Shader, align, ceil_div, grid_1d
from ....problem import ConvProblem
from ..facts import cuda_facts
from ..tensor_maps import MOST_BOX, MOST_STRIDE, ROW_BYTES
from .base import CudaAlgorithm, output_bindings
from .gather import output_params
from .halo_mma import first_offset, halo_params, refuse_one_tap, span
from .lowering import Lowering, Source, caller_input
from .mma import (
    Step,
    out_vector,
    overheads,
    pack,
    refuse_float32,
    refuse_wgmma,
    source,
    weight_offsets,
)

POSITIONS = (64, 96, 128, 160, 192, 224, 256)
"""That one product of a warpgroup takes."""
SHAPES = ((1, 64, 1), (2, 64, 1), (1, 128, 1), (1, 64, 2), (1, 128, 2))
"""Warpgroups of a team side by side, filters of a tile, and teams of a block."""
MOST_CUTS = 16
"""Widths that are considered of a tile whose rows follow each other."""
CHUNKS = (128, 64, 32)
"""Bytes of channels that are staged at once: those that the copy engine permutes."""
BOX_ALIGNMENT = 128
"""Of what a tensor map's copy brings to shared memory."""
MOST_PRODUCTS = 12
"""Of one step, after each of which products are waited for."""
MOST_STAGES = 4
"""Steps whose weight is on its way, where the whole weight does not fit; teams that share a tile
need one more than a turn has."""
MOST_WASTE = 1.2
"""Tiles that compute that many times what the best one does are left out."""
LEAST_USED = 0.8
"""Of the multiprocessors, where each keeps the weight of some filters."""
CHUNK_SECONDS = 0.45e-6
"""That it takes to pass a halo's channels from those who copy to those who multiply, on an H200."""
COPIERS = 128
"""Threads of a block that only copy."""
VECTOR_BYTES = 16


class Tile(NamedTuple):
    """A tile is p positions by m filters, from k channels at once; a warpgroup computes group_p of
    them by 64. They are rows of eight, or rows that follow each other."""

    p: int
    group_p: int
    rows_of_eight: bool
    m: int
    k: int
    teams: int

    @property
    def sharers(self) -> int:
        """Teams that compute filters of the same tile; else each has tiles of its own."""
        return self.teams if self.m > 64 else 1

    @property
    def team_m(self) -> int:
        return self.m // self.sharers

    @property
    def at_once(self) -> int:
        """Tiles of a block."""
        return self.teams // self.sharers

    @property
    def warpgroups(self) -> int:
        return self.teams * (self.p // self.group_p) * (self.team_m // 64)

    @property
    def threads(self) -> int:
        return self.warpgroups * 128 + COPIERS


class Area(NamedTuple):
    """What a tile covers of the output, and its halo of the input."""

    rows: int
    columns: int
    sorted_h: int
    """Rows of the halo that have the same remainder by the stride."""
    pitch: int
    """Columns of that kind: pixels of the halo from one row to the next."""
    boxes: int
    """Pairs of remainders."""
    next_group: int
    """Pixels of the halo from one group of eight positions to the next,"""
    next_warpgroup: int
    """and from the positions of one warpgroup to those of another."""

    @property
    def pixels(self) -> int:
        """Of the halo."""
        return self.sorted_h * self.pitch * self.boxes


class Staging(NamedTuple):
    """What a block holds in shared memory, and how it goes through it."""

    area: Area
    box_pixels: int
    """Of the halo, those of each pair of remainders, with what fills their copy."""
    halo_buffers: int
    """Of each of the tiles that a block computes at once."""
    chunks: int
    steps: int
    """Of a chunk of channels."""
    products: int
    """Of a step, 32 bytes of each filter and pixel."""
    stages: int
    resident: bool
    nbytes: int

    @property
    def halo_pixels(self) -> int:
        return self.box_pixels * self.area.boxes

    def copies_ahead(self, tile: Tile) -> bool:
        """Whether products seldom wait for a copy."""
        halo = self.halo_buffers > 1 or (self.chunks <= 1 and tile.at_once > 1)
        return halo and (self.resident or self.stages > 2)


class HaloWgmma(CudaAlgorithm):
    name = "halo_wgmma"
    summary = "Hopper's warpgroup products from an input tile staged for all taps; f16, bf16, TF32"
    tf32 = True
    ops = ("conv2d", "conv_transpose2d")
    shaders = ("halo_wgmma", "pack_filters", "to_channels_last")

    def refuse(self, problem: ConvProblem, facts: Facts) -> str | None:
        p = problem
        reason = refuse_wgmma(facts) or refuse_float32(p) or refuse_one_tap(p) or refuse_phases(p)
        if reason is not None:
            return reason
        if not _gathered(p) and max(_in_strides(p)) > MOST_STRIDE:
            return f"needs strides of at most {MOST_STRIDE}, got {p.stride[0]},{p.stride[1]}"
        if next(_fitting_tiles(p, facts), None) is None:
            return _too_large(p, facts)
        return None

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        p = problem
        computed = {t: _tiles(p, t) * t.p * t.m for t in _fitting_tiles(p, facts)}
        least = min(computed.values(), default=0)
        return [_tile_config(t) for t, work in computed.items() if work <= MOST_WASTE * least]

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p, tile = problem, _tile_of(config)
        lowering = Lowering(p, facts, workspace_limit, _source(p, facts))
        for phase in _phases(p):
            staging = _staging(p, phase, tile, facts)
            if staging is None:
                raise AlgorithmRefusedError(f"a tile of {tile.p} pixels {_too_large(p, facts)}")
            order, words = _words(p, phase, tile, staging)
            if _packed(p, tile):
                step = Step(tile.team_m, staging.products * 32 // p.itemsize)
                offsets = _offsets(p, phase, tile, staging, order)
                packed = pack(lowering, step, staging.chunks * staging.steps, offsets, cores=True)
            else:
                packed = Region("weight")
            words_at = lowering.tables.add(words.astype("<u4").tobytes())
            lowering.passes.append(self._pass(lowering, tile, phase, staging, packed, words_at))
        return lowering.plan(self.name, config)

    @staticmethod
    def _pass(
        lowering: Lowering,
        tile: Tile,
        phase: Phase,
        staging: Staging,
        packed: Region,
        words: Region,
    ) -> Pass:
        p, x = lowering.problem, lowering.source
        tiles = _tiles_of_phase(p, phase, tile)
        blocks = _blocks(p, tile, staging, tiles, lowering.facts)
        area = staging.area
        shader = Shader.of(
            "halo_wgmma",
            p.dtype,
            TILE_P=tile.p,
            GROUP_P=tile.group_p,
            TILE_M=tile.team_m,
            TILE_K=tile.k,
            TEAMS=tile.teams,
            SHARED=tile.sharers > 1,
            HALO_BUFFERS=staging.halo_buffers,
            STAGES=staging.stages,
            RESIDENT=staging.resident,
            STEPS=staging.steps,
            STEP_PRODUCTS=staging.products,
            HALO_PIXELS=staging.halo_pixels,
            PACKED=_packed(p, tile),
            GATHERED=p.c_group if _gathered(p) else 0,
            CHANNELS_LAST=p.layout == "NHWC",
            OUT_VECTOR=_out_vector(p, tile, area),
            THREADS=tile.threads,
            # More than half of a multiprocessor's: blocks that start while the kernel before leaves
            # little room would share one, and leave others idle.
            SHARED_BYTES=max(staging.nbytes, lowering.limits.max_workgroup_storage // 2 + 1),
        )
        return Pass(
            lowering.ending(shader),
            params(
                tiles=tiles,
                blocks=blocks,
                **halo_params(lowering, phase),
                rows=area.rows,
                columns=area.columns,
                tiles_h=ceil_div(phase.h.count, area.rows),
                tiles_w=ceil_div(phase.w.count, area.columns),
                sorted_h=area.sorted_h,
                pitch=area.pitch,
                next_group=area.next_group,
                next_warpgroup=area.next_warpgroup,
                x_c=x.strides.x_c,
                **output_params(p, phase),
                m_tiles=ceil_div(p.k_group, tile.team_m),
                chunks=staging.chunks,
                groups=p.groups,
                **activation_params(p),
            ),
            (
                ("x", x.region),
                ("packed", packed),
                ("words", words),
                *output_bindings(p, lowering.bias, lowering.target),
            ),
            grid_1d(blocks, lowering.limits),
        )

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        p, tile = problem, _tile_of(config)
        # Of a multiprocessor; wgmma is faster than the mma.sync that was probed.
        rate = cuda_facts(facts).matrix_flops / 2 / facts.cores
        seconds = 0.0
        for phase in _phases(p):
            staging = _staging(p, phase, tile, facts)
            assert staging is not None, "configs are those that fit"
            tiles = _tiles_of_phase(p, phase, tile)
            products = staging.chunks * staging.steps * staging.products
            # TF32 takes as long for half the products.
            compute = products * 16 * tile.p * tile.m / rate
            weight_bytes = 0 if staging.resident else 32 * products * tile.m
            stored = _stored(p, tile, staging.area)
            if _gathered(p):  # the wider the products, the faster
                compute *= (tile.group_p + 28) / tile.group_p / 1.5
                copied = max(_copied(p, staging.area.pixels), weight_bytes / 60e9)
                longest = _tile_seconds(compute, copied, stored + facts.latency)
            else:
                # (Fitted on an H200, as what follows. After each step a product is waited for.)
                compute *= (1 + 0.65 / staging.products) / 1.6
                compute += staging.chunks * CHUNK_SECONDS
                copied = align(p.c_group, _vector(p)) * p.itemsize * staging.area.pixels / 80e9
                copied += weight_bytes / 300e9
                # Of two teams, one stores while the other multiplies, if not quite. (Those that
                # share a tile lose in turns what they gain so, where products are short.)
                alone = (0.83 if tile.at_once > 1 else 1.0) * (compute + stored)
                longest = max(alone, copied + (stored if tile.teams == 1 else 0.0))
            each = ceil_div(tiles, _blocks(p, tile, staging, tiles, facts))
            seconds += each * longest + (3 * facts.latency if _gathered(p) else 0.0)
        packed = _packed(p, tile)
        memory, launches = overheads(p, facts, _source(p, facts), packed=packed)
        # Neither hides the other one quite.
        hidden = 0.8 if _gathered(p) else 0.6
        return max(seconds, memory) + (1 - hidden) * min(seconds, memory) + launches


def _too_large(p: ConvProblem, facts: Facts) -> str:
    limit = f"{facts.limits.max_workgroup_storage} bytes of shared memory that a block may have"
    if not _gathered(p):
        limit += f", or {MOST_BOX} pixels in a row or column,"
    return (
        f"needs more than the {limit} for the input of a tile (kernel {p.r} x {p.s}, stride "
        f"{p.stride[0]},{p.stride[1]}, dilation {p.dilation[0]},{p.dilation[1]})"
    )


def _tile_config(tile: Tile) -> Config:
    return {
        "tile_p": tile.p,
        "group_p": tile.group_p,
        "rows_of_eight": tile.rows_of_eight,
        "tile_m": tile.m,
        "tile_k": tile.k,
        "teams": tile.teams,
    }


def _tile_of(config: Config) -> Tile:
    p, group_p, m, k, teams = (
        int(config[name]) for name in ("tile_p", "group_p", "tile_m", "tile_k", "teams")
    )
    return Tile(p, group_p, bool(config["rows_of_eight"]), m, k, teams)


def _vector(p: ConvProblem) -> int:
    return VECTOR_BYTES // p.itemsize


def _gathered(p: ConvProblem) -> bool:
    """Whether a group's channels are so few that one product takes those of two taps."""
    return p.c_group <= _vector(p)


def _packed(p: ConvProblem, tile: Tile) -> bool:
    """Whether the weight is packed first.

    Channels of a tap that lie side by side need not be. But then steps are of whole taps, which
    pays where these are whole rows.
    """
    as_it_lies = p.weight_last and not p.transposed and p.c_group % _vector(p) == 0
    return _gathered(p) or not as_it_lies or tile.k * p.itemsize != ROW_BYTES


def _source(p: ConvProblem, facts: Facts) -> Source:
    return caller_input(p) if _gathered(p) else source(p, facts.limits, vector=_vector(p))


def _tiles(p: ConvProblem, tile: Tile) -> int:
    return sum(_tiles_of_phase(p, phase, tile) for phase in _phases(p))


def _tiles_of_phase(p: ConvProblem, phase: Phase, tile: Tile) -> int:
    area = _area(p, phase, tile)
    cuts = ceil_div(phase.h.count, area.rows) * ceil_div(phase.w.count, area.columns)
    return p.n * cuts * _kinds(p, tile)


def _kinds(p: ConvProblem, tile: Tile) -> int:
    """Tiles of filters, of all groups."""
    return ceil_div(p.k_group, tile.m) * p.groups


def _blocks(p: ConvProblem, tile: Tile, staging: Staging, tiles: int, facts: Facts) -> int:
    """One on each multiprocessor; each with the same filters always, if it has them but once."""
    blocks, kinds = min(tiles, facts.cores), _kinds(p, tile)
    return blocks // kinds * kinds if staging.resident else blocks


def _fitting_tiles(p: ConvProblem, facts: Facts) -> Iterator[Tile]:
    for groups, m, teams in SHAPES:
        if m >= 2 * max(p.k_group, 64):
            continue
        for group_p in POSITIONS:
            for rows_of_eight in (True, False):
                shape = Tile(groups * group_p, group_p, rows_of_eight, m, 0, teams)
                tile = _with_channels(p, shape, facts)
                # Each team has a tile to compute.
                if tile and (tile.at_once == 1 or _tiles(p, tile) > facts.cores):
                    yield tile


def _with_channels(p: ConvProblem, shape: Tile, facts: Facts) -> Tile | None:
    """The tile of that shape with the most channels at once that leave room to copy ahead."""
    if _gathered(p):
        ks = [_vector(p)]
    else:
        sizes = [size // p.itemsize for size in CHUNKS]
        ks = [k for k in sizes if k < 2 * p.c_group or k == sizes[-1]]
    possible = []
    for tile in (shape._replace(k=k) for k in ks):
        stagings = [_staging(p, phase, tile, facts) for phase in _phases(p)]
        if None in stagings:
            continue
        if all(s and s.copies_ahead(tile) for s in stagings):
            return tile
        possible.append(tile)
    return possible[0] if possible else None


@lru_cache(maxsize=64)
def _phases(p: ConvProblem) -> tuple[Phase, ...]:
    return tuple(phases(p))


def _in_strides(p: ConvProblem) -> tuple[int, int]:
    """Input pixels from one output pixel to the next; those of a phase are neighbours."""
    return (1, 1) if p.transposed else p.stride


def _area(p: ConvProblem, phase: Phase, tile: Tile) -> Area:
    if not tile.rows_of_eight:
        return _rows_that_follow(phase, tile, _width(p, tile.p))
    _, more_w = _margin(phase)
    groups = tile.p // tile.group_p
    return _with_halo(phase, tile.group_p // 8, 8 * groups, 8 * groups + more_w, 8)


def _margin(phase: Phase) -> tuple[int, int]:
    """Rows and columns of the same remainder that a halo has more than its tile."""
    h, w = phase.h, phase.w
    return (span(h) - 1) // h.in_stride, (span(w) - 1) // w.in_stride


def _rows_that_follow(phase: Phase, tile: Tile, columns: int) -> Area:
    _, more_w = _margin(phase)
    count, pitch = phase.h.count, columns + more_w
    fit = min((tile.p + more_w) // pitch, count)
    rows = ceil_div(count, ceil_div(count, fit))  # no more than needed for as many tiles
    return _with_halo(phase, rows, columns, 8, tile.group_p)


def _with_halo(phase: Phase, rows: int, columns: int, next_group: int, next_warpgroup: int) -> Area:
    more_h, more_w = _margin(phase)
    sorted_h, pitch = rows + more_h, columns + more_w
    boxes = phase.h.in_stride * phase.w.in_stride
    return Area(rows, columns, sorted_h, pitch, boxes, next_group, next_warpgroup)


@lru_cache(maxsize=4096)
def _width(p: ConvProblem, positions: int) -> int:
    """The best number of columns for so many positions whose rows follow each other."""
    phase = max(_phases(p), key=lambda phase: phase.pixels * phase.taps)
    channels = align(p.c_group, _vector(p))
    # TF32 takes twice as long.
    products = positions * 64 * phase.taps * channels * p.itemsize / 4e12
    tile = Tile(positions, positions, False, 64, channels, 1)

    def seconds(columns: int) -> float:
        area = _rows_that_follow(phase, tile, columns)
        tiles = ceil_div(phase.h.count, area.rows) * ceil_div(phase.w.count, columns)
        return tiles * _tile_seconds(products, _copied(p, area.pixels), _stored(p, tile, area))

    width = phase.w.count
    cuts = range(ceil_div(width, positions), ceil_div(width, 8) + 1)
    widths = {ceil_div(width, cut) for cut in cuts[:MOST_CUTS]}
    # Pairs of pixels are stored together.
    widths = {w + w % 2 if width % 2 == 0 else w for w in widths}
    if not _gathered(p):
        boxed = {w for w in widths if _fits_box(_rows_that_follow(phase, tile, w), phase)}
        widths = boxed or widths
    return min(widths, key=seconds)


def _tile_seconds(products: float, copied: float, stored: float) -> float:
    """Of one tile: copies for the next one hide behind products, but not quite; stores do not."""
    return max(products, copied) + 0.2 * min(products, copied) + stored


def _copied(p: ConvProblem, pixels: int) -> float:
    """Seconds for all channels of a halo, if nothing else is copied."""
    if _gathered(p):  # element by element
        return 1.2e-9 * p.itemsize * pixels
    return align(p.c_group, _vector(p)) * p.itemsize * pixels / 60e9


def _stored(p: ConvProblem, tile: Tile, area: Area) -> float:
    """Seconds of one warpgroup; they do not slow each other."""
    seconds = p.itemsize * tile.group_p * 64 / 38e9
    if p.layout == "NCHW":  # the first and the last bytes of each run are part of a sector
        rows = area.rows if tile.rows_of_eight else area.rows * tile.group_p / tile.p
        seconds += 5e-9 * rows * 64
    return seconds


def _out_vector(p: ConvProblem, tile: Tile, area: Area) -> int:
    """Elements of one store; of pixels at most two, so that a warp stores whole lines of memory."""
    most = out_vector(p, rectangles=True)
    if p.layout == "NHWC":
        return most
    pairs = tile.rows_of_eight or (area.columns % 2 == 0 and area.pitch % 2 == 0)
    return 2 if most > 1 and pairs else 1


@lru_cache(maxsize=4096)
def _staging(p: ConvProblem, phase: Phase, tile: Tile, facts: Facts) -> Staging | None:
    """As much as fits of what makes a kernel fast, in steps as long as they may be; None where even
    the least does not fit."""
    area = _area(p, phase, tile)
    pixel_bytes = tile.k * p.itemsize
    box_pixels = area.sorted_h * area.pitch
    if _gathered(p):
        halo_bytes = 2 * pixel_bytes * area.pixels
    elif pixel_bytes > ROW_BYTES or not _fits_box(area, phase):
        return None
    else:
        box_pixels = align(box_pixels, BOX_ALIGNMENT // pixel_bytes)
        halo_bytes = pixel_bytes * box_pixels * area.boxes
    chunks = ceil_div(p.c_group, tile.k) if phase.taps else 0
    products = max(ceil_div(phase.taps * tile.k * p.itemsize, 32), 1)
    if _gathered(p):  # products with zeros may follow
        step = min(products, MOST_PRODUCTS)
        step = ceil_div(products, ceil_div(products, step))
    else:
        whole = 1 if _packed(p, tile) else pixel_bytes // 32  # a tap's
        step = max(n for n in range(whole, MOST_PRODUCTS + 1, whole) if products % n == 0)
    steps = ceil_div(products, step)
    stage_bytes = 32 * step * tile.team_m
    # On the way out: two slices of 32 pixels of 64 filters, or one of 64 filters of some pixels.
    slices = 2 * 32 * (64 * p.itemsize + 16) if p.layout == "NHWC" else 64 * 144
    fixed = slices * tile.warpgroups + 4 * (steps * step + tile.p)
    fixed += 4 * area.pixels if _gathered(p) else 0
    # The last positions of a tile may lie past the halo, in what follows it.
    last = (tile.p // tile.group_p - 1) * area.next_warpgroup
    last += (tile.group_p // 8 - 1) * area.next_group + 7
    last += int(_shifts(phase, area, box_pixels).max(initial=0))
    past = pixel_bytes * max(last + 1 - box_pixels * area.boxes, 0)
    all_steps = max(chunks * steps * tile.sharers, 1)
    kinds, cores = _kinds(p, tile), facts.cores
    few_kinds = cores // kinds * kinds >= LEAST_USED * cores
    choices = [
        (buffers, stages, resident)
        for resident, counts in (
            (True, (all_steps,) if few_kinds else ()),
            (False, _stages(tile, steps)),
        )
        for buffers in ((3, 2, 1) if _gathered(p) else (2, 1))
        for stages in counts
        # A halo that nothing is copied behind costs more than a weight that comes again.
        if not (resident and tile.at_once == 1 and buffers == 1 and chunks * tile.sharers > 1)
    ]
    for buffers, stages, resident in choices:
        halos = buffers * tile.at_once
        rest = fixed + 16 * halos + stages * (stage_bytes + 16)
        nbytes = halos * halo_bytes + max(rest, past)
        if nbytes <= facts.limits.max_workgroup_storage:
            return Staging(area, box_pixels, buffers, chunks, steps, step, stages, resident, nbytes)
    return None


def _fits_box(area: Area, phase: Phase) -> bool:
    """Whether the copy engine brings the pixels of a pair of remainders at once."""
    return all(
        (count - 1) * axis.in_stride < MOST_BOX
        for axis, count in ((phase.h, area.sorted_h), (phase.w, area.pitch))
    )


def _stages(tile: Tile, steps: int) -> range:
    """Of a weight that is not resident, the more the better; none if teams would need their own."""
    if tile.at_once > 1:
        return range(0)
    # Teams that share them have more of them than the other one's turn takes.
    fewest = 2 if tile.teams == 1 else steps + 1
    return range(max(fewest, MOST_STAGES), fewest - 1, -1)


def _shifts(phase: Phase, area: Area, box_pixels: int) -> np.ndarray:
    """Positions of the halo from the first tap's to each other one's."""

    def sorted_by(axis: Axis) -> tuple[np.ndarray, np.ndarray]:
        from_first = np.array([tap.offset for tap in axis.taps], np.int64) - first_offset(axis)
        return from_first % axis.in_stride, from_first // axis.in_stride

    (kind_h, h), (kind_w, w) = sorted_by(phase.h), sorted_by(phase.w)
    kinds = kind_h[:, None] * phase.w.in_stride + kind_w
    shifts: np.ndarray = kinds * box_pixels + h[:, None] * area.pitch + w
    return shifts.ravel()


def _words(
    p: ConvProblem, phase: Phase, tile: Tile, staging: Staging
) -> tuple[np.ndarray, np.ndarray]:
    """The order of the taps, and for each product of a chunk where its pixels lie.

    In units of 16 bytes, from where the tile's first pixel lies for the first tap. Of gathered
    channels, from bit 16 on, how far it is from those of the product's first tap to its second's.
    """
    shifts = _shifts(phase, staging.area, staging.box_pixels)
    order = np.arange(len(shifts))
    words = np.full(staging.steps * staging.products, staging.halo_pixels)  # zeros, where gathered
    if _gathered(p):
        order = np.argsort(shifts, kind="stable")  # the second tap lies behind the first one
        shifts = shifts[order]
        second = np.append(shifts[1::2], shifts[-1:] + staging.halo_pixels)
        second = second[: ceil_div(len(shifts), 2)]
        words[: len(second)] = shifts[::2] + (second - shifts[::2] << 16)
    elif len(shifts):
        chunks = tile.k * p.itemsize // VECTOR_BYTES
        words = (shifts[:, None] * chunks + np.arange(0, chunks, 2)).ravel()
    return order, words


def _offsets(
    p: ConvProblem, phase: Phase, tile: Tile, staging: Staging, order: np.ndarray
) -> np.ndarray:
    """Where the weights of a filter lie, in the kernel's order: by chunk, tap and channel."""
    offsets = weight_offsets(p, phase, staging.chunks * tile.k)
    by_tap = offsets.reshape(phase.taps, staging.chunks, tile.k)[order]
    by_chunk = by_tap.transpose(1, 0, 2).reshape(staging.chunks, phase.taps * tile.k)
    length = staging.steps * staging.products * 32 // p.itemsize
    return np.pad(by_chunk, ((0, 0), (0, length - by_chunk.shape[1])), constant_values=-1)
