"""Implicit GEMM in plain float32: the columns matrix is gathered by asynchronous copies."""

from __future__ import annotations

from typing import NamedTuple

from ....algorithms.base import params, roofline, weight_strides
from ....algorithms.phases import Phase, phases, refuse_gather, tap_table
from ....facts import Facts
from ....plan import Config, Pass, Plan, Region, Shader, ceil_div, grid_1d
from ....problem import ConvProblem
from .base import CudaAlgorithm
from .gather import count_tiles, most_splits, phase_tiles, product_bindings, product_params
from .lowering import Lowering, caller_input, partial_bytes, split_counts


class Tile(NamedTuple):
    """A block computes m filters by p pixels, k products a step."""

    m: int
    p: int
    k: int
    stages: int

    @property
    def threads(self) -> int:
        return self.m * self.p // 64

    @property
    def shared_bytes(self) -> int:
        return 4 * (self.stages * self.k * (self.m + self.p + 8) + self.p)


TILES = (
    Tile(128, 128, 16, 3),
    Tile(128, 128, 8, 4),
    Tile(64, 128, 16, 3),
    Tile(128, 64, 16, 3),
    Tile(64, 64, 16, 4),
    Tile(32, 128, 16, 4),
    Tile(64, 256, 16, 3),
)
FILLS = (2, 3, 4)
"""Blocks of 128 threads a multiprocessor that a split sum should make."""


class ImplicitGemm(CudaAlgorithm):
    name = "implicit_gemm"
    summary = "tiled GEMM in float32 that gathers its columns by asynchronous copies"
    ops = ("conv2d", "conv_transpose2d")
    shaders = ("implicit_gemm", "pack_columns", "reduce_splits")

    def refuse(self, problem: ConvProblem, facts: Facts) -> str | None:
        if problem.dtype != "f32":
            return f"computes in f32, got {problem.dtype}"
        return refuse_gather(problem)

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        p = problem
        pixels = p.n * max(phase.pixels for phase in phases(p))
        fitting = [t for t in TILES if t.shared_bytes <= facts.limits.max_workgroup_storage]
        useful = [t for t in fitting if t.m < 2 * max(p.k_group, 32) and t.p < 2 * max(pixels, 64)]
        configs: list[Config] = []
        for tile in useful or fitting[-1:]:
            blocks, most = count_tiles(p, tile), most_splits(ceil_div(p.reduction, tile.k))
            filling = facts.cores * 128 / tile.threads
            wanted = (round(fill * filling / blocks) for fill in FILLS)
            config: Config = {
                "tile_m": tile.m,
                "tile_p": tile.p,
                "tile_k": tile.k,
                "stages": tile.stages,
            }
            configs += [config | {"splits": splits} for splits in split_counts(wanted, most)]
        return configs

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p, tile = problem, _tile_of(config)
        x = caller_input(p)
        lowering = Lowering(p, facts, workspace_limit, x, slices=int(config["splits"]))
        for phase in phases(p):
            steps = ceil_div(p.c_group * phase.taps, tile.k)
            # The kernel reads the taps of one step ahead, so one more step than there is.
            block = 1 if p.layout == "NCHW" else p.c_group
            table = tap_table(p, phase, x.strides, (steps + 1) * tile.k, block=block)
            taps = lowering.tables.add(table)
            packed = self._pack(lowering, tile, phase, steps, taps)
            lowering.passes.append(self._pass(lowering, tile, phase, steps, packed, taps))
        return lowering.plan(self.name, config)

    @staticmethod
    def _pack(lowering: Lowering, tile: Tile, phase: Phase, steps: int, taps: Region) -> Region:
        """Where the packed weight will lie; appends the pass that packs it."""
        p = lowering.problem
        w = weight_strides(p)
        m_tiles = ceil_div(p.k_group, tile.m)
        elements = p.groups * m_tiles * tile.m * steps * tile.k
        packed = lowering.prepared(4 * max(elements, 4))
        step = Pass(
            Shader.of("pack_columns", p.dtype, TILE_M=tile.m),
            params(
                m=p.k_group,
                m_tiles=m_tiles,
                reduction=p.c_group * phase.taps,
                k_padded=steps * tile.k,
                groups=p.groups,
                w_g=w.w_g,
                w_m=w.w_k,
            ),
            (("weight", Region("weight")), ("taps", taps), ("packed", packed)),
            grid_1d(ceil_div(elements, 128), lowering.limits),
        )
        if steps:
            lowering.prepare.append(step)
        return packed

    @staticmethod
    def _pass(
        lowering: Lowering, tile: Tile, phase: Phase, steps: int, packed: Region, taps: Region
    ) -> Pass:
        p, splits = lowering.problem, lowering.slices
        shader = Shader.of(
            "implicit_gemm",
            TILE_M=tile.m,
            TILE_P=tile.p,
            TILE_K=tile.k,
            STAGES=tile.stages,
            CHANNELS_LAST=p.layout == "NHWC",
            OUT_VECTOR=_out_vector(p),
            SPLIT=lowering.split,
            THREADS=tile.threads,
            BLOCKS=max(512 // tile.threads, 1),
            SHARED_BYTES=tile.shared_bytes,
        )
        return Pass(
            lowering.ending(shader),
            params(**product_params(lowering, phase, tile, steps=steps, splits=splits)),
            product_bindings(lowering, packed, taps),
            grid_1d(phase_tiles(p, phase, tile) * splits, lowering.limits),
        )

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        p, tile, splits = problem, _tile_of(config), int(config["splits"])
        steps = ceil_div(p.reduction, tile.k)
        blocks = count_tiles(p, tile) * splits
        pixels = p.n * max(phase.pixels for phase in phases(p))
        rows, columns = ceil_div(p.k_group, tile.m) * tile.m, ceil_div(pixels, tile.p) * tile.p
        return roofline(
            p,
            facts,
            efficiency=0.8 * tile.m * tile.p / (tile.m * tile.p + 2048) * steps / (steps + splits),
            waste=rows * columns / (p.k_group * pixels),
            workgroups=ceil_div(blocks * tile.threads, 512),
            extra_bytes=2 * p.weight_bytes + 2 * partial_bytes(p, splits),
            dispatches=2 * len(phases(p)) + (splits > 1),
        )


def _tile_of(config: Config) -> Tile:
    return Tile(*(int(config[name]) for name in ("tile_m", "tile_p", "tile_k", "stages")))


def _out_vector(p: ConvProblem) -> int:
    """Elements that one store may take: side by side in the output, and aligned."""
    if p.layout == "NHWC":
        return 4 if p.k_group % 4 == 0 else 1
    return 4 if not p.transposed and p.out_h * p.out_w % 4 == 0 else 1
