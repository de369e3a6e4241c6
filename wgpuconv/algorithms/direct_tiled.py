"""Direct convolution with register tiles and the weights in workgroup memory."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..facts import Facts
from ..plan import Config, Pass, Plan, Region, Shader, Tables, ceil_div, grid_1d
from ..problem import ConvProblem
from .base import (
    Algorithm,
    activation_params,
    bias_region,
    check_vectors,
    in_vectors,
    loads_per_product,
    output_bindings,
    params,
    roofline,
    rows_share,
    strides,
    vector_params,
)

Blocks = tuple[tuple[int, int, int], ...]

BLOCKS: Blocks = ((16, 4, 1), (16, 2, 2), (16, 2, 1), (16, 1, 2), (8, 2, 2), (32, 2, 1), (4, 4, 1))
"""Filters, columns and rows of an invocation: as many of each as registers hold."""
PAIRS: Blocks = ((16, 2, 2), (16, 2, 1), (8, 2, 4), (8, 2, 2), (32, 2, 1), (4, 2, 2))
"""The same where neighbouring columns are read and written two at a time."""
SOFTWARE_BLOCKS: Blocks = ((4, 2, 1),)
SOFTWARE_PAIRS: Blocks = ((4, 2, 2),)
SOFTWARE_TAPS = 25
"""Small blocks and few taps for CPU drivers: they write out whatever has constant bounds."""
MOST_WRITTEN = 1200
"""Multiply-adds up to which the rows of a channel are written out: more leave the code cache."""
STAGED_BYTES = 16384
"""Workgroup memory for weights, where there is as much: with more, fewer workgroups fit a core."""
MOST_TAPS_ACROSS = 16
"""Taps of a row, which are written out: more take a driver seconds to compile."""
REGISTERS = 64 << 10
"""Of a core, those of an H200; an invocation needs some besides those of its sums.

This and CACHED are part of a fit to times on an H200, and stand for every GPU, since WebGPU tells
neither: they order candidates, of which the tuner measures several. Where it does not, a wrong one
costs some speed, never a right result."""
CACHED = 40 << 20
"""Bytes that stay in a cache from one run to the next: most of an H200's 50 MB (see REGISTERS)."""


