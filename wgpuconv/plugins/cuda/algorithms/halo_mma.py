"""Convolution on tensor cores with the input's tile staged once for all taps.

A gather copies each input element once a tap; with the border staged, taps are shifted reads of
shared memory, and only the weight streams by.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ....algorithms.base import activation_params, params
from ....algorithms.phases import Axis, Phase, phases, refuse_phases
from ....facts import Facts
from ....plan import Config, Pass, Plan, Region, Shader, align, ceil_div, grid_1d
from ....problem import ConvProblem
from .base import CudaAlgorithm, output_bindings
from .gather import output_params
from .lowering import Lowering, split_counts
from .mma import (
    Tile,
    mma_seconds,
    out_vector,
    overheads,
    pack,
    refuse_capability,
    source,
    tile_config,
    tile_of,
    weight_offsets,
)

RESIDENT = 0
"""Stages of a tile that brings the whole weight at once; all channels must be one step."""
TILES = (
    Tile(128, 128, 32, 64, 64, 4),
    Tile(128, 128, 64, 64, 64, 3),
    Tile(256, 128, 32, 64, 64, 3),
    Tile(256, 64, 32, 64, 64, 4),
    Tile(256, 64, 32, 64, 32, 4),
    Tile(256, 64, 16, 64, 64, 4),
    Tile(128, 64, 32, 64, 32, 4),
    Tile(128, 64, 64, 64, 32, 3),
    Tile(64, 128, 32, 32, 64, 4),
    Tile(64, 64, 32, 32, 32, 4),
    Tile(64, 64, 64, 32, 32, 3),
    Tile(128, 32, 32, 32, 32, 4),
    Tile(256, 32, 16, 64, 32, 4),
    Tile(256, 16, 16, 64, 16, 4),
    Tile(128, 16, 16, 32, 16, 4),
    Tile(256, 16, 16, 64, 16, RESIDENT),
    Tile(256, 32, 16, 64, 32, RESIDENT),
    Tile(256, 32, 32, 64, 32, RESIDENT),
    Tile(256, 64, 16, 64, 64, RESIDENT),
    Tile(256, 64, 32, 64, 64, RESIDENT),
    Tile(256, 64, 64, 64, 64, RESIDENT),
    Tile(128, 64, 64, 64, 32, RESIDENT),
    Tile(128, 128, 64, 64, 64, RESIDENT),
)
WIDTHS = (0, 8, 16, 32)
"""Columns of a rectangular tile of pixels; 0 is a run of pixels over rows and images."""
FILLS = (1, 2, 3)
"""Blocks a multiprocessor that a split sum should make."""
VECTOR = 8
MOST_WASTE = 1.5
"""Shapes that compute that many times what the best one does are left out."""


class HaloMma(CudaAlgorithm):
    name = "halo_mma"
    summary = "tensor-core convolution that stages each input tile once for all taps; f16, bf16"
    ops = ("conv2d", "conv_transpose2d")
    shaders = ("halo_mma", "pack_filters", "to_channels_last", "reduce_splits")

    def refuse(self, problem: ConvProblem, facts: Facts) -> str | None:
        p = problem
        if p.itemsize != 2:
            return f"multiplies f16 and bf16 on tensor cores, got {p.dtype}"
        reason = refuse_capability(p, facts) or refuse_one_tap(p) or refuse_phases(p)
        if reason is not None:
            return reason
        if not self.configs(p, facts):
            least = min(_shared_bytes(t, p, w) for t in TILES for w in WIDTHS)
            return (
                f"needs {least} bytes of shared memory for the input of one tile (kernel {p.r} x "
                f"{p.s}, dilation {p.dilation[0]},{p.dilation[1]}), may have "
                f"{facts.limits.max_workgroup_storage}"
            )
        return None

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        p = problem
        channels = align(p.c_group, VECTOR)
        shapes = [
            (tile, width)
            for tile in TILES
            if tile.m < 2 * max(p.k_group, 16) and tile.k < 2 * max(channels, 16)
            if tile.stages != RESIDENT or channels <= tile.k
            for width in WIDTHS
            if _shared_bytes(tile, p, width) <= facts.limits.max_workgroup_storage
        ]
        if not shapes:
            return []
        computed = {shape: self._blocks(p, *shape) * shape[0].p * shape[0].m for shape in shapes}
        least = min(computed.values())
        configs: list[Config] = []
        for tile, width in shapes:
            if computed[tile, width] > MOST_WASTE * least:
                continue
            blocks = self._blocks(p, tile, width)
            most = min(ceil_div(channels, tile.k), 16)
            wanted = (round(fill * facts.cores / blocks) for fill in FILLS)
            configs += [
                tile_config(tile) | {"tile_w": width, "splits": splits}
                for splits in split_counts(wanted, most)
            ]
        return configs

    @staticmethod
    def _blocks(p: ConvProblem, tile: Tile, width: int) -> int:
        per_phase = sum(_p_tiles(p, phase, tile, width)[0] for phase in phases(p))
        return per_phase * ceil_div(p.k_group, tile.m) * p.groups

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p, tile, width = problem, tile_of(config), int(config["tile_w"])
        x = source(p, facts.limits, vector=VECTOR)
        lowering = Lowering(p, facts, workspace_limit, x, slices=int(config["splits"]))
        chunks = ceil_div(x.channels, tile.k)
        for phase in phases(p):
            offsets = weight_offsets(p, phase, chunks * tile.k)
            # In the kernel's order: channels of a chunk innermost, chunks outermost.
            ordered = offsets.reshape(phase.taps, chunks, tile.k).transpose(1, 0, 2)
            packed = pack(lowering, tile, phase.taps * chunks, ordered)
            shifts = lowering.tables.add(_shifts(phase, _halo_columns(phase, width)))
            lowering.passes.append(self._pass(lowering, tile, width, phase, packed, shifts))
        return lowering.plan(self.name, config)

    @staticmethod
    def _pass(
        lowering: Lowering, tile: Tile, width: int, phase: Phase, packed: Region, shifts: Region
    ) -> Pass:
        p, x, splits = lowering.problem, lowering.source, lowering.slices
        m_tiles = ceil_div(p.k_group, tile.m)
        p_tiles, tiles_h, tiles_w = _p_tiles(p, phase, tile, width)
        buffers = 2 if x.channels > tile.k else 1
        shader = Shader.of(
            "halo_mma",
            p.dtype,
            **tile.constants() | {"STAGES": _stages(tile, phase, buffers)},
            RESIDENT=tile.stages == RESIDENT,
            TILE_W=width,
            HALO_PIXELS=_halo_pixels(p, phase, tile, width),
            HALO_BUFFERS=buffers,
            CHANNELS_LAST=p.layout == "NHWC",
            OUT_VECTOR=out_vector(p, rectangles=width > 0),
            SPLIT=lowering.split,
            SHARED_BYTES=_shared_bytes(tile, p, width),
            Out="f32" if lowering.split else p.dtype,
        )
        return Pass(
            lowering.ending(shader),
            params(
                **halo_params(lowering, phase),
                images=p.n,
                p_tiles=p_tiles,
                tiles_h=tiles_h,
                tiles_w=tiles_w,
                tap_span_h=span(phase.h),
                image_rows=_image_rows(phase),
                halo_w=_halo_columns(phase, width),
                **output_params(p, phase),
                m_tiles=m_tiles,
                taps=phase.taps,
                chunks=ceil_div(x.channels, tile.k),
                groups=p.groups,
                splits=splits,
                y_elements=lowering.elements,
                **activation_params(p),
            ),
            (
                ("x", x.region),
                ("packed", packed),
                ("shifts", shifts),
                *output_bindings(p, lowering.bias, lowering.target),
            ),
            grid_1d(m_tiles * p_tiles * p.groups * splits, lowering.limits),
        )

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        p, tile = problem, tile_of(config)
        width, splits = int(config["tile_w"]), int(config["splits"])
        channels = align(p.c_group, VECTOR)
        chunks = ceil_div(ceil_div(channels, tile.k), splits)
        phase = max(phases(p), key=lambda phase: phase.taps)
        steps = chunks * phase.taps
        halo = 2 * tile.k * _halo_pixels(p, phase, tile, width)
        seconds = mma_seconds(
            p,
            tile,
            facts,
            products=tile.p * tile.m * tile.k * steps,
            blocks=self._blocks(p, tile, width) * splits,
            step_bytes=2 * tile.m * tile.k + halo // max(phase.taps, 1),
            steps=steps,
        )
        x = source(p, facts.limits, vector=VECTOR)
        memory, launches = overheads(p, facts, x, slices=splits)
        return max(seconds, memory) + launches


# ---- the geometry of halos ----


def refuse_one_tap(problem: ConvProblem) -> str | None:
    """Why a halo would gain nothing; None where it does."""
    if problem.r * problem.s > 1:
        return None
    return "shares input elements between taps, got a kernel of one tap (1 x 1)"


def halo_params(lowering: Lowering, phase: Phase) -> dict[str, int]:
    """What the kernels that stage halos are told of a phase's pixels and their inputs."""
    p, x = lowering.problem, lowering.source
    return {
        "q_h": phase.h.count,
        "q_w": phase.w.count,
        "in_h": p.h,
        "in_w": p.w,
        "in_stride_h": phase.h.in_stride,
        "in_stride_w": phase.w.in_stride,
        "first_h": first_offset(phase.h),
        "first_w": first_offset(phase.w),
        "x_g": x.x_g,
        "x_n": x.strides.x_n,
        "x_h": x.strides.x_h,
        "x_w": x.strides.x_w,
        "channels": x.channels,
    }


