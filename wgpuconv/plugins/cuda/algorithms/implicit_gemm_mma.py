"""Implicit GEMM on tensor cores: the columns matrix is gathered by asynchronous copies.

The pipeline of copies and the permuted shared memory follow CUTLASS's multistage kernels; the
gather with masks is cuDNN's idea (Chetlur et al. 2014, arXiv:1410.0759).
"""

from __future__ import annotations

from ....algorithms.base import params
from ....algorithms.phases import Phase, phases, refuse_gather
from ....facts import Facts
from ....plan import Config, Pass, Plan, Region, Shader, align, ceil_div, grid_1d
from ....problem import ConvProblem
from .base import CudaAlgorithm
from .gather import count_tiles, most_splits, phase_tiles, product_bindings, product_params
from .lowering import Lowering, split_counts
from .mma import (
    Tile,
    mma_seconds,
    out_vector,
    overheads,
    pack,
    refuse_capability,
    refuse_float32,
    source,
    tap_copies,
    tile_config,
    tile_of,
    vector_of,
    weight_offsets,
)

TILES = (
    Tile(128, 128, 32, 64, 64, 4),
    Tile(128, 128, 64, 64, 64, 3),
    Tile(256, 128, 32, 64, 64, 4),
    Tile(128, 256, 32, 64, 64, 4),
    Tile(256, 64, 32, 64, 64, 3),
    Tile(256, 64, 64, 64, 32, 3),
    Tile(128, 64, 32, 64, 32, 4),
    Tile(128, 64, 64, 64, 32, 3),
    Tile(64, 128, 64, 32, 64, 3),
    Tile(64, 64, 32, 32, 32, 4),
    Tile(64, 64, 64, 32, 32, 4),
    Tile(128, 96, 32, 64, 48, 4),
    Tile(128, 32, 32, 32, 32, 4),
    Tile(256, 32, 32, 64, 32, 4),
    Tile(128, 16, 32, 32, 16, 4),
    Tile(256, 16, 16, 64, 16, 4),
)
"""Of halves; floats, which take twice the bytes, get half the ``k``."""
FILLS = (1, 2, 3)
"""Blocks a multiprocessor that a split sum should make."""


class ImplicitGemmMma(CudaAlgorithm):
    name = "implicit_gemm_mma"
    summary = "tensor-core GEMM that gathers its columns by asynchronous copies; f16, bf16, TF32"
    tf32 = True
    ops = ("conv2d", "conv_transpose2d")
    shaders = ("implicit_gemm_mma", "pack_filters", "to_channels_last", "reduce_splits")

    def refuse(self, problem: ConvProblem, facts: Facts) -> str | None:
        return (
            refuse_float32(problem) or refuse_capability(problem, facts) or refuse_gather(problem)
        )

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        p = problem
        pixels = p.n * max(phase.pixels for phase in phases(p))
        fitting = [t for t in tiles(p) if _shared_bytes(t, p) <= facts.limits.max_workgroup_storage]
        useful = [t for t in fitting if t.m < 2 * max(p.k_group, 16) and t.p < 2 * max(pixels, 64)]
        configs: list[Config] = []
        for tile in useful or fitting[-1:]:
            blocks, most = count_tiles(p, tile), most_splits(_most_steps(p, tile))
            wanted = (round(fill * facts.cores / blocks) for fill in FILLS)
            configs += [
                tile_config(tile) | {"splits": splits} for splits in split_counts(wanted, most)
            ]
        return configs

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p, tile = problem, tile_of(config)
        x = source(p, facts.limits, vector=vector_of(p))
        lowering = Lowering(p, facts, workspace_limit, x, slices=int(config["splits"]))
        for phase in phases(p):
            steps = ceil_div(phase.taps * x.channels, tile.k)
            packed = pack(lowering, tile, steps, weight_offsets(p, phase, x.channels))
            # The kernel reads the taps of one step ahead, so one more step than there is.
            copies = (steps + 1) * tile.k // x.vector
            taps = lowering.tables.add(tap_copies(phase, x, copies))
            lowering.passes.append(self._pass(lowering, tile, phase, steps, packed, taps))
        return lowering.plan(self.name, config)

    @staticmethod
    def _pass(
        lowering: Lowering, tile: Tile, phase: Phase, steps: int, packed: Region, taps: Region
    ) -> Pass:
        p, x, splits = lowering.problem, lowering.source, lowering.slices
        shader = Shader.of(
            "implicit_gemm_mma",
            p.dtype,
            **tile.constants(),
            VECTOR=x.vector,
            CHANNELS_LAST=p.layout == "NHWC",
            OUT_VECTOR=out_vector(p),
            SPLIT=lowering.split,
            SHARED_BYTES=_shared_bytes(tile, p),
            Out="f32" if lowering.split else p.dtype,
        )
        return Pass(
            lowering.ending(shader),
            params(**product_params(lowering, phase, tile, steps=steps, splits=splits)),
            product_bindings(lowering, packed, taps),
            grid_1d(phase_tiles(p, phase, tile) * splits, lowering.limits),
        )

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        p, tile, splits = problem, tile_of(config), int(config["splits"])
        steps = ceil_div(_most_steps(p, tile), splits)
        seconds = mma_seconds(
            p,
            tile,
            facts,
            products=tile.p * tile.m * tile.k * steps * p.itemsize // 2,  # TF32 at half the rate
            blocks=count_tiles(p, tile) * splits,
            step_bytes=p.itemsize * (tile.p + tile.m) * tile.k,
            steps=steps,
        )
        x = source(p, facts.limits, vector=vector_of(p))
        memory, launches = overheads(p, facts, x, slices=splits)
        return max(seconds, memory) + launches


def tiles(p: ConvProblem) -> tuple[Tile, ...]:
    return TILES if p.itemsize == 2 else tuple(t._replace(k=t.k // 2) for t in TILES)


def _most_steps(p: ConvProblem, tile: Tile) -> int:
    channels = align(p.c_group, vector_of(p))
    return max(ceil_div(phase.taps * channels, tile.k) for phase in phases(p))


def _shared_bytes(tile: Tile, p: ConvProblem) -> int:
    staged = tile.staged_bytes(p.itemsize, channels_last=p.layout == "NHWC")
    return max(tile.stages * p.itemsize * tile.k * (tile.p + tile.m), staged) + 4 * tile.p
