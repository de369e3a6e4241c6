"""Direct convolution on tensor cores, for few channels or few filters.

Such problems are bound by memory: the filters stay in registers, and each warp streams rows of the
input past them.
"""

from __future__ import annotations

from typing import NamedTuple

from ....algorithms.base import activation_params, params, weight_strides
from ....algorithms.phases import Axis, Phase, count_phases, phases, refuse_phases
from ....errors import AlgorithmRefusedError
from ....facts import Facts
from ....plan import Config, Pass, Plan, Region, Shader, align, ceil_div, grid_1d
from ....problem import ConvProblem
from .base import CudaAlgorithm, output_bindings
from .gather import output_params
from .halo_mma import first_offset, span
from .lowering import Lowering, caller_input
from .mma import SHARED_OF_CORE, out_vector, refuse_capability, refuse_float32

WARPS = 4
"""Of a block; they share nothing but their start."""
HEIGHTS = (1, 2, 4)
WIDTHS = (32, 64)
FILTERS = (16, 32, 64)
STREAMED_BYTES = 32 << 20
"""Outputs that large are not kept for who reads them next: caches have 4 to 96 MB."""
MOST_REGISTERS = 255
"""That a thread may have."""
MOST_BLOCKS = 8
"""Of a multiprocessor, beyond which nothing is gained."""


class Tile(NamedTuple):
    """A warp computes h rows of w columns of m filters from a ring of so many rows of the input."""

    h: int
    w: int
    m: int
    ring: int