def first_offset(axis: Axis) -> int:
    return min((tap.offset for tap in axis.taps), default=0)


def span(axis: Axis) -> int:
    """Input pixels from the first tap of a pixel to its last, both included."""
    return max((tap.offset for tap in axis.taps), default=0) - first_offset(axis) + 1


def _image_rows(phase: Phase) -> int:
    return (phase.h.count - 1) * phase.h.in_stride + span(phase.h)


def _halo_columns(phase: Phase, width: int) -> int:
    return ((width or phase.w.count) - 1) * phase.w.in_stride + span(phase.w)


@lru_cache(maxsize=4096)
def _halo_pixels(p: ConvProblem, phase: Phase, tile: Tile, width: int) -> int:
    """Of the largest halo of any block."""
    if width:
        rows = (tile.p // width - 1) * phase.h.in_stride + span(phase.h)
    else:
        pixels = p.n * phase.pixels
        first = np.arange(0, pixels, tile.p)
        last = np.minimum(first + tile.p, pixels) - 1
        ends = [
            pixel // phase.pixels * _image_rows(phase)
            + pixel % phase.pixels // phase.w.count * phase.h.in_stride
            for pixel in (first, last)
        ]
        rows = int((ends[1] - ends[0]).max()) + span(phase.h)
    return rows * _halo_columns(phase, width)


def _p_tiles(p: ConvProblem, phase: Phase, tile: Tile, width: int) -> tuple[int, int, int]:
    """Tiles of pixels in all, and down and across one image where they are rectangles."""
    if not width:
        return ceil_div(p.n * phase.pixels, tile.p), 1, 1
    down, across = ceil_div(phase.h.count, tile.p // width), ceil_div(phase.w.count, width)
    return p.n * down * across, down, across


def _stages(tile: Tile, phase: Phase, buffers: int) -> int:
    if tile.stages == RESIDENT:
        return max(phase.taps, 1)
    # The next halo must have come by the time that its first step begins.
    return tile.stages if buffers == 1 else max(min(tile.stages, phase.taps + 1), 2)


def _shared_bytes(tile: Tile, p: ConvProblem, width: int) -> int:
    halo = max(_halo_pixels(p, phase, tile, width) for phase in phases(p))
    buffers = 2 if align(p.c_group, VECTOR) > tile.k else 1
    stages = max(_stages(tile, phase, buffers) for phase in phases(p))
    copied = buffers * align(2 * tile.k * halo, 128) + 2 * tile.k * tile.m * stages
    staged = tile.staged_bytes(2, channels_last=p.layout == "NHWC")
    return max(copied, staged) + 4 * tile.p + 4 * halo


def _shifts(phase: Phase, columns: int) -> bytes:
    """Pixels of the halo from the first tap's to each other one's."""
    h = np.array([tap.offset for tap in phase.h.taps], np.int64) - first_offset(phase.h)
    w = np.array([tap.offset for tap in phase.w.taps], np.int64) - first_offset(phase.w)
    shifts = (h[:, None] * columns + w[None, :]).ravel()
    return (shifts if shifts.size else np.zeros(1)).astype("<i4").tobytes()
