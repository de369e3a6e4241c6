"""Implicit GEMM in one dispatch, for small problems.

The weight is read as it lies, and the lanes of a workgroup share the sum over k. CUTLASS calls
this sliced K (https://docs.nvidia.com/cutlass, Efficient GEMM in CUDA), in contrast to split K
across workgroups, which implicit_gemm has.
"""

from __future__ import annotations

from typing import NamedTuple

from ..facts import Facts, Limits
from ..plan import Config, Pass, Plan, Region, Shader, Tables, ceil_div, grid_1d
from ..problem import ConvProblem
from .base import (
    Algorithm,
    activation_params,
    bias_region,
    output_bindings,
    params,
    roofline,
    strides,
)
from .phases import MOST_COLUMNS, MOST_ROWS, gather_params, phases, tap_table

SLICE_K = 8
"""Products of a slice in one step, as in implicit_gemm_sliced.wgsl."""


class Slices(NamedTuple):
    """A workgroup computes m filters by p pixels in that many slices, an invocation tm by tp."""

    m: int
    p: int
    tm: int
    tp: int
    slices: int

    @property
    def workgroup(self) -> int:
        return self.slices * (self.m // self.tm) * (self.p // self.tp)

    @property
    def k(self) -> int:
        """Products of a step."""
        return self.slices * SLICE_K

    @property
    def storage(self) -> int:
        """Bytes of workgroup memory: both staged tiles, and the sums of half of the slices."""
        return 4 * (self.k * (self.m + self.p) + self.slices // 2 * self.m * self.p)

    def fits(self, limits: Limits) -> bool:
        return (
            self.workgroup <= min(limits.max_invocations, limits.max_workgroup_size)
            and self.storage <= limits.max_workgroup_storage
        )


SLICES = (
    Slices(32, 32, 4, 4, 4),
    Slices(16, 32, 4, 4, 4),
    Slices(32, 16, 4, 4, 4),
    Slices(16, 16, 4, 4, 8),
)
"""Each divides evenly: whole vec4s an invocation for both staged tiles."""


class SlicedK(Algorithm):
    name = "sliced_k"
    summary = "implicit GEMM in one dispatch: lanes share the sum, the weight as it lies"
    ops = ("conv2d",)
    shaders = ("implicit_gemm_sliced",)

    def refuse(self, problem: ConvProblem, facts: Facts) -> str | None:
        p = problem
        if p.r > MOST_ROWS or p.s > MOST_COLUMNS:
            return f"needs at most {MOST_ROWS} x {MOST_COLUMNS} taps, got {p.r} x {p.s}"
        if not self.configs(p, facts):
            least = min(each.storage for each in SLICES)
            return (
                f"needs {least} bytes of workgroup memory, the device has "
                f"{facts.limits.max_workgroup_storage}"
            )
        return None

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        fitting = [each for each in SLICES if each.fits(facts.limits)]
        return [
            {**each._asdict(), "unroll": not facts.software}
            for each in fitting[: 1 if facts.software else None]
        ]

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p, x, tile = problem, strides(problem), _slices(config)
        tables = Tables(facts.limits)
        (phase,) = phases(p)
        steps = ceil_div(p.reduction, tile.k)
        # The kernel reads the taps of one step ahead, so one more step than there is.
        taps = tables.add(tap_table(p, phase, x, (steps + 1) * tile.k, block=1))
        # Rows of k past the end count as taps outside of the input, so they need the check too.
        border = (
            phase.h.crosses_border(p.h) or phase.w.crosses_border(p.w) or p.reduction % tile.k != 0
        )
        m_tiles = ceil_div(p.k_group, tile.m)
        p_tiles = ceil_div(p.n * phase.pixels, tile.p)
        step = Pass(
            Shader.of(
                "implicit_gemm_sliced",
                p.dtype,
                TILE_M=tile.m,
                TILE_P=tile.p,
                SLICES=tile.slices,
                THREAD_M=tile.tm,
                THREAD_P=tile.tp,
                BORDER=border,
                UNROLL_K=bool(config["unroll"]),
            ).ending_as(p),
            params(
                **gather_params(p, phase, x),
                y_g=p.k_group * x.y_k,
                y_n=x.y_n,
                y_m=x.y_k,
                y_h=x.y_h,
                y_w=x.y_w,
                m=p.k_group,
                m_tiles=m_tiles,
                p_tiles=p_tiles,
                groups=p.groups,
                reduction=p.reduction,
                **activation_params(p),
            ),
            (
                ("x", Region("input")),
                ("weight", Region("weight")),
                ("taps", taps),
                *output_bindings(p, bias_region(p, tables)),
            ),
            grid_1d(m_tiles * p_tiles * p.groups, facts.limits),
        )
        return Plan(p, self.name, config, (step,), tables=tables.blob())

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        p, tile = problem, _slices(config)
        pixels = p.n * p.out_h * p.out_w
        m_tiles, p_tiles = ceil_div(p.k_group, tile.m), ceil_div(pixels, tile.p)
        workgroups = m_tiles * p_tiles * p.groups
        # As many workgroups run side by side on a core as 1024 invocations are.
        rounds = ceil_div(workgroups * tile.workgroup, 1024 * facts.cores)
        # Beginning, adding the slices up and storing cost as much as 128 products.
        summed = ceil_div(p.reduction, tile.k) * tile.k + 128
        step = 4 * facts.latency + SLICE_K * tile.tm * tile.tp * facts.cycle
        work = roofline(
            p,
            facts,
            efficiency=0.4,
            waste=m_tiles * tile.m * p_tiles * tile.p / (p.k_group * pixels) * summed / p.reduction,
            span=rounds * (ceil_div(p.reduction, tile.k) + 2) * step,
        )
        # What small tiles load again and again comes from a cache, twice as fast as memory.
        loaded = workgroups * (tile.m + tile.p) * p.reduction * p.itemsize
        return work + 0.5 * loaded / facts.bandwidth


def _slices(config: Config) -> Slices:
    return Slices(*(int(config[name]) for name in Slices._fields))
