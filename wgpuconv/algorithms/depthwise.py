"""Depthwise convolution, with any channel multiplier: a kernel bound by memory."""

from __future__ import annotations

from ..facts import Facts
from ..plan import Config, Pass, Plan, Region, Shader, Tables, ceil_div, grid_1d
from ..problem import ConvProblem
from .base import (
    Algorithm,
    activation_params,
    bias_region,
    check_pairs,
    in_pairs,
    loads_per_product,
    output_bindings,
    pair_params,
    params,
    roofline,
    rows_share,
    strides,
)

MOST_TAPS = 121
"""Taps that are still held in registers (11 x 11)."""
MOST_QUADS = 25
"""Likewise of four channels at a time."""
BLOCK = 16
"""Fours of channels (256 bytes) that lanes take before the next column, whose input overlaps."""


class Depthwise(Algorithm):
    name = "depthwise"
    summary = "one input channel a group: the taps in registers, several rows an invocation"
    ops = ("conv2d",)
    shaders = ("depthwise", "depthwise_nhwc", "depthwise_pairs")

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
        return [
            {"rows": rows, "pairs": pairs, "workgroup": workgroup}
            for pairs in (False, True)[: 1 + in_pairs(p)]
            for rows in (1, 2, 4)
            if rows <= p.out_h and rows_share(p, rows)
            # What is written out and held in registers grows with both.
            if rows * p.r * p.s <= (MOST_TAPS if rows == 1 else 100)
            for workgroup in sizes
            if workgroup <= most
        ]

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p, x = problem, strides(problem)
        check_pairs(p, config)
        tables = Tables(facts.limits)
        rows, workgroup = int(config["rows"]), int(config["workgroup"])
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
        outputs = p.n * p.k * ceil_div(p.out_h, rows) * p.out_w  # in strips of rows
        if config["pairs"]:
            outputs //= 2
            shader = Shader.of(
                "depthwise_pairs",
                p.dtype,
                **constants,
                STRIDE_W=p.stride[1],
                SHIFT=p.padding[2] % 2,
            )
            values = params(**sizes, **filters, **pair_params(p))
        elif _by_quads(p):
            outputs //= 4
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
            grid_1d(ceil_div(outputs, workgroup), facts.limits),
        )
        return Plan(p, self.name, config, (step,), tables=tables.blob())

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        # A load, with its address and bounds, costs as much as 14 multiply-adds and more where few
        # taps share the rest of the work (fitted on an H200); rows wait one for the other.
        p, rows = problem, int(config["rows"])
        rows_in = (rows - 1) * p.stride[0] + p.r
        loads = loads_per_product(p, rows, bool(config["pairs"]))
        efficiency = 1 / (1.5 + (14 + 90 / (p.r * p.s)) * loads)
        return roofline(p, facts, efficiency=efficiency, span=rows_in * facts.latency)


def _by_quads(p: ConvProblem) -> bool:
    """Whether channels lie side by side in fours, each with one filter of few enough taps."""
    return p.layout == "NHWC" and p.k_group == 1 and p.k % 4 == 0 and p.r * p.s <= MOST_QUADS


def _block(quads: int) -> int:
    """The largest divisor of so many fours of channels up to BLOCK, unless it is a poor one."""
    largest = max(size for size in range(1, BLOCK + 1) if quads % size == 0)
    return largest if largest >= 4 else quads
