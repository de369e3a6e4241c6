"""Depthwise convolution, with any channel multiplier: a kernel bound by memory."""

from __future__ import annotations

from ....algorithms.base import (
    activation_params,
    bias_region,
    params,
    roofline,
    strides,
)
from ....facts import Facts
from ....plan import Config, Pass, Plan, Region, Shader, Tables, ceil_div, grid_1d
from ....problem import ConvProblem
from .base import CudaAlgorithm, output_bindings

MOST_TAPS = 121
"""Taps that are still held in registers (11 x 11)."""
MOST_ROWS_IN = 256
"""Input rows of a thread: the loop over them is unrolled, also over rows that no tap needs."""


class Depthwise(CudaAlgorithm):
    name = "depthwise"
    summary = "one input channel a group: the taps in registers, several rows a thread"
    ops = ("conv2d",)
    shaders = ("depthwise",)

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
        if _rows_in(problem, 1) > MOST_ROWS_IN:
            return (
                f"needs at most {MOST_ROWS_IN} rows from the first tap to the last, got "
                f"{_rows_in(problem, 1)} (kernel {problem.r} x {problem.s}, dilation "
                f"{problem.dilation[0]},{problem.dilation[1]})"
            )
        return None

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        return [
            {"rows": rows, "threads": threads}
            for rows in ((1, 4, 8) if problem.r * problem.s <= 49 else (1,))
            if rows < 2 * problem.out_h and _rows_in(problem, rows) <= MOST_ROWS_IN
            for threads in (128, 256)
        ]

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p = problem
        tables = Tables(facts.limits)
        rows, threads = int(config["rows"]), int(config["threads"])
        step = Pass(
            Shader.of(
                "depthwise",
                p.dtype,
                R=p.r,
                S=p.s,
                STRIDE_H=p.stride[0],
                DILATION_H=p.dilation[0],
                ROWS=rows,
                THREADS=threads,
                CHANNELS_LAST=p.layout == "NHWC",
            ).ending_as(p),
            params(
                n=p.n,
                h=p.h,
                w=p.w,
                out_h=p.out_h,
                out_w=p.out_w,
                k=p.k,
                k_group=p.k_group,
                stride_w=p.stride[1],
                pad_top=p.padding[0],
                pad_left=p.padding[2],
                dilation_w=p.dilation[1],
                **strides(p)._asdict(),
                **activation_params(p),
            ),
            (
                ("x", Region("input")),
                ("weight", Region("weight")),
                *output_bindings(p, bias_region(p, tables), Region("out")),
            ),
            grid_1d(ceil_div(p.n * p.k * ceil_div(p.out_h, rows) * p.out_w, threads), facts.limits),
        )
        return Plan(p, self.name, config, (step,), tables=tables.blob())

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        return roofline(problem, facts, efficiency=0.2 if config["rows"] == 1 else 0.25)


def _rows_in(p: ConvProblem, rows: int) -> int:
    """From the first that so many rows of outputs need to the last."""
    return (rows - 1) * p.stride[0] + (p.r - 1) * p.dilation[0] + 1
