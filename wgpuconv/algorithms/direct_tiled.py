"""Direct convolution with register tiles and the weights in workgroup memory."""

from __future__ import annotations

from ..facts import Facts
from ..plan import Config, Pass, Plan, Region, Shader, Tables, ceil_div, grid_1d
from ..problem import ConvProblem
from .base import (
    Algorithm,
    activation_params,
    bias_region,
    params,
    roofline,
    strides,
    window_params,
)

BLOCKS = (
    (16, 4, 1),
    (16, 2, 2),
    (16, 2, 1),
    (16, 1, 4),
    (16, 1, 2),
    (8, 4, 2),
    (8, 4, 1),
    (8, 2, 4),
    (8, 2, 2),
    (8, 1, 4),
    (32, 2, 1),
    (32, 1, 2),
    (4, 4, 1),
)
"""Filters, columns and rows of an invocation: as many of each as registers hold."""
MOST_WRITTEN = 1200
"""Multiply-adds up to which the rows of a channel are written out: more leave the code cache."""
STAGED_BYTES = 16384
"""Workgroup memory for weights: what every device has."""


class DirectTiled(Algorithm):
    name = "direct_tiled"
    summary = "pixels by filters in registers, weights in workgroup memory; for few channels"
    ops = ("conv2d",)
    shaders = ("direct_tiled",)

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        p = problem
        most = min(facts.limits.max_invocations, facts.limits.max_workgroup_size)
        return [
            {
                "filters": filters,
                "pixels": pixels,
                "rows": rows,
                "workgroup": workgroup,
                "unroll": not facts.software,  # CPU drivers take seconds to compile long kernels
            }
            for filters, pixels, rows in BLOCKS
            if (not facts.software or filters * pixels * rows <= 16)
            and filters < 2 * max(p.k_group, 4)
            and rows < 2 * p.out_h
            and (rows == 1 or p.dilation[0] == 1)
            and 4 * filters * p.r * p.s <= STAGED_BYTES
            for workgroup in (64, 128, 256)
            if workgroup <= most and (workgroup == 64 or not facts.software)
        ]

    def refuse(self, problem: ConvProblem, facts: Facts) -> str | None:
        most = STAGED_BYTES // 16
        taps = problem.r * problem.s
        return None if taps <= most else f"needs at most {most} taps, got {taps}"

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p = problem
        tables = Tables(facts.limits)
        filters, pixels = int(config["filters"]), int(config["pixels"])
        rows, workgroup = int(config["rows"]), int(config["workgroup"])
        unroll = bool(config["unroll"])
        written = p.r * p.s * filters * pixels * rows
        channel = p.r * p.s * filters // 4  # quads
        staged = min(p.c_group, STAGED_BYTES // 16 // channel)
        columns = ceil_div(p.out_h, rows) * p.out_w
        window = window_params(p)
        del window["stride_h"]
        step = Pass(
            Shader.of(
                "direct_tiled",
                p.dtype,
                p.activation,
                FILTERS=filters,
                PIXELS=pixels,
                ROWS=rows,
                WORKGROUP=workgroup,
                TAPS_H=p.r,
                TAPS_W=p.s,
                STRIDE_H=p.stride[0],
                UNROLL_ROWS=unroll and written <= MOST_WRITTEN,
                UNROLL_TAPS=unroll,
                STAGED=staged * channel,
                BORDER=_has_border(p),
            ),
            params(
                columns=p.n * columns,
                image_columns=columns,
                out_h=p.out_h,
                out_w=p.out_w,
                h=p.h,
                w=p.w,
                c_group=p.c_group,
                k_group=p.k_group,
                groups=p.groups,
                stage_channels=staged,
                **window,
                **strides(p)._asdict(),
                **activation_params(p),
            ),
            (
                ("x", Region("input")),
                ("weight", Region("weight")),
                ("bias", bias_region(p, tables)),
                ("y", Region("out")),
            ),
            grid_1d(
                ceil_div(p.n * columns, workgroup * pixels)
                * ceil_div(p.k_group, filters)
                * p.groups,
                facts.limits,
            ),
        )
        return Plan(p, self.name, config, (step,), tables=tables.blob())

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        p = problem
        filters, pixels, rows, workgroup = (
            int(config[name]) for name in ("filters", "pixels", "rows", "workgroup")
        )
        # A multiply-add takes a share of an input element, which rows share too, and of a quad
        # of weights.
        rows_in = (rows - 1) * p.stride[0] + p.r
        loads = rows_in / (rows * p.r * filters) + 1 / (4 * pixels)
        columns = p.n * ceil_div(p.out_h, rows) * p.out_w
        blocks = ceil_div(p.k_group, filters)
        workgroups = ceil_div(columns, workgroup * pixels) * blocks * p.groups
        return roofline(
            p,
            facts,
            efficiency=0.6 / (1 + 2 * loads),
            waste=blocks * filters / p.k_group * columns * rows / (p.n * p.out_h * p.out_w),
            workgroups=ceil_div(workgroups * workgroup, 512),
            span=p.reduction * (facts.latency / 4 + filters * pixels * rows * facts.cycle),
        )


def _has_border(p: ConvProblem) -> bool:
    return any(p.padding)