class DirectTiled(Algorithm):
    name = "direct_tiled"
    summary = "pixels by filters in registers, weights in workgroup memory; for few channels"
    ops = ("conv2d",)
    shaders = ("direct_tiled", "direct_pairs", "direct_nhwc")

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        p = problem
        most = min(facts.limits.max_invocations, facts.limits.max_workgroup_size)
        software = facts.software
        pairs = SOFTWARE_PAIRS if software else PAIRS
        blocks = SOFTWARE_BLOCKS if software else BLOCKS
        return [
            {
                "filters": filters,
                "columns": columns,
                "rows": rows,
                "pairs": paired,
                "workgroup": min(size, most),
                "unroll": not software,  # CPU drivers take seconds to compile long kernels
            }
            for paired, each in ((True, pairs if in_vectors(p, 2) else ()), (False, blocks))
            for filters, columns, rows in each
            if filters < 2 * max(p.k_group, 4)
            and rows < 2 * p.out_h
            and 4 * filters * p.r * p.s <= _staged_bytes(facts)
            and rows_share(p, rows)
            for size in ((64,) if software else (128, 256))
        ]

    def refuse(self, problem: ConvProblem, facts: Facts) -> str | None:
        p, most = problem, _staged_bytes(facts) // 16
        if p.c_group == 1 and p.k_group < 4:
            return (
                f"computes four filters at a time, got {p.k_group} for each input channel, which "
                "depthwise does"
            )
        if p.r * p.s > most or p.s > MOST_TAPS_ACROSS:
            return f"needs at most {most} taps, {MOST_TAPS_ACROSS} in a row, got {p.r} x {p.s}"
        if facts.software and p.r * p.s > SOFTWARE_TAPS:
            return (
                f"needs a GPU for more than {SOFTWARE_TAPS} taps, got {p.r} x {p.s}: a CPU driver "
                "takes seconds to compile them"
            )
        return None

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p, x = problem, strides(problem)
        check_vectors(p, 2 if config["pairs"] else 1)
        tables = Tables(facts.limits)
        block = _Block.of(config)
        unroll = bool(config["unroll"])
        channel = p.r * p.s * block.filters // 4  # quads of weights
        staged = min(p.c_group, _staged_bytes(facts) // 16 // channel)
        shared = {
            "FILTERS": block.filters,
            "ROWS": block.rows,
            "WORKGROUP": block.workgroup,
            "TAPS_H": p.r,
            "TAPS_W": p.s,
            "STRIDE_H": p.stride[0],
            "STAGED": staged * channel,
            "BORDER": any(p.padding),
            "UNROLL_ROWS": unroll and p.r * p.s * block.outputs <= MOST_WRITTEN,
            "UNROLL_TAPS": unroll,
        }
        columns = ceil_div(p.out_h, block.rows) * p.out_w
        sizes = {
            "out_h": p.out_h,
            "h": p.h,
            "c_group": p.c_group,
            "groups": p.groups,
            "stage_channels": staged,
            "pad_top": p.padding[0],
            **activation_params(p),
        }
        across = {
            "columns": p.n * columns,
            "image_columns": columns,
            "out_w": p.out_w,
            "w": p.w,
            "stride_w": p.stride[1],
            "pad_left": p.padding[2],
            "dilation_h": p.dilation[0],
            "dilation_w": p.dilation[1],
        }
        if config["pairs"]:
            shader = Shader.of(
                "direct_pairs",
                p.dtype,
                **shared,
                STRIDE_W=p.stride[1],
                SHIFT=p.padding[2] % 2,
            )
            values = params(
                **sizes,
                k_group=p.k_group,
                columns=p.n * columns // 2,
                image_columns=columns // 2,
                **vector_params(p, 2),
            )
        elif p.layout == "NHWC" and p.k_group % 4 == 0:
            shader = Shader.of("direct_nhwc", p.dtype, **shared, PIXELS=block.columns)
            values = params(**sizes, **across, quads_group=p.k_group // 4)
        else:
            shader = Shader.of("direct_tiled", p.dtype, **shared, PIXELS=block.columns)
            values = params(**sizes, **across, k_group=p.k_group, **x._asdict())
        step = Pass(
            shader.ending_as(p),
            values,
            (
                ("x", Region("input")),
                ("weight", Region("weight")),
                *output_bindings(p, bias_region(p, tables)),
            ),
            grid_1d(block.workgroups(p), facts.limits),
        )
        return Plan(p, self.name, config, (step,), tables=tables.blob())

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        p, block = problem, _Block.of(config)
        # A multiply-add takes a share of an input element, which rows and pairs share too, and of
        # a quad of weights; a load costs as much as nine multiply-adds, most of it addresses and
        # bounds (fitted on an H200).
        inputs = loads_per_product(p, block.rows, bool(config["pairs"])) / block.filters
        if p.layout == "NHWC":  # neighbours lie a pixel's channels apart: more cache lines a load
            inputs *= min(max(p.c / 4, 1), 4)
        efficiency = 1 / (1.15 + 9 * inputs + 2 / (4 * block.columns))
        columns = p.n * ceil_div(p.out_h, block.rows) * p.out_w
        outputs = ceil_div(p.k_group, block.filters) * block.filters * columns * block.rows
        # Rows that are written out are loaded together, others one after the other; staging the
        # first weights takes as long as some more.
        rows_in = (block.rows - 1) * p.stride[0] + p.r
        waits = p.c_group * (1 if p.r * p.s * block.outputs <= MOST_WRITTEN else rows_in)
        span = (waits + 8) * facts.latency + p.reduction * block.outputs * facts.cycle
        # Only so many invocations wait at a time; where inputs come from memory, they wait longer.
        resident = facts.cores * REGISTERS / (block.outputs + 40)
        rounds = max(block.workgroups(p) * block.workgroup / resident, 1.0)
        waiting = rounds * waits * facts.latency * (6 if p.input_bytes > CACHED else 1)
        # Workgroups of several waves do not keep step, so that the last one wastes half at most;
        # and how many run at a time is a guess.
        waves = block.workgroups(p) * block.workgroup / (512 * facts.cores)
        waste = outputs / (p.n * p.k_group * p.out_h * p.out_w)
        waste *= max(min(math.ceil(waves), waves + 0.5), 1.0) / waves
        work = roofline(
            p,
            facts,
            efficiency=efficiency,
            waste=waste,
            span=max(span, waiting),
            # Each block of filters reads the input anew, mostly from a cache.
            extra_bytes=(ceil_div(p.k_group, block.filters) - 1) * p.input_bytes // 2,
        )
        return work + p.out_bytes / facts.bandwidth


def _staged_bytes(facts: Facts) -> int:
    return min(STAGED_BYTES, facts.limits.max_workgroup_storage)


class _Block(NamedTuple):
    """What an invocation computes, and how many of them are a workgroup."""

    filters: int
    columns: int
    rows: int
    workgroup: int

    @classmethod
    def of(cls, config: Config) -> _Block:
        return cls(*(int(config[name]) for name in cls._fields))

    @property
    def outputs(self) -> int:
        return self.filters * self.columns * self.rows

    def workgroups(self, p: ConvProblem) -> int:
        columns = p.n * ceil_div(p.out_h, self.rows) * p.out_w
        patches = ceil_div(columns, self.workgroup * self.columns)
        return patches * ceil_div(p.k_group, self.filters) * p.groups
