"""Implicit GEMM on tensor cores: the columns matrix is gathered by asynchronous copies.

The pipeline of copies and the permuted shared memory follow CUTLASS's multistage kernels; the
gather with masks is cuDNN's idea (Chetlur et al. 2014, arXiv:1410.0759).
"""

from __future__ import annotations

from ....algorithms.base import activation_params, bias_region, params
from ....algorithms.phases import Phase, phases
from ....errors import AlgorithmRefusedError
from ....facts import Facts
from ....plan import Config, Pass, Plan, Region, Shader, Tables, align, ceil_div, grid_1d
from ....problem import ConvProblem
from .base import CudaAlgorithm, output_bindings
from .gather import gather_params, output_params, refuse_gather
from .mma import (
    Source,
    Tile,
    mma_seconds,
    out_vector,
    pack_pass,
    packed_bytes,
    reduce_pass,
    refuse_turing,
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
LEAST_STEPS = 4
"""Steps over k below which another split does not pay."""


class ImplicitGemmMma(CudaAlgorithm):
    name = "implicit_gemm_mma"
    summary = "tensor-core GEMM that gathers its columns by asynchronous copies; f16, bf16, TF32"
    tf32 = True
    ops = ("conv2d", "conv_transpose2d")
    shaders = ("implicit_gemm_mma", "pack_filters", "to_channels_last", "reduce_splits")

    def refuse(self, problem: ConvProblem, facts: Facts) -> str | None:
        if problem.arithmetic == "f32":
            return (
                "multiplies f16 and bf16 on tensor cores, and f32 where the precision 'tf32' is "
                "allowed, got f32"
            )
        return refuse_turing(problem, facts) or refuse_gather(problem)

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        p = problem
        pixels = p.n * max(phase.pixels for phase in phases(p))
        fitting = [t for t in tiles(p) if _shared_bytes(t, p) <= facts.limits.max_workgroup_storage]
        useful = [t for t in fitting if t.m < 2 * max(p.k_group, 16) and t.p < 2 * max(pixels, 64)]
        configs: list[Config] = []
        for tile in useful or fitting[-1:]:
            steps = _most_steps(p, tile)
            blocks = self._blocks(p, tile)
            most = min(steps // LEAST_STEPS, 32)
            wanted = {min(round(fill * facts.cores / blocks), most) for fill in FILLS}
            configs += [
                tile_config(tile) | {"splits": splits}
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
        limits, tile, splits = facts.limits, tile_of(config), int(config["splits"])
        tables = Tables(limits)
        bias = bias_region(p, tables)
        x = source(p, limits, vector=vector_of(p))
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
        prepare: list[Pass] = []
        passes = list(x.passes)
        prepared = 0
        for phase in phases(p):
            steps = ceil_div(phase.taps * x.channels, tile.k)
            offsets = weight_offsets(p, phase, x.channels).astype("<i4").ravel()
            table = bytearray(b"\xff" * (4 * steps * tile.k))
            table[: offsets.nbytes] = offsets.tobytes()
            size = packed_bytes(p, tile, steps)
            packed = Region("prepared", prepared, size)
            prepared = align(prepared + size, limits.storage_alignment)
            if steps:
                region = tables.add(bytes(table))
                prepare.append(pack_pass(p, tile, steps, region, packed, limits))
            # The kernel reads the taps of one step ahead, so one more step than there is.
            copies = (steps + 1) * tile.k // x.vector
            taps = tables.add(tap_copies(phase, x.strides, x.channels, x.vector, copies))
            passes.append(
                self._pass(
                    p, config, tile, phase, x, steps, elements, packed, taps, bias, target, facts
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

    def _pass(
        self,
        p: ConvProblem,
        config: Config,
        tile: Tile,
        phase: Phase,
        x: Source,
        steps: int,
        elements: int,
        packed: Region,
        taps: Region,
        bias: Region,
        target: Region,
        facts: Facts,
    ) -> Pass:
        splits, s = int(config["splits"]), x.strides
        m_tiles = ceil_div(p.k_group, tile.m)
        p_tiles = ceil_div(p.n * phase.pixels, tile.p)
        shader = Shader.of(
            "implicit_gemm_mma",
            p.dtype,
            **tile.constants(),
            VECTOR=x.vector,
            CHANNELS_LAST=p.layout == "NHWC",
            OUT_VECTOR=out_vector(p),
            SPLIT=splits > 1,
            SHARED_BYTES=_shared_bytes(tile, p),
            Out="f32" if splits > 1 else p.dtype,
        )
        return Pass(
            shader if splits > 1 else shader.ending_as(p),
            params(
                **gather_params(p, phase),
                x_g=x.x_g,
                x_n=s.x_n,
                x_h=s.x_h,
                x_w=s.x_w,
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
                ("x", x.region),
                ("packed", packed),
                ("taps", taps),
                *output_bindings(p, bias, target),
            ),
            grid_1d(m_tiles * p_tiles * p.groups * splits, facts.limits),
        )

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        p, tile, splits = problem, tile_of(config), int(config["splits"])
        steps = ceil_div(_most_steps(p, tile), splits)
        seconds = mma_seconds(
            p,
            tile,
            facts,
            products=tile.p * tile.m * tile.k * steps * p.itemsize // 2,  # TF32 at half the rate
            blocks=self._blocks(p, tile) * splits,
            step_bytes=p.itemsize * (tile.p + tile.m) * tile.k,
            steps=steps,
        )
        x = source(p, facts.limits, vector=vector_of(p))
        partial = 2 * splits * 4 * p.out_bytes // p.itemsize if splits > 1 else 0
        traffic = p.input_bytes + p.residual_bytes + p.out_bytes
        traffic += 3 * p.weight_bytes + 2 * x.nbytes + partial
        launches = len(phases(p)) * 2 + len(x.passes) + (splits > 1)
        return max(seconds, traffic / facts.bandwidth) + launches * facts.launch


def tiles(p: ConvProblem) -> tuple[Tile, ...]:
    return TILES if p.itemsize == 2 else tuple(t._replace(k=t.k // 2) for t in TILES)


def _most_steps(p: ConvProblem, tile: Tile) -> int:
    channels = align(p.c_group, vector_of(p))
    return max(ceil_div(phase.taps * channels, tile.k) for phase in phases(p))


def _shared_bytes(tile: Tile, p: ConvProblem) -> int:
    staged = tile.staged_bytes(p.itemsize, channels_last=p.layout == "NHWC")
    return max(tile.stages * p.itemsize * tile.k * (tile.p + tile.m), staged) + 4 * tile.p
