"""Implicit GEMM in plain float32: the columns matrix is gathered by asynchronous copies."""

from __future__ import annotations

from typing import NamedTuple

from ....algorithms.base import activation_params, bias_region, params, roofline, strides
from ....algorithms.phases import phases, tap_table
from ....errors import AlgorithmRefusedError
from ....facts import Facts
from ....plan import Config, Pass, Plan, Region, Shader, Tables, align, ceil_div, grid_1d
from ....problem import ConvProblem
from .base import CudaAlgorithm, output_bindings
from .gather import gather_params, output_params, refuse_gather
from .mma import reduce_pass


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
LEAST_STEPS = 4
"""Steps over k below which another split does not pay."""


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
            blocks = self._blocks(p, tile)
            most = min(ceil_div(p.reduction, tile.k) // LEAST_STEPS, 32)
            filling = facts.cores * 128 / tile.threads
            wanted = {min(round(fill * filling / blocks), most) for fill in FILLS}
            config: Config = {
                "tile_m": tile.m,
                "tile_p": tile.p,
                "tile_k": tile.k,
                "stages": tile.stages,
            }
            configs += [
                config | {"splits": splits}
                for splits in sorted({splits for splits in wanted if splits > 1} | {1})
            ]
        return configs

    @staticmethod
    def _blocks(p: ConvProblem, tile: Tile) -> int:
        per_phase = sum(ceil_div(p.n * phase.pixels, tile.p) for phase in phases(p))
        return per_phase * ceil_div(p.k_group, tile.m) * p.groups

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p = problem
        limits, tile, x = facts.limits, _tile_of(config), strides(p)
        splits = int(config["splits"])
        tables = Tables(limits)
        bias = bias_region(p, tables)
        elements = p.out_bytes // p.itemsize
        workspace = 4 * elements * splits if splits > 1 else 0
        if workspace > workspace_limit:
            raise AlgorithmRefusedError(
                f"needs {workspace} bytes for the partial sums of {splits} splits, may have "
                f"{workspace_limit}"
            )
        target = Region("workspace", 0, workspace) if splits > 1 else Region("out")
        m_tiles = ceil_div(p.k_group, tile.m)
        shader = Shader.of(
            "implicit_gemm",
            TILE_M=tile.m,
            TILE_P=tile.p,
            TILE_K=tile.k,
            STAGES=tile.stages,
            CHANNELS_LAST=p.layout == "NHWC",
            OUT_VECTOR=_out_vector(p),
            SPLIT=splits > 1,
            THREADS=tile.threads,
            BLOCKS=max(512 // tile.threads, 1),
            SHARED_BYTES=tile.shared_bytes,
        )
        if splits == 1:
            shader = shader.ending_as(p)
        prepare: list[Pass] = []
        passes: list[Pass] = []
        prepared = 0
        for phase in phases(p):
            reduction = p.c_group * phase.taps
            steps = ceil_div(reduction, tile.k)
            # The kernel reads the taps of one step ahead, so one more step than there is.
            block = 1 if p.layout == "NCHW" else p.c_group
            table = tap_table(p, phase, x, (steps + 1) * tile.k, block=block)
            taps = tables.add(table)
            size = 4 * max(p.groups * m_tiles * tile.m * steps * tile.k, 4)
            packed = Region("prepared", prepared, size)
            prepared = align(prepared + size, limits.storage_alignment)
            if steps:
                prepare.append(self._pack(p, tile, reduction, steps, taps, packed, facts))
            p_tiles = ceil_div(p.n * phase.pixels, tile.p)
            passes.append(
                Pass(
                    shader,
                    params(
                        **gather_params(p, phase),
                        x_g=p.c_group * x.x_c,
                        x_n=x.x_n,
                        x_h=x.x_h,
                        x_w=x.x_w,
                        **output_params(p, phase),
                        m_tiles=m_tiles,
                        p_tiles=p_tiles,
                        groups=p.groups,
                        k_steps=steps,
                        splits=splits,
                        y_elements=elements,
                        **activation_params(p),
                    ),
                    (
                        ("x", Region("input")),
                        ("packed", packed),
                        ("taps", taps),
                        *output_bindings(p, bias, target),
                    ),
                    grid_1d(m_tiles * p_tiles * p.groups * splits, limits),
                )
            )
        if splits > 1:
            passes.append(reduce_pass(p, splits, target, bias, limits))
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
    def _pack(
        p: ConvProblem,
        tile: Tile,
        reduction: int,
        steps: int,
        taps: Region,
        packed: Region,
        facts: Facts,
    ) -> Pass:
        m_tiles = ceil_div(p.k_group, tile.m)
        return Pass(
            Shader.of("pack_columns", p.dtype, TILE_M=tile.m),
            params(
                m=p.k_group,
                m_tiles=m_tiles,
                reduction=reduction,
                k_padded=steps * tile.k,
                groups=p.groups,
                w_g=p.weight_bytes // p.itemsize // p.groups,
                w_m=p.r * p.s if p.transposed else p.reduction,
            ),
            (("weight", Region("weight")), ("taps", taps), ("packed", packed)),
            grid_1d(ceil_div(p.groups * m_tiles * tile.m * steps * tile.k, 128), facts.limits),
        )

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        p, tile, splits = problem, _tile_of(config), int(config["splits"])
        steps = ceil_div(p.reduction, tile.k)
        blocks = self._blocks(p, tile) * splits
        pixels = p.n * max(phase.pixels for phase in phases(p))
        rows, columns = ceil_div(p.k_group, tile.m) * tile.m, ceil_div(pixels, tile.p) * tile.p
        partial = 2 * splits * p.out_bytes if splits > 1 else 0
        return roofline(
            p,
            facts,
            efficiency=0.8 * tile.m * tile.p / (tile.m * tile.p + 2048) * steps / (steps + splits),
            waste=rows * columns / (p.k_group * pixels),
            workgroups=ceil_div(blocks * tile.threads, 512),
            extra_bytes=2 * p.weight_bytes + partial,
            dispatches=2 * len(phases(p)) + (splits > 1),
        )


def _tile_of(config: Config) -> Tile:
    return Tile(*(int(config[name]) for name in ("tile_m", "tile_p", "tile_k", "stages")))


def _out_vector(p: ConvProblem) -> int:
    """Elements that one store may take: side by side in the output, and aligned."""
    if p.layout == "NHWC":
        return 4 if p.k_group % 4 == 0 else 1
    return 4 if not p.transposed and p.out_h * p.out_w % 4 == 0 else 1
