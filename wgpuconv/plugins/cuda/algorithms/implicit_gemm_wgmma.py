"""Implicit GEMM on Hopper's warpgroup products, with warps that copy and warps that multiply.

That warpgroups are specialised, pass slots of shared memory through barriers and stay for all tiles
follows CUTLASS's persistent kernels for Hopper and FlashAttention-3 (Shah et al. 2024,
arXiv:2407.08608); the gather is that of implicit_gemm_mma.
"""

from __future__ import annotations

from typing import NamedTuple

from ....algorithms.base import activation_params, bias_region, params
from ....algorithms.phases import Phase, phases
from ....errors import AlgorithmRefusedError
from ....facts import Facts
from ....plan import Config, Pass, Plan, Region, Shader, Tables, align, ceil_div, grid_1d
from ....problem import ConvProblem
from ..facts import HOPPER, cuda_facts
from .base import CudaAlgorithm, output_bindings
from .gather import gather_params, output_params, refuse_gather
from .mma import (
    Source,
    out_vector,
    pack_pass,
    packed_bytes,
    reduce_pass,
    source,
    tap_copies,
    weight_offsets,
)

ROW_BYTES = 128
"""Of a pixel or filter in one step over k: what the swizzle of shared memory permutes."""


class Tile(NamedTuple):
    """A block computes p pixels by m filters, from so many slots of shared memory; a
    multiprocessor has so many blocks."""

    p: int
    m: int
    stages: int
    blocks: int


class Products(NamedTuple):
    """What the packed weight depends on of a tile."""

    m: int
    k: int


TILES = (
    Tile(128, 128, 5, 1),
    Tile(128, 256, 4, 1),
    Tile(256, 128, 4, 1),
    Tile(128, 64, 6, 1),
    Tile(256, 64, 4, 1),
    Tile(128, 64, 3, 2),
)
FILLS = (1, 2)
"""Blocks a multiprocessor that a split sum should make."""
LEAST_STEPS = 4
"""Steps over k below which another split does not pay."""
MOST_CLUSTER = 8
"""Blocks of a cluster, on every GPU that has them."""
MOST_WASTE = 2.0
"""Tiles that compute that many times what the best one does are left out."""


