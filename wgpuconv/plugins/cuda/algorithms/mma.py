"""What the tensor-core algorithms share: tiles, the input's order, the packed weight, costs."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from ....algorithms.base import params, strides, weight_strides
from ....algorithms.phases import NEVER, Phase, phases
from ....facts import Facts, Limits
from ....plan import Config, Pass, Region, Shader, align, ceil_div, grid_1d
from ....problem import ConvProblem
from ..facts import AMPERE, HOPPER, TURING, cuda_facts
from .lowering import Lowering, Source, caller_input, partial_bytes

PACKED_ALONG_K = (8, 512)
"""Filters, each of one phase, and products that a block of pack_filters packs, where its threads
lie side by side along k,"""
PACKED_ALONG_FILTERS = (32, 128)
"""and where they do along those."""
MOST_CHUNKS = 8
"""Copies of one pixel that a block of to_channels_last brings: a line of memory of 128 bytes."""
SHARED_OF_CORE = 1024
"""Bytes of shared memory that the driver keeps of each block."""


class Packed(Protocol):
    """What the packed weight depends on of a tile."""

    @property
    def m(self) -> int: ...
    @property
    def k(self) -> int: ...


class Step(NamedTuple):
    """What is packed together: m filters of k products."""

    m: int
    k: int


class Tile(NamedTuple):
    """A block computes p pixels by m filters, k products a step; a warp wp by wm."""

    p: int
    m: int
    k: int
    wp: int
    wm: int
    stages: int

    @property
    def threads(self) -> int:
        return (self.p // self.wp) * (self.m // self.wm) * 32

    @property
    def blocks(self) -> int:
        """Blocks of a multiprocessor that leave each thread the registers that it needs."""
        sums = self.wp * self.wm // 32
        # Beside its sums, a thread holds the fragments of two products and its addresses.
        registers = sums + 4 * (self.wp // 16 + self.wm // 16) * 2 + 64
        return max(65536 // (align(registers, 8) * self.threads), 1)

    def staged_bytes(self, itemsize: int, *, channels_last: bool) -> int:
        """The output's tile on its way out, with rows that begin on different banks."""
        if channels_last:
            return itemsize * self.p * (self.m + 8)
        return itemsize * self.m * (self.p + 16 // itemsize)

    def constants(self) -> dict[str, int]:
        return {
            "TILE_P": self.p,
            "TILE_M": self.m,
            "TILE_K": self.k,
            "WARP_P": self.wp,
            "WARP_M": self.wm,
            "STAGES": self.stages,
            "THREADS": self.threads,
            "BLOCKS": self.blocks,
        }


def tile_of(config: Config) -> Tile:
    return Tile(
        *(int(config[f"tile_{name}"]) for name in ("p", "m", "k")),
        *(int(config[name]) for name in ("warp_p", "warp_m", "stages")),
    )


def tile_config(tile: Tile) -> Config:
    return {
        "tile_p": tile.p,
        "tile_m": tile.m,
        "tile_k": tile.k,
        "warp_p": tile.wp,
        "warp_m": tile.wm,
        "stages": tile.stages,
    }


def refuse_float32(problem: ConvProblem) -> str | None:
    """Why tensor cores may not multiply the problem's floats; None where they may."""
    if problem.arithmetic != "f32":
        return None
    return (
        "multiplies f16 and bf16 on tensor cores, and f32 where the precision 'tf32' is "
        "allowed, got f32"
    )


def refuse_wgmma(facts: Facts) -> str | None:
    """Why the device has no products of warpgroups; None where it has."""
    major, minor = cuda_facts(facts).capability
    if (major, minor) != HOPPER:
        return f"needs the instruction wgmma of compute capability 9.0, got {major}.{minor}"
    return None


def refuse_capability(problem: ConvProblem, facts: Facts) -> str | None:
    """Why the tensor cores lack the problem's arithmetic: Turing's multiply f16 alone, Volta's take
    other instructions."""
    major, minor = cuda_facts(facts).capability
    if (major, minor) < TURING:
        return f"needs the tensor cores of compute capability 7.5 or more, got {major}.{minor}"
    if problem.arithmetic == "f16" or (major, minor) >= AMPERE:
        return None
    return f"multiplies {problem.arithmetic} from compute capability 8.0 on, got {major}.{minor}"


def vector_of(problem: ConvProblem) -> int:
    """Channels that one copy of 8 or 16 bytes brings, once zeros have been added."""
    most = 16 // problem.itemsize
    return most // 2 if problem.c_group <= most // 2 else most


def source(problem: ConvProblem, limits: Limits, *, vector: int) -> Source:
    """The input itself where its order and alignment will do, else a copy in workspace."""
    p, own = problem, strides(problem)
    if p.layout == "NHWC" and p.c_group % vector == 0:
        return caller_input(p, vector)
    channels = align(p.c_group, vector)
    row = p.groups * channels
    nbytes = p.n * p.h * p.w * row * p.itemsize
    region = Region("workspace", 0, nbytes)
    pixels = p.h * p.w
    chunks = row // vector
    tiles = ceil_div(chunks, MOST_CHUNKS)
    tile_chunks = ceil_div(chunks, tiles)
    warps = max(8 // tile_chunks, 1) * tile_chunks
    tile_pixels = 64 * (warps // tile_chunks)
    step = Pass(
        Shader.of(
            "to_channels_last",
            p.dtype,
            CHANNELS=vector,
            CHUNKS=tile_chunks,
            PIXELS=tile_pixels,
            VECTOR=2 if p.layout == "NCHW" and pixels % 2 == 0 else 1,
            THREADS=32 * warps,
        ),
        params(
            all_pixels=p.n * pixels,
            pixels=pixels,
            c_group=p.c_group,
            chunks_group=channels // vector,
            chunks=chunks,
            tiles=tiles,
            x_n=own.x_n,
            x_c=own.x_c,
            x_p=own.x_w,
        ),
        (("x", Region("input")), ("y", region)),
        grid_1d(ceil_div(p.n * pixels, tile_pixels) * tiles, limits),
    )
    made = own._replace(x_n=p.h * p.w * row, x_c=1, x_h=p.w * row, x_w=row)
    return Source((step,), region, channels, vector, made, nbytes)


def pack(
    lowering: Lowering,
    tile: Packed,
    steps: int,
    offsets: np.ndarray,
    *,
    rows: int = 1,
    columns: int = 1,
    cores: bool = False,
    whole: bool = False,
) -> Region:
    """Where the weight will lie in the order in which the kernels read it.

    ``offsets`` are those of weight_offsets for each product, in that order; what is missing to so
    many whole steps is zeros. Of a gather that ``rows`` by ``columns`` phases share, they are those
    of its first phase; what is packed of the others follows. With ``whole``, what TF32 does not
    hold of a step follows it. Appends the pass that packs it, if there is anything to pack.
    """
    p, phases = lowering.problem, rows * columns
    w = weight_strides(p)
    packed = lowering.prepared(phases * packed_bytes(p, tile, steps) * (2 if whole else 1))
    if not steps:
        return packed
    table = np.full(steps * tile.k, -1, "<i4")
    table[: offsets.size] = offsets.ravel()
    m_tiles = ceil_div(p.k_group, tile.m)
    # Along k a transposed convolution's weight is strewn over memory, along filters hardly.
    filters_first = p.transposed
    block, window = PACKED_ALONG_FILTERS if filters_first else PACKED_ALONG_K
    windows = ceil_div(steps * tile.k, window)
    step = Pass(
        Shader.of(
            "pack_filters",
            p.dtype,
            TILE_M=tile.m,
            TILE_K=tile.k,
            FILTERS_FIRST=filters_first,
            COLUMNS=block,
            WINDOW=window,
            CORES=cores,
            WHOLE=whole,
        ),
        params(
            m=p.k_group,
            m_tiles=m_tiles,
            groups=p.groups,
            phases=phases,
            phase_columns=columns,
            k_steps=steps,
            windows=windows,
            w_g=w.w_g,
            w_m=w.w_k,
            w_r=w.w_r,
            w_s=w.w_s,
        ),
        (
            ("weight", Region("weight")),
            ("offsets", lowering.tables.add(table.tobytes())),
            ("packed", packed),
        ),
        grid_1d(
            ceil_div(phases * p.groups * m_tiles * tile.m, block) * windows,
            lowering.limits,
        ),
    )
    lowering.prepare.append(step)
    return packed


def packed_bytes(problem: ConvProblem, tile: Packed, steps: int) -> int:
    rows = problem.groups * ceil_div(problem.k_group, tile.m) * tile.m
    return max(rows * steps * tile.k, 8) * problem.itemsize


def weight_offsets(
    problem: ConvProblem, phase: Phase, channels: int, block: int | None = None
) -> np.ndarray:
    """The place in a filter of each product's weight, -1 for none.

    As (rows of taps, columns of taps, channels), or with ``block`` channels of each tap at a time
    as (channels / block, rows, columns, block).
    """
    p, w = problem, weight_strides(problem)
    rows = np.array([tap.place for tap in phase.h.taps], np.int64).reshape(-1, 1, 1)
    columns = np.array([tap.place for tap in phase.w.taps], np.int64).reshape(1, -1, 1)
    c = np.arange(channels)
    offsets = np.where(c < p.c_group, c * w.w_c + rows * w.w_r + columns * w.w_s, -1)
    return offsets if block is None else _blocks(offsets, block)


def _blocks(table: np.ndarray, block: int) -> np.ndarray:
    """(rows, columns, channels) as (channels / block, rows, columns, block)."""
    rows, columns, channels = table.shape
    return np.moveaxis(table.reshape(rows, columns, channels // block, block), 2, 0)


def tap_copies(phase: Phase, x: Source, padded: int, block: int | None = None) -> bytes:
    """``int2(input offset, mask)`` of each copy, in the order of weight_offsets.

    The mask has the bit of the tap's row and, from bit 16 on, that of its column.
    """
    h = np.array([tap.offset for tap in phase.h.taps], np.int64).reshape(-1, 1, 1)
    w = np.array([tap.offset for tap in phase.w.taps], np.int64).reshape(1, -1, 1)
    c = np.arange(0, x.channels, x.vector).reshape(1, 1, -1)
    offset = h * x.strides.x_h + w * x.strides.x_w + c
    mask = (1 << np.arange(h.size)).reshape(h.shape) | (1 << np.arange(16, 16 + w.size)).reshape(
        w.shape
    )
    mask = np.broadcast_to(mask, offset.shape)
    if block is not None:
        offset, mask = (_blocks(each, block // x.vector) for each in (offset, mask))
    table = np.empty((padded, 2), "<i4")
    table[:] = (0, NEVER)
    table[: offset.size, 0] = offset.ravel()
    table[: offset.size, 1] = mask.ravel()
    return table.tobytes()


def out_vector(problem: ConvProblem, *, rectangles: bool = False) -> int:
    """Elements that one store may take: side by side in the output, and aligned.

    The pixels of ``rectangles`` end at the end of a row, others at that of an image.
    """
    p = problem
    if p.layout == "NHWC":
        run = p.k_group
    elif p.transposed:
        run = 1
    else:
        run = p.out_w if rectangles else p.out_h * p.out_w
    return next(v for v in (8, 4, 2, 1) if run % v == 0 and v * p.itemsize <= 16)


def mma_seconds(
    problem: ConvProblem,
    tile: Tile,
    facts: Facts,
    *,
    products: int,
    blocks: int,
    step_bytes: int,
    steps: int,
) -> float:
    """Seconds of the tensor cores, or of the loads that feed them, whichever takes longer.

    ``products`` are multiply-adds of one block, ``step_bytes`` what it loads a step.
    """
    resident = min(tile.blocks, 8)
    waves = ceil_div(blocks, facts.cores * resident)
    in_flight = min(blocks, facts.cores * resident) / facts.cores  # blocks of a core
    # Few warps leave the tensor cores waiting for each other's fragments.
    warps = tile.threads // 32 * min(in_flight, resident)
    efficiency = 1.15 * warps / (warps + 2) * tile.wp * tile.wm / (tile.wp * tile.wm + 1024)
    if in_flight <= 1:  # nothing to multiply while the only block waits for its copies
        efficiency *= 0.45
    core_rate = cuda_facts(facts).matrix_flops / 2 / facts.cores * efficiency
    compute = products * max(in_flight, 1.0) / core_rate
    # The second-level cache feeds a core with about 32 bytes a nanosecond.
    loads = steps * step_bytes * max(in_flight, 1.0) / 32e9
    # The first copies, the stores, and what a split leaves for the next launch, come on top.
    return waves * (max(compute, loads) + 5 * facts.latency) + 15 * facts.latency


def overheads(
    problem: ConvProblem, facts: Facts, x: Source, *, slices: int = 1, packed: bool = True
) -> tuple[float, float]:
    """Seconds of the memory's traffic, and those of the launches; the weight is packed first."""
    p = problem
    traffic = p.input_bytes + p.residual_bytes + p.out_bytes
    traffic += (3 if packed else 1) * p.weight_bytes + 2 * x.nbytes + 2 * partial_bytes(p, slices)
    launches = (2 if packed else 1) * len(phases(p)) + len(x.passes) + (slices > 1)
    return traffic / facts.bandwidth, launches * facts.launch