class DirectMma(CudaAlgorithm):
    name = "direct_mma"
    summary = "streams rows past filters that stay in registers; few channels, few filters"
    tf32 = True
    ops = ("conv2d", "conv_transpose2d")
    shaders = ("direct_mma",)

    def refuse(self, problem: ConvProblem, facts: Facts) -> str | None:
        p = problem
        reason = refuse_float32(p) or refuse_capability(p, facts) or refuse_phases(p)
        if reason is not None:
            return reason
        if min(phase.taps for phase in phases(p)) == 0:
            return (
                "needs a tap that reaches each output pixel, got some without (kernel "
                f"{p.r} x {p.s}, stride {p.stride[0]},{p.stride[1]}, dilation "
                f"{p.dilation[0]},{p.dilation[1]})"
            )
        if not self.configs(p, facts):
            return (
                "holds filters in registers and rows of the input in shared memory, got too "
                f"many products a filter or too long rows ({p.c_group} channels, kernel "
                f"{p.r} x {p.s}, dilation {p.dilation[0]},{p.dilation[1]})"
            )
        return None

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        p = problem
        rows = max(phase.h.count for phase in phases(p))
        columns = max(phase.w.count for phase in phases(p))
        tiles = [
            Tile(h, w, m, _least_ring(p, h))
            for m in FILTERS
            if m < 2 * max(p.k_group, 16)
            for w in WIDTHS
            if w < 2 * max(columns, 32)
            for h in HEIGHTS
            if h < 2 * rows
        ]
        if _copy_bytes(p):  # else but one tile's input is on its way, in registers
            tiles += [t._replace(ring=2 * t.ring) for t in tiles if t.h < 4]
        return [_tile_config(t) for t in tiles if _fits(p, t, facts)]

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p, tile = problem, _tile_of(config)
        lowering = Lowering(p, facts, workspace_limit, caller_input(p))
        # This may be a part of the problem that the tile was made for: in the padding of that its
        # stride is larger, and so is the ring that it needs.
        if tile.ring < _least_ring(p, tile.h):
            raise AlgorithmRefusedError(
                f"needs a ring of {_least_ring(p, tile.h)} rows for {tile.h} of the output, got "
                f"{tile.ring}"
            )
        if not _fits(p, tile, facts):
            raise AlgorithmRefusedError(
                f"a tile of {tile.h} x {tile.w} pixels of {tile.m} filters needs more registers or "
                "shared memory than a block may have"
            )
        for phase in phases(p):
            lowering.passes.append(self._pass(lowering, tile, phase))
        return lowering.plan(self.name, config)

    @staticmethod
    def _pass(lowering: Lowering, tile: Tile, phase: Phase) -> Pass:
        p, x, facts = lowering.problem, lowering.source, lowering.facts
        blocks = _blocks(p, phase, tile, facts)
        kinds = _kinds(p, tile)
        share = _share(p, phase, tile, facts)
        shader = Shader.of(
            "direct_mma",
            p.dtype,
            TILE_H=tile.h,
            TILE_W=tile.w,
            TILE_M=tile.m,
            C=p.c_group,
            PITCH=_pitch(p, phase),
            R=len(phase.h.taps),
            S=len(phase.w.taps),
            STRIDE_H=phase.h.in_stride,
            STRIDE_W=phase.w.in_stride,
            STEP_H=_tap_step(phase.h),
            STEP_W=_tap_step(phase.w),
            RING=tile.ring,
            COPY_BYTES=_copy_bytes(p),
            WEIGHT_LAST=p.weight_last,
            FILTER_VECTOR=_filter_vector(p),
            WIDE=_wide(p),
            LEAD=_lead(p, phase),
            CHANNELS_LAST=_last(p),
            OUT_VECTOR=out_vector(p, rectangles=True),
            STREAMED=p.out_bytes > STREAMED_BYTES,
            THREADS=32 * WARPS,
            BLOCKS=blocks,
            SHARED_BYTES=_shared_bytes(p, phase, tile),
        )
        h, w = (_places(axis) for axis in (phase.h, phase.w))
        weight = weight_strides(p)
        return Pass(
            lowering.ending(shader),
            params(
                tasks=share.tasks,
                strips=ceil_div(phase.w.count, tile.w),
                chunks=share.chunks,
                rows=share.rows,
                workers=share.workers,
                q_h=phase.h.count,
                q_w=phase.w.count,
                in_h=p.h,
                in_w=p.w,
                first_h=first_offset(phase.h),
                first_w=first_offset(phase.w) - _lead(p, phase),
                x_g=x.x_g,
                x_n=x.strides.x_n,
                x_c=x.strides.x_c,
                x_h=x.strides.x_h,
                x_w=x.strides.x_w,
                w_first=h[0] * weight.w_r + w[0] * weight.w_s,
                w_g=weight.w_g,
                w_m=weight.w_k,
                w_c=weight.w_c,
                w_r=h[1] * weight.w_r,
                w_s=w[1] * weight.w_s,
                **output_params(p, phase),
                m_tiles=ceil_div(p.k_group, tile.m),
                **activation_params(p),
            ),
            (
                ("x", x.region),
                ("weight", Region("weight")),
                *output_bindings(p, lowering.bias, lowering.target),
            ),
            grid_1d(share.workers * kinds, lowering.limits),
        )

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        # (The figures were fitted to 284 measurements on an H200.)
        p, tile = problem, _tile_of(config)
        seconds = count_phases(p) * (facts.launch + 1e-6)
        for phase in phases(p):
            share, work = _share(p, phase, tile, facts), _tile_work(p, phase, tile)
            tiles = ceil_div(share.rows, tile.h)
            # What shared memory and the tensor cores take of the tiles of a multiprocessor,
            busy = work.reads * (1.3 if p.itemsize == 2 else 2.2) + work.products / 2
            warps = min(share.tasks * _kinds(p, tile) / facts.cores, share.resident)
            busy *= share.rounds * tiles * warps
            # and how long a warp waits for one after the other.
            waits = tiles * (275 + 6 * (work.reads + work.products + work.loads + work.stores))
            waits += 2300 + 80 * work.first_loads
            memory = _traffic(p, phase, tile) / (0.8 * facts.bandwidth)
            computing = (busy + share.rounds * waits) * facts.cycle
            seconds += max(memory, computing) + 0.1 * min(memory, computing)
        return seconds


class _Work(NamedTuple):
    """Instructions of a warp."""

    reads: float
    """Of the ring, for one tile,"""
    products: float
    loads: float
    stores: float
    first_loads: float
    """and before the first tile of a strip."""


