"""Direct convolution and transposed convolution: no scratch memory, fits every problem."""

from __future__ import annotations

from ....algorithms.base import (
    bias_region,
    roofline,
)
from ....algorithms.direct import direct_params
from ....facts import Facts
from ....plan import Config, Pass, Plan, Region, Shader, Tables, ceil_div, grid_1d
from ....problem import ConvProblem
from .base import CudaAlgorithm, output_bindings


class Direct(CudaAlgorithm):
    name = "direct"
    summary = "one output pixel of a few filters a thread; no scratch memory, fits always"
    ops = ("conv2d", "conv_transpose2d")
    shaders = ("direct",)

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        return [
            {"filters": filters, "threads": threads}
            for filters in (4, 8, 16, 1)
            if filters < 2 * problem.k_group
            for threads in (128, 256)
        ]

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p = problem
        tables = Tables(facts.limits)
        filters, threads = int(config["filters"]), int(config["threads"])
        work = p.n * p.out_h * p.out_w * p.groups * ceil_div(p.k_group, filters)
        step = Pass(
            Shader.of(
                "direct",
                p.dtype,
                FILTERS=filters,
                THREADS=threads,
                CHANNELS_LAST=p.layout == "NHWC",
                TRANSPOSED=p.transposed,
                WEIGHT_LAST=p.weight_last,
            ).ending_as(p),
            direct_params(p),
            (
                ("x", Region("input")),
                ("weight", Region("weight")),
                *output_bindings(p, bias_region(p, tables), Region("out")),
            ),
            grid_1d(ceil_div(work, threads), facts.limits),
        )
        return Plan(p, self.name, config, (step,), tables=tables.blob())

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        filters = int(config["filters"])
        # Each multiply-add loads a weight, and a share of an input element.
        efficiency = 0.25 * filters / (filters + 4)
        waste = ceil_div(problem.k_group, filters) * filters / problem.k_group
        span = problem.reduction * (facts.latency + 8 * filters * facts.cycle)
        return roofline(problem, facts, efficiency=efficiency, waste=waste, span=span)
