"""Convolution on Hopper's warpgroup products, with the input's tile staged once for all taps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ....algorithms.base import activation_params, bias_region, params
from ....algorithms.phases import MOST_PHASES, Phase, count_phases, phases
from ....errors import AlgorithmRefusedError
from ....facts import Facts
from ....plan import Config, Pass, Plan, Region, Shader, Tables, align, ceil_div, grid_1d
from ....problem import ConvProblem
from ..facts import HOPPER, cuda_facts
from .base import CudaAlgorithm, output_bindings
from .gather import output_params
from .halo_mma import first_offset, span
from .mma import Source, out_vector, pack_pass, packed_bytes, source, weight_offsets

VECTOR = 8


class Tile(NamedTuple):
    """A block computes h x w pixels by m filters; a warpgroup that many squares of 8 x 8."""

    h: int
    w: int
    m: int
    k: int
    squares: int
    stages: int

    @property
    def p(self) -> int:
        return self.h * self.w

    @property
    def threads(self) -> int:
        return self.p // 64 // self.squares * 128

    @property
    def blocks(self) -> int:
        """Blocks of a multiprocessor that leave each thread the registers that it needs."""
        registers = self.squares * self.m // 2 + 64
        return max(65536 // (align(registers, 8) * self.threads), 1)


TILES = (
    Tile(16, 16, 128, 64, 2, 4),
    Tile(16, 8, 128, 64, 2, 4),
    Tile(16, 16, 128, 32, 2, 4),
    Tile(16, 16, 64, 64, 4, 4),
    Tile(16, 16, 64, 64, 2, 4),
    Tile(16, 16, 64, 32, 4, 4),
    Tile(32, 16, 64, 64, 4, 4),
    Tile(16, 8, 64, 64, 2, 4),
    Tile(16, 8, 64, 32, 2, 4),
    Tile(8, 8, 128, 64, 1, 4),
    Tile(8, 8, 64, 64, 1, 4),
)
FILLS = (1, 2)
"""Blocks a multiprocessor that a split sum should make."""
MOST_WASTE = 1.6
"""Tiles that compute that many times what the best one does are left out."""


class HaloWgmma(CudaAlgorithm):
    name = "halo_wgmma"
    summary = "Hopper's warpgroup products from an input tile staged once for all taps; f16, bf16"
    ops = ("conv2d", "conv_transpose2d")
    shaders = ("halo_wgmma", "pack_filters", "to_channels_last", "reduce_splits")

    def refuse(self, problem: ConvProblem, facts: Facts) -> str | None:
        p, capability = problem, cuda_facts(facts).capability
        if capability != HOPPER:
            return (
                "needs the instruction wgmma of compute capability 9.0, got "
                f"{capability[0]}.{capability[1]}"
            )
        if p.itemsize != 2:
            return f"multiplies f16 and bf16 on tensor cores, got {p.dtype}"
        if p.r * p.s == 1:
            return "shares input elements between taps, got a kernel of one tap (1 x 1)"
        count = count_phases(p)
        if count > MOST_PHASES:
            return (
                f"needs at most {MOST_PHASES} phases of the stride, each of which is a launch, "
                f"got {count} (stride {p.stride[0]},{p.stride[1]})"
            )
        if not self.configs(p, facts):
            least = min(_shared_bytes(t, p) for t in TILES)
            return (
                f"needs {least} bytes of shared memory for the input of one tile (kernel {p.r} x "
                f"{p.s}, dilation {p.dilation[0]},{p.dilation[1]}), may have "
                f"{facts.limits.max_workgroup_storage}; or fewer channels than {p.c_group}, since "
                "a phase of the stride has too few taps to hide the copy of the next ones"
            )
        return None

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        p = problem
        channels = align(p.c_group, VECTOR)
        tiles = [
            t
            for t in TILES
            if t.m < 2 * max(p.k_group, 64)
            and t.k < 2 * max(channels, 32)
            and _shared_bytes(t, p) <= facts.limits.max_workgroup_storage
            and (channels <= t.k or all(phase.taps >= t.stages - 1 for phase in phases(p)))
        ]
        if not tiles:
            return []
        computed = {t: self._blocks(p, t) * t.p * t.m for t in tiles}
        configs: list[Config] = []
        for tile in tiles:
            if computed[tile] > MOST_WASTE * min(computed.values()):
                continue
            blocks = self._blocks(p, tile)
            most = min(ceil_div(channels, tile.k), 16)
            wanted = {min(round(fill * facts.cores / blocks), most) for fill in FILLS}
            configs += [
                _tile_config(tile) | {"splits": splits}
                for splits in sorted({splits for splits in wanted if splits > 1} | {1})
            ]
        return configs

    @staticmethod
    def _blocks(p: ConvProblem, tile: Tile) -> int:
        squares = sum(
            ceil_div(phase.h.count, tile.h) * ceil_div(phase.w.count, tile.w) for phase in phases(p)
        )
        return p.n * squares * ceil_div(p.k_group, tile.m) * p.groups

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p = problem
        limits, tile, splits = facts.limits, _tile_of(config), int(config["splits"])
        tables = Tables(limits)
        bias = bias_region(p, tables)
        x = source(p, limits, vector=VECTOR)
        elements = p.out_bytes // p.itemsize
        partial = align(x.nbytes, limits.storage_alignment)
        workspace = partial + 4 * elements * splits if splits > 1 else x.nbytes
        if workspace > workspace_limit:
            raise AlgorithmRefusedError(
                f"needs {workspace} bytes for the input with its channels last and the partial "
                f"sums of {splits} split(s), may have {workspace_limit}"
            )
        target = (
            Region("workspace", partial, 4 * elements * splits) if splits > 1 else Region("out")
        )
        chunks = ceil_div(x.channels, tile.k)
        prepare: list[Pass] = []
        passes = list(x.passes)
        prepared = 0
        for phase in phases(p):
            steps = phase.taps * chunks
            size = packed_bytes(p, tile, steps)
            packed = Region("prepared", prepared, size)
            prepared = align(prepared + size, limits.storage_alignment)
            if steps:
                offsets = weight_offsets(p, phase, chunks * tile.k)
                # In the kernel's order: channels of a chunk innermost, chunks outermost.
                ordered = offsets.reshape(phase.taps, chunks, tile.k).transpose(1, 0, 2)
                region = tables.add(ordered.astype("<i4").tobytes())
                prepare.append(pack_pass(p, tile, steps, region, packed, limits, cores=True))
            shifts = tables.add(_shifts(phase, tile))
            passes.append(
                self._pass(p, tile, splits, phase, x, packed, shifts, bias, target, facts)
            )
        if splits > 1:
            passes.append(
                Pass(
                    Shader.of("reduce_splits", p.dtype).ending_as(p),
                    params(
                        elements=elements,
                        splits=splits,
                        k=p.k,
                        y_k=x.strides.y_k,
                        **activation_params(p),
                    ),
                    (("partial", target), *output_bindings(p, bias, Region("out"))),
                    grid_1d(ceil_div(elements, 256), limits),
                )
            )
        return Plan(
            p,
            self.name,
            config,
            tuple(passes),
            prepare=tuple(prepare),
            workspace=workspace,
            prepared=prepared,
            tables=tables.blob(),
        )

    @staticmethod
    def _pass(
        p: ConvProblem,
        tile: Tile,
        splits: int,
        phase: Phase,
        x: Source,
        packed: Region,
        shifts: Region,
        bias: Region,
        target: Region,
        facts: Facts,
    ) -> Pass:
        s = x.strides
        m_tiles = ceil_div(p.k_group, tile.m)
        tiles_h, tiles_w = ceil_div(phase.h.count, tile.h), ceil_div(phase.w.count, tile.w)
        halo_h, halo_w, sorted_w = _halo(phase, tile)
        shader = Shader.of(
            "halo_wgmma",
            p.dtype,
            TILE_H=tile.h,
            TILE_W=tile.w,
            TILE_M=tile.m,
            TILE_K=tile.k,
            SQUARES=tile.squares,
            STAGES=tile.stages,
            THREADS=tile.threads,
            BLOCKS=tile.blocks,
            PLANE_PIXELS=_plane_pixels(phase, tile),
            HALO_BUFFERS=2 if x.channels > tile.k else 1,
            CHANNELS_LAST=p.layout == "NHWC",
            OUT_VECTOR=out_vector(p, rectangles=True),
            SPLIT=splits > 1,
            SHARED_BYTES=_shared_bytes(tile, p),
            Out="f32" if splits > 1 else p.dtype,
        )
        return Pass(
            shader if splits > 1 else shader.ending_as(p),
            params(
                images=p.n,
                q_h=phase.h.count,
                q_w=phase.w.count,
                tiles_h=tiles_h,
                tiles_w=tiles_w,
                in_h=p.h,
                in_w=p.w,
                in_stride_h=phase.h.in_stride,
                in_stride_w=phase.w.in_stride,
                first_h=first_offset(phase.h),
                first_w=first_offset(phase.w),
                halo_h=halo_h,
                halo_w=halo_w,
                sorted_w=sorted_w,
                x_g=x.x_g,
                x_n=s.x_n,
                x_h=s.x_h,
                x_w=s.x_w,
                channels=x.channels,
                **output_params(p, phase),
                m_tiles=m_tiles,
                taps=phase.taps,
                chunks=ceil_div(x.channels, tile.k),
                groups=p.groups,
                splits=splits,
                y_elements=p.out_bytes // p.itemsize,
                **activation_params(p),
            ),
            (
                ("x", x.region),
                ("packed", packed),
                ("shifts", shifts),
                *output_bindings(p, bias, target),
            ),
            grid_1d(m_tiles * tiles_h * tiles_w * p.n * p.groups * splits, facts.limits),
        )

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        p, tile, splits = problem, _tile_of(config), int(config["splits"])
        x = source(p, facts.limits, vector=VECTOR)
        phase = max(phases(p), key=lambda phase: phase.taps)
        steps = ceil_div(ceil_div(x.channels, tile.k), splits) * phase.taps
        blocks = self._blocks(p, tile) * splits
        resident = min(tile.blocks, 228 * 1024 // (_shared_bytes(tile, p) + 1024))
        in_flight = max(min(blocks / facts.cores, resident), 1.0)
        # wgmma is about 1.6 times as fast as mma.sync.
        rate = 1.6 * cuda_facts(facts).matrix_flops / 2 / facts.cores
        groups = in_flight * tile.threads / 128
        rate *= 0.8 * groups * tile.squares / (groups * tile.squares + 1)
        compute = in_flight * steps * tile.p * tile.m * tile.k / rate
        halo = 2 * tile.k * _plane_pixels(phase, tile) // phase.taps
        loads = in_flight * steps * (2 * tile.m * tile.k + halo) / 40e9
        waves = ceil_div(blocks, facts.cores * resident)
        seconds = waves * (max(compute, loads) + 5 * facts.latency)
        partial = 2 * splits * 4 * p.out_bytes // p.itemsize if splits > 1 else 0
        traffic = p.input_bytes + p.out_bytes + 3 * p.weight_bytes + 2 * x.nbytes + partial
        launches = len(phases(p)) * 2 + len(x.passes) + (splits > 1)
        return max(seconds, traffic / facts.bandwidth) + launches * facts.launch


def _tile_config(tile: Tile) -> Config:
    return {
        "tile_h": tile.h,
        "tile_w": tile.w,
        "tile_m": tile.m,
        "tile_k": tile.k,
        "squares": tile.squares,
        "stages": tile.stages,
    }


def _tile_of(config: Config) -> Tile:
    names = ("tile_h", "tile_w", "tile_m", "tile_k", "squares", "stages")
    return Tile(*(int(config[name]) for name in names))


def _halo(phase: Phase, tile: Tile) -> tuple[int, int, int]:
    """Rows and columns of the halo, and columns of the same remainder by the stride."""
    rows = (tile.h - 1) * phase.h.in_stride + span(phase.h)
    same = tile.w + (span(phase.w) - 1) // phase.w.in_stride
    return rows, same * phase.w.in_stride, same


def _plane_pixels(phase: Phase, tile: Tile) -> int:
    """Pixels of the halo, and as many more as spread the planes over the banks."""
    rows, columns, _ = _halo(phase, tile)
    return rows * columns + (4 - rows * columns) % 8


def _shared_bytes(tile: Tile, p: ConvProblem) -> int:
    plane = max(_plane_pixels(phase, tile) for phase in phases(p))
    buffers = 2 if align(p.c_group, VECTOR) > tile.k else 1
    copied = 2 * tile.k * (buffers * plane + tile.m * tile.stages)
    rows, columns = (tile.p, tile.m) if p.layout == "NHWC" else (tile.m, tile.p)
    return max(copied, 2 * rows * (columns + 8)) + 4 * (tile.p + plane)


def _shifts(phase: Phase, tile: Tile) -> bytes:
    """Pixels of the halo from the first tap's to each other one's."""
    _, columns, same = _halo(phase, tile)
    h = np.array([tap.offset for tap in phase.h.taps], np.int64) - first_offset(phase.h)
    w = np.array([tap.offset for tap in phase.w.taps], np.int64) - first_offset(phase.w)
    across = w % phase.w.in_stride * same + w // phase.w.in_stride
    shifts = (h[:, None] * columns + across[None, :]).ravel()
    return (shifts if shifts.size else np.zeros(1)).astype("<i4").tobytes()
