"""Implicit GEMM: the columns matrix is gathered tile by tile and never stored.

The idea is cuDNN's (Chetlur et al. 2014, arXiv:1410.0759); splitting the sum over k follows
CUTLASS's split-K.
"""

from __future__ import annotations

from ..errors import AlgorithmRefusedError
from ..facts import Facts
from ..plan import Config, Pass, Plan, Region, Shader, Tables, align, ceil_div, grid_1d
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
from .phases import (
    Phase,
    gather_params,
    phases,
    refuse_gather,
    tap_table,
)
from .tiles import (
    gemm_shader,
    pack_pass,
    packed_elements,
    tile_configs,
    tile_efficiency,
    tile_of,
    tile_span,
    tile_waste,
    weight_too_large,
)

FILLS = (2, 3, 4, 6, 8)
"""Workgroups of 128 invocations a core that a split sum should make."""
LEAST_STEPS = 4
"""Steps over k below which another split does not pay."""
CHANNEL_BLOCK = 32
"""Channels of NHWC that lie together in k: 128 bytes of a pixel, read whole before the next tap."""


class ImplicitGemm(Algorithm):
    name = "implicit_gemm"
    summary = "tiled GEMM that gathers its columns as it goes; no columns matrix"
    ops = ("conv2d", "conv_transpose2d")
    shaders = ("implicit_gemm", "implicit_gemm_nhwc", "pack_weights", "reduce_splits")

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        p = problem
        pixels = p.n * max(phase.pixels for phase in phases(p))
        configs = []
        for tiled in tile_configs(
            facts,
            m=p.k_group,
            reduction=p.reduction,
            pixels=pixels,
            groups=p.groups,
            itemsize=p.itemsize,
        ):
            tile = tile_of(tiled)
            workgroups = self._workgroups(p, tile.m, tile.p)
            filling = facts.cores * 128 / tile.workgroup
            most = ceil_div(p.reduction, tile.k) // LEAST_STEPS
            wanted = {min(round(fill * filling / workgroups), most) for fill in FILLS}
            configs += [tiled | {"splits": splits} for splits in sorted(wanted | {1}) if splits]
        return configs

    def refuse(self, problem: ConvProblem, facts: Facts) -> str | None:
        reason = refuse_gather(problem)
        if reason is not None:
            return reason
        return None if self.configs(problem, facts) else weight_too_large(problem, facts)

    @staticmethod
    def _workgroups(p: ConvProblem, tile_m: int, tile_p: int) -> int:
        per_phase = sum(ceil_div(p.n * phase.pixels, tile_p) for phase in phases(p))
        return per_phase * ceil_div(p.k_group, tile_m) * p.groups

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p = problem
        limits, tile, x = facts.limits, tile_of(config), strides(p)
        splits = int(config["splits"])
        tables = Tables(limits)
        bias = bias_region(p, tables)
        elements = p.out_bytes // p.itemsize
        quads = _by_quads(p)
        unit = 4 if quads else 1  # what the kernel's strides count
        sizes = (
            {"m_quads": p.k_group // 4, "y_quads": elements // 4}
            if quads
            else {"m": p.k_group, "y_m": x.y_k, "y_elements": elements}
        )
        workspace = 4 * elements * splits if splits > 1 else 0
        most = min(workspace_limit, limits.max_binding, limits.max_buffer)
        if workspace > most:
            raise AlgorithmRefusedError(
                f"needs {workspace} bytes for the partial sums of {splits} splits, may have {most}"
            )
        ending = output_bindings(p, bias)
        partial = Region("workspace", 0, workspace)
        m_tiles = ceil_div(p.k_group, tile.m)

        prepare: list[Pass] = []
        passes: list[Pass] = []
        prepared = 0
        for phase in phases(p):
            reduction = p.c_group * phase.taps
            steps = ceil_div(reduction, tile.k)
            # The kernel reads the taps of one step ahead, so one more step than there is.
            block = 1 if p.layout == "NCHW" else CHANNEL_BLOCK
            taps = tables.add(tap_table(p, phase, x, (steps + 1) * tile.k, block=block))
            size = packed_elements(tile, p.k_group, max(reduction, 1), p.groups) * p.itemsize
            packed = Region("prepared", prepared, size)
            prepared = align(prepared + size, limits.storage_alignment)
            prepare.append(
                pack_pass(
                    p,
                    tile,
                    taps,
                    packed,
                    limits,
                    m=p.k_group,
                    reduction=reduction,
                    w_g=p.weight_bytes // p.itemsize // p.groups,
                    w_m=p.r * p.s if p.transposed else p.reduction,
                )
            )
            p_tiles = ceil_div(p.n * phase.pixels, tile.p)
            passes.append(
                Pass(
                    self._shader(p, config, phase, reduction, split=splits > 1),
                    params(
                        **sizes,
                        **gather_params(p, phase, x, unit),
                        y_base=(phase.h.first * x.y_h + phase.w.first * x.y_w) // unit,
                        y_g=p.k_group * x.y_k // unit,
                        y_n=x.y_n // unit,
                        y_h=phase.h.step * x.y_h // unit,
                        y_w=phase.w.step * x.y_w // unit,
                        m_tiles=m_tiles,
                        p_tiles=p_tiles,
                        groups=p.groups,
                        k_steps=steps,
                        splits=splits,
                        **activation_params(p),
                    ),
                    (
                        ("x", Region("input")),
                        ("packed", packed),
                        ("taps", taps),
                        *((("bias", bias), ("y", partial)) if splits > 1 else ending),
                    ),
                    grid_1d(m_tiles * p_tiles * p.groups * splits, limits),
                )
            )
        if splits > 1:
            passes.append(
                Pass(
                    Shader.of("reduce_splits", p.dtype).ending_as(p),
                    params(
                        elements=elements,
                        splits=splits,
                        k=p.k,
                        y_k=x.y_k,
                        **activation_params(p),
                    ),
                    (("partial", partial), *ending),
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
    def _shader(
        p: ConvProblem, config: Config, phase: Phase, reduction: int, *, split: bool
    ) -> Shader:
        # Rows of k past the end count as taps outside of the input, so they need the check too.
        border = (
            phase.h.crosses_border(p.h)
            or phase.w.crosses_border(p.w)
            or reduction % tile_of(config).k != 0
        )
        shader = gemm_shader(
            "implicit_gemm_nhwc" if _by_quads(p) else "implicit_gemm",
            p.dtype,
            config,
            Out="f32" if split else p.dtype,
            BORDER=border,
            SPLIT=split,
        )
        return shader if split else shader.ending_as(p)

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        p, tile, splits = problem, tile_of(config), int(config["splits"])
        steps = ceil_div(p.reduction, tile.k)
        workgroups = self._workgroups(p, tile.m, tile.p) * splits
        dispatches = 2 * len(phases(p)) + (splits > 1)
        packed = packed_elements(tile, p.k_group, p.reduction, p.groups) * p.itemsize
        partial = splits * 4 * p.out_bytes // p.itemsize if splits > 1 else 0
        # What comes before and after the multiply-adds does not overlap with them: weights are
        # packed at half the rate of a copy, a workgroup stores when its last step is done, and
        # partial sums are read again by a pass of their own.
        serial = 4 * packed + 2 * partial + p.out_bytes
        gemm = roofline(
            p,
            facts,
            # Filling and draining the pipeline costs about as much as a step of a tile.
            efficiency=tile_efficiency(tile) * steps / (steps + splits),
            waste=tile_waste(tile, p.k_group, p.n * max(ph.pixels for ph in phases(p))),
            workgroups=workgroups,
            span=tile_span(tile, ceil_div(steps, splits), workgroups, facts),
            dispatches=dispatches,
        )
        return gemm + serial / facts.bandwidth


def _by_quads(p: ConvProblem) -> bool:
    """Whether channels and filters lie side by side in whole fours."""
    return p.layout == "NHWC" and p.c_group % 4 == 0 and p.k_group % 4 == 0