class ImplicitGemmWgmma(CudaAlgorithm):
    name = "implicit_gemm_wgmma"
    summary = "Hopper's warpgroup products, fed by warps that gather columns; f16, bf16, TF32"
    tf32 = True
    ops = ("conv2d", "conv_transpose2d")
    shaders = ("implicit_gemm_wgmma", "pack_filters", "to_channels_last", "reduce_splits")

    def refuse(self, problem: ConvProblem, facts: Facts) -> str | None:
        capability = cuda_facts(facts).capability
        if capability != HOPPER:
            return (
                "needs the instruction wgmma of compute capability 9.0, got "
                f"{capability[0]}.{capability[1]}"
            )
        if problem.arithmetic == "f32":
            return (
                "multiplies f16 and bf16 on tensor cores, and f32 where the precision 'tf32' is "
                "allowed, got f32"
            )
        return refuse_gather(problem)

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        p = problem
        tiles = [
            t
            for t in TILES
            if t.m < 2 * max(p.k_group, 64)
            and _shared_bytes(t, p, split=False) <= facts.limits.max_workgroup_storage
        ]
        computed = {t: self._tiles(p, t) * t.p * t.m for t in tiles}
        configs: list[Config] = []
        for tile in tiles:
            if computed[tile] > MOST_WASTE * min(computed.values()):
                continue
            most = min(_most_steps(p) // LEAST_STEPS, 32)
            cores = facts.cores * tile.blocks
            wanted = {min(fill * cores // self._tiles(p, tile), most) for fill in FILLS}
            several = sorted(splits for splits in wanted if splits > 1)
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

    @staticmethod
    def _tiles(p: ConvProblem, tile: Tile) -> int:
        per_phase = sum(ceil_div(p.n * phase.pixels, tile.p) for phase in phases(p))
        return per_phase * ceil_div(p.k_group, tile.m) * p.groups

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p = problem
        limits, tile, slices = facts.limits, _tile_of(config), _slices(config)
        tables = Tables(limits)
        bias = bias_region(p, tables)
        x = source(p, limits, vector=16 // p.itemsize)
        partial = align(x.nbytes, limits.storage_alignment)
        partial_bytes = 4 * slices * p.out_bytes // p.itemsize if slices > 1 else 0
        workspace = partial + partial_bytes if slices > 1 else x.nbytes
        if workspace > workspace_limit:
            raise AlgorithmRefusedError(
                f"needs {workspace} bytes for the input with its channels last and the partial "
                f"sums of {slices} split(s), may have {workspace_limit}"
            )
        target = Region("workspace", partial, partial_bytes) if slices > 1 else Region("out")
        products = Products(tile.m, ROW_BYTES // p.itemsize)
        block = _channel_block(p, x.channels)
        prepare: list[Pass] = []
        passes = list(x.passes)
        prepared = 0
        for phase in phases(p):
            steps = ceil_div(phase.taps * x.channels, products.k)
            offsets = weight_offsets(p, phase, x.channels, block).astype("<i4").ravel()
            table = bytearray(b"\xff" * (4 * steps * products.k))
            table[: offsets.nbytes] = offsets.tobytes()
            size = packed_bytes(p, products, steps)
            packed = Region("prepared", prepared, size)
            prepared = align(prepared + size, limits.storage_alignment)
            if steps:
                region = tables.add(bytes(table))
                prepare.append(pack_pass(p, products, steps, region, packed, limits, cores=True))
            # The kernel reads the taps of one step ahead, so one more step than there is.
            copies = (steps + 1) * products.k // x.vector
            taps = tables.add(tap_copies(phase, x.strides, x.channels, x.vector, copies, block))
            passes.append(self._pass(p, config, phase, x, steps, packed, taps, bias, target, facts))
        if slices > 1:
            passes.append(reduce_pass(p, slices, target, bias, limits))
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
        config: Config,
        phase: Phase,
        x: Source,
        steps: int,
        packed: Region,
        taps: Region,
        bias: Region,
        target: Region,
        facts: Facts,
    ) -> Pass:
        tile, splits, s = _tile_of(config), int(config["splits"]), x.strides
        cluster, split = int(config["cluster"]), _slices(config) > 1
        m_tiles = ceil_div(p.k_group, tile.m)
        p_tiles = ceil_div(p.n * phase.pixels, tile.p)
        tiles = m_tiles * p_tiles * p.groups * splits
        shader = Shader.of(
            "implicit_gemm_wgmma",
            p.dtype,
            TILE_P=tile.p,
            TILE_M=tile.m,
            STAGES=tile.stages,
            BLOCKS=tile.blocks,
            CACHED=_cached(p, tiles, facts),
            CHANNELS_LAST=p.layout == "NHWC",
            OUT_VECTOR=out_vector(p),
            SPLIT=split,
            CLUSTER=cluster,
            SHARED_BYTES=_shared_bytes(tile, p, split=splits > 1),
            Out="f32" if split else p.dtype,
        )
        return Pass(
            shader if split else shader.ending_as(p),
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
                tiles=tiles,
                k_steps=steps,
                splits=splits,
                y_elements=p.out_bytes // p.itemsize,
                **activation_params(p),
            ),
            (
                ("x", x.region),
                ("packed", packed),
                ("taps", taps),
                *output_bindings(p, bias, target),
            ),
            grid_1d(tiles if cluster > 1 else min(tiles, facts.cores * tile.blocks), facts.limits),
        )

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        p, tile, splits = problem, _tile_of(config), int(config["splits"])
        slices, cluster = _slices(config), int(config["cluster"])
        x = source(p, facts.limits, vector=16 // p.itemsize)
        steps = ceil_div(_most_steps(p), splits)
        tiles = self._tiles(p, tile) * splits
        rounds = ceil_div(tiles, facts.cores * tile.blocks)  # tiles of one block
        # wgmma is faster than the mma.sync that was probed; TF32 runs at half the rate.
        rate = cuda_facts(facts).matrix_flops / 2 / facts.cores * 2 / p.itemsize
        compute = tile.p * tile.m * ROW_BYTES / p.itemsize / rate
        loads = ROW_BYTES * (tile.p + tile.m) / 65e9
        if x.channels * p.itemsize < ROW_BYTES:  # copies of 16 bytes here and there
            loads = max(loads, ROW_BYTES * tile.p / 40e9)
        multiplied = steps * max(compute, loads)
        stored = 2 * facts.latency + p.itemsize * tile.p * min(tile.m, p.k_group) / 50e9
        # Of two blocks, one stores while the other multiplies.
        seconds = rounds * max(multiplied + stored, tile.blocks * multiplied) + 7 * facts.latency
        if cluster > 1:  # each waits for the others, and reads their sums
            seconds += 2 * facts.latency + 4 * tile.p * tile.m / 40e9
        partial = 2 * slices * 4 * p.out_bytes // p.itemsize if slices > 1 else 0
        traffic = p.input_bytes + p.residual_bytes + p.out_bytes
        traffic += 3 * p.weight_bytes + 2 * x.nbytes + partial
        launches = len(phases(p)) * 2 + len(x.passes) + (slices > 1)
        memory = traffic / facts.bandwidth
        # Neither hides the other one quite.
        return max(seconds, memory) + 0.2 * min(seconds, memory) + launches * facts.launch


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


def _most_steps(p: ConvProblem) -> int:
    channels = align(p.c_group, 16 // p.itemsize)
    k = ROW_BYTES // p.itemsize
    return max(ceil_div(phase.taps * channels, k) for phase in phases(p))


def _shared_bytes(tile: Tile, p: ConvProblem, *, split: bool) -> int:
    columns = ROW_BYTES // p.itemsize
    rows = 64 * (columns + 8) if p.layout == "NHWC" else columns * (64 + 16 // p.itemsize)
    stored = 0 if split else 2 * p.itemsize * rows
    return (
        tile.stages * ROW_BYTES * (tile.p + tile.m) + stored + (4 + 16) * tile.p + 16 * tile.stages
    )