def _tile_work(p: ConvProblem, phase: Phase, tile: Tile) -> _Work:
    octets, products = tile.w // 8, _products(p, phase)
    rows = _tile_rows(phase, tile.h)
    row_loads = _items(p, phase, tile) * (1 if _copy_bytes(p) else 8 // p.itemsize)
    vector = out_vector(p, rectangles=True)
    if _last(p):
        stores = tile.h * tile.w * tile.m / 32 / min(vector, tile.m // 8, 16 // p.itemsize)
    else:  # through shared memory
        stores = tile.h * tile.w * tile.m / 32 * (2 / vector + 1 / 2)
    return _Work(
        reads=rows * products * octets,
        products=tile.h * len(phase.h.taps) * products * octets * tile.m / 16,
        loads=2 * min(tile.h * phase.h.in_stride, rows) * row_loads,
        stores=stores,
        first_loads=rows * row_loads,
    )


def _traffic(p: ConvProblem, phase: Phase, tile: Tile) -> float:
    """Bytes from and to memory; those of a phase's outputs count for more where they are stored in
    short runs, or in such that share sectors with others. Warps with less than all filters are idle
    while others store."""
    split = _kinds(p, tile) > 1
    if _last(p):
        run = (min(tile.m, p.k_group) if split else p.out_w * p.k) * p.itemsize
        others = 0.0
    else:
        run = min(tile.w, phase.w.count) * p.itemsize
        others = 1.6 * 64 / run if p.out_w * p.itemsize % 32 else 0.0
    stored = (p.out_bytes + p.residual_bytes) * phase.pixels / (p.out_h * p.out_w)
    stored *= align(p.k_group, tile.m) / p.k_group if split else 1.0
    # Channels of a group that are less than a sector of memory.
    alone = _last(p) and p.groups > 1
    read = p.input_bytes * (max(32 / (p.c_group * p.itemsize), 1) if alone else 1)
    return read + stored * (1 + 0.7 * (32 / run) ** 2) * (1 + others)


class _Share(NamedTuple):
    """How the rows of the output are shared out among warps."""

    rows: int
    """Of a strip."""
    chunks: int
    tasks: int
    """Strips of all images."""
    workers: int
    """Blocks with the same filters."""
    rounds: int
    """Strips of a warp, at most."""
    resident: int
    """Warps of a multiprocessor."""


def _share(p: ConvProblem, phase: Phase, tile: Tile, facts: Facts) -> _Share:
    """Strips as long as possible, since each begins with rows that others have read as well, of
    which each warp gets as many as the others."""
    blocks = _blocks(p, phase, tile, facts)
    most_workers = max(facts.cores * blocks // _kinds(p, tile), 1)
    side_by_side = p.n * ceil_div(phase.w.count, tile.w)
    # Rows of the input, and what it takes until the first one is there, as so many of them.
    start = span(phase.h) + 4
    best: tuple[int, _Share] | None = None
    all_tiles = ceil_div(phase.h.count, tile.h)
    tiles = all_tiles
    while tiles:
        chunks = ceil_div(all_tiles, tiles)
        tiles = ceil_div(all_tiles, chunks)
        tasks = side_by_side * chunks
        workers = min(most_workers, ceil_div(tasks, WARPS))
        rounds = ceil_div(tasks, workers * WARPS)
        taken = rounds * (tiles * tile.h * phase.h.in_stride + start)
        if best is None or taken < best[0]:
            rows = tiles * tile.h
            best = taken, _Share(rows, chunks, tasks, workers, rounds, blocks * WARPS)
        tiles -= 1
    assert best is not None
    return best[1]


def _tile_config(tile: Tile) -> Config:
    return {"tile_h": tile.h, "tile_w": tile.w, "tile_m": tile.m, "ring": tile.ring}


def _tile_of(config: Config) -> Tile:
    return Tile(*(int(config[name]) for name in ("tile_h", "tile_w", "tile_m", "ring")))


def _last(p: ConvProblem) -> bool:
    return p.layout == "NHWC"


def _kinds(p: ConvProblem, tile: Tile) -> int:
    """Tiles of filters, of all groups."""
    return ceil_div(p.k_group, tile.m) * p.groups


def _channels(p: ConvProblem) -> int:
    """Of a group, with zeros up to the 8 bytes that a lane multiplies."""
    return align(p.c_group, 8 // p.itemsize)


def _copy_bytes(p: ConvProblem) -> int:
    """As many as lie side by side and aligned in a pixel; 0 where zeros must be added."""
    if not _last(p):
        return 0
    return next((size for size in (16, 8) if p.c_group * p.itemsize % size == 0), 0)


def _filter_vector(p: ConvProblem) -> int:
    """Elements of the weight that one load brings where a tile's filters lie side by side."""
    nbytes = p.k_group * p.reduction * p.itemsize
    return 1 if p.transposed or nbytes % 16 else 16 // p.itemsize


def _wide(p: ConvProblem) -> int:
    """Pixels that one load brings where they lie side by side, and no row begins between two."""
    return 1 if _last(p) or p.w % 2 else 2


def _lead(p: ConvProblem, phase: Phase) -> int:
    """Pixels before the first that a strip needs, so that its loads are aligned."""
    return first_offset(phase.w) % _wide(p)


def _pitch(p: ConvProblem, phase: Phase) -> int:
    """Bytes from one pixel to the next, such that four pixels of which a product reads 32 bytes
    each lie on different banks."""
    nbytes = _channels(p) * p.itemsize
    if nbytes % 32:
        return nbytes
    steps = (nbytes + more for more in range(0, 64, 16))
    return next((s for s in steps if s * phase.w.in_stride % 128 in (32, 96)), nbytes)


def _places(axis: Axis) -> tuple[int, int]:
    """The weight's place of the tap that meets the first input pixel, and from it to the next."""
    taps = sorted(axis.taps, key=lambda tap: tap.offset)
    return taps[0].place, taps[1].place - taps[0].place if len(taps) > 1 else 0


def _tap_step(axis: Axis) -> int:
    return abs(axis.offset_step) or 1


def _columns(p: ConvProblem, phase: Phase, tile: Tile) -> int:
    """Of the input of a strip."""
    return align(_lead(p, phase) + (tile.w - 1) * phase.w.in_stride + span(phase.w), _wide(p))


def _products(p: ConvProblem, phase: Phase) -> int:
    """Of 32 bytes along a row of taps."""
    return ceil_div(len(phase.w.taps) * _channels(p) * p.itemsize, 32)


def _tile_rows(phase: Phase, tile_h: int) -> int:
    """Of the input of so many rows of the output."""
    return (tile_h - 1) * phase.h.in_stride + span(phase.h)


def _least_ring(p: ConvProblem, tile_h: int) -> int:
    """A power of two of rows that holds the input of one tile, and what the next one adds."""
    rows = max(_tile_rows(phase, tile_h) + tile_h * phase.h.in_stride for phase in phases(p))
    return 1 << (rows - 1).bit_length()


def _shared_bytes(p: ConvProblem, phase: Phase, tile: Tile) -> int:
    # The last product of a row reads past its end.
    ring = align(tile.ring * _columns(p, phase, tile) * _pitch(p, phase) + 32, 16)
    staged = 0 if _last(p) else tile.m * (tile.w * p.itemsize + 16)
    filters = align(tile.m * p.c_group * phase.taps * p.itemsize, 16)
    return filters + WARPS * (ring + staged)


def _items(p: ConvProblem, phase: Phase, tile: Tile) -> int:
    """Copies or groups of loads of a row that each lane makes."""
    nbytes = _columns(p, phase, tile) * _channels(p) * p.itemsize
    return ceil_div(nbytes, 32 * (_copy_bytes(p) or 8 * _wide(p)))


def _registers(p: ConvProblem, phase: Phase, tile: Tile) -> int:
    """Of a thread, as far as the arrays that it holds tell."""
    filters = len(phase.h.taps) * _products(p, phase) * tile.m // 4
    sums = tile.h * tile.w // 8 * tile.m // 4
    items = _items(p, phase, tile)
    held = 0
    if not _copy_bytes(p):
        new_rows = min(tile.h * phase.h.in_stride, _tile_rows(phase, tile.h))
        wide = 2 if _wide(p) * p.itemsize == 8 else 1  # registers of a load
        held = items * 8 // p.itemsize * new_rows * wide
    return filters + sums + tile.w // 4 + items + held + tile.m // 8 + 36


def _blocks(p: ConvProblem, phase: Phase, tile: Tile, facts: Facts) -> int:
    """Of a multiprocessor; 0 where not even one has what it needs."""
    registers, nbytes = _registers(p, phase, tile), _shared_bytes(p, phase, tile)
    if registers > MOST_REGISTERS or nbytes > facts.limits.max_workgroup_storage:
        return 0
    by_registers = 65536 // (align(registers, 8) * 32 * WARPS)
    shared = facts.limits.max_workgroup_storage + SHARED_OF_CORE
    return min(by_registers, shared // (nbytes + SHARED_OF_CORE), MOST_BLOCKS)


def _fits(p: ConvProblem, tile: Tile, facts: Facts) -> bool:
    return all(_blocks(p, phase, tile, facts) for phase in phases(p))
