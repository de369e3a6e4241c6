"""Depthwise convolution, with any channel multiplier: a kernel bound by memory."""

from __future__ import annotations

import math

from ..facts import Facts
from ..plan import Config, Pass, Plan, Region, Shader, Tables, ceil_div, grid_1d
from ..problem import ConvProblem
from .base import (
    Algorithm,
    activation_params,
    bias_region,
    check_vectors,
    in_vectors,
    output_bindings,
    params,
    rows_share,
    strides,
    vector_params,
)

MOST_TAPS = 121
"""Taps that are still held in registers (11 x 11)."""
MOST_QUADS = 25
"""Likewise of four channels at a time."""
ROWS = (1, 2, 4, 7, 8)
"""Outputs down of an invocation: the more, the fewer loads; images of most networks have a multiple
of seven rows, others one of eight."""
PAIRS = (0, 1, 2)
"""Pairs of columns of an invocation, which are read and written as one vector; none: one column."""
MOST_WRITTEN = 800
"""Multiply-adds of an invocation, which are all written out."""
SOFTWARE_WRITTEN = 300
"""CPU drivers take seconds to compile more."""
BLOCK = 16
"""Fours of channels (256 bytes) that lanes take before the next column, whose input overlaps."""


class Depthwise(Algorithm):
    name = "depthwise"
    summary = "one input channel a group: the taps in registers, several rows an invocation"
    ops = ("conv2d",)
    shaders = ("depthwise", "depthwise_nhwc", "depthwise_wide")

    def refuse(self, problem: ConvProblem, facts: Facts) -> str | None:
        if problem.c_group != 1:
            return (
                f"needs one input channel a group (groups={problem.c}), got "
                f"{problem.c_group} channels a group (groups={problem.groups})"
            )
        if problem.r * problem.s > MOST_TAPS:
            return (
                f"needs a kernel of at most {MOST_TAPS} taps, got {problem.r * problem.s} "
                f"({problem.r} x {problem.s})"
            )
        return None

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        p = problem
        most = min(facts.limits.max_invocations, facts.limits.max_workgroup_size)
        sizes = (64,) if facts.software else (64, 128, 256)
        written = SOFTWARE_WRITTEN if facts.software else MOST_WRITTEN
        return [
            {"rows": rows, "pairs": pairs, "workgroup": workgroup}
            for pairs in PAIRS
            if in_vectors(p, _columns(pairs))
            for rows in ROWS
            if rows <= p.out_h and rows_share(p, rows)
            if rows * _columns(pairs) * p.r * p.s <= written
            for workgroup in sizes
            if workgroup <= most
        ]

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p, x = problem, strides(problem)
        rows, workgroup = int(config["rows"]), int(config["workgroup"])
        columns = _columns(int(config["pairs"]))
        check_vectors(p, columns)
        tables = Tables(facts.limits)
        constants = {
            "R": p.r,
            "S": p.s,
            "ROWS": rows,
            "STRIDE_H": p.stride[0],
            "WORKGROUP": workgroup,
        }
        sizes = {
            "n": p.n,
            "h": p.h,
            "out_h": p.out_h,
            "pad_top": p.padding[0],
            **activation_params(p),
        }
        filters = {"k": p.k, "k_group": p.k_group}
        across = {
            "w": p.w,
            "out_w": p.out_w,
            "stride_w": p.stride[1],
            "pad_left": p.padding[2],
            "dilation_h": p.dilation[0],
            "dilation_w": p.dilation[1],
        }
        invocations = _invocations(p, rows, columns)
        if columns > 1:
            half = "h" if p.dtype == "f16" else "f"
            shader = Shader.of(
                "depthwise_wide",
                p.dtype,
                **constants,
                COLUMNS=columns,
                Vector=f"vec{columns}{half}",
                Sums=f"vec{columns}f",
                STRIDE_W=p.stride[1],
                SHIFT=-p.padding[2] % columns,
            )
            values = params(**sizes, **filters, **vector_params(p, columns))
        elif _by_quads(p):
            invocations //= 4
            shader = Shader.of("depthwise_nhwc", p.dtype, **constants)
            values = params(**sizes, **across, quads=p.k // 4, block=_block(p.k // 4))
        else:
            shader = Shader.of(
                "depthwise",
                p.dtype,
                **constants,
                CHANNELS_LAST=p.layout == "NHWC",
            )
            values = params(**sizes, **filters, **across, **x._asdict())
        step = Pass(
            shader.ending_as(p),
            values,
            (
                ("x", Region("input")),
                ("weight", Region("weight")),
                *output_bindings(p, bias_region(p, tables)),
            ),
            grid_1d(ceil_div(invocations, workgroup), facts.limits),
        )
        return Plan(p, self.name, config, (step,), tables=tables.blob())

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        # Counted in multiply-adds: an invocation costs so many to find its place, and each tap,
        # load and store some for its address and bounds. Arithmetic and memory traffic overlap in
        # part; rows wait one for the other. (Fitted on an H200.)
        p, rows, columns = problem, int(config["rows"]), _columns(int(config["pairs"]))
        rows_in = (rows - 1) * p.stride[0] + p.r
        crossed = -p.padding[2] % columns + (columns - 1) * p.stride[1] + p.s
        loads = rows_in * (p.s if columns == 1 else ceil_div(crossed, columns))
        products = rows * columns * p.r * p.s
        slots = _invocations(p, rows, columns) * (
            products + 65 + 9 * p.r * p.s + 4 * loads + 18 * rows
        )
        traffic = p.input_bytes + p.weight_bytes + p.residual_bytes + p.out_bytes
        work = math.hypot(2 * slots / facts.flops, traffic / facts.bandwidth)
        return max(work, rows_in * facts.latency) + facts.launch


def _columns(pairs: int) -> int:
    """Columns of an invocation."""
    return 2 * pairs or 1


def _invocations(p: ConvProblem, rows: int, columns: int) -> int:
    return p.n * p.k * ceil_div(p.out_h, rows) * (p.out_w // columns)


def _by_quads(p: ConvProblem) -> bool:
    """Whether channels lie side by side in fours, each with one filter of few enough taps."""
    return p.layout == "NHWC" and p.k_group == 1 and p.k % 4 == 0 and p.r * p.s <= MOST_QUADS


def _block(quads: int) -> int:
    """The largest divisor of so many fours of channels up to BLOCK, unless it is a poor one."""
    largest = max(size for size in range(1, BLOCK + 1) if quads % size == 0)
    return largest if largest >= 4 else quads
