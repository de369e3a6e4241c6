"""Direct convolution and transposed convolution: no scratch memory, fits every problem."""

from __future__ import annotations

from ..facts import Facts
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
    window_params,
)


class Direct(Algorithm):
    name = "direct"
    summary = "one output pixel of a few filters an invocation; no scratch memory, fits always"
    ops = ("conv2d", "conv_transpose2d")
    shaders = ("direct", "direct_transpose")

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        most = min(facts.limits.max_invocations, facts.limits.max_workgroup_size)
        return [
            {"filters": filters, "workgroup": workgroup}
            for filters in (4, 8, 16, 1)
            if filters < 2 * problem.k_group
            for workgroup in (64, 128, 256)
            if workgroup <= most and (workgroup == 64 or not facts.software)
        ]

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p = problem
        tables = Tables(facts.limits)
        filters, workgroup = int(config["filters"]), int(config["workgroup"])
        invocations = p.n * p.out_h * p.out_w * p.groups * ceil_div(p.k_group, filters)
        step = Pass(
            Shader.of(
                "direct_transpose" if p.transposed else "direct",
                p.dtype,
                FILTERS=filters,
                WORKGROUP=workgroup,
                CHANNELS_LAST=p.layout == "NHWC",
            ).ending_as(p),
            direct_params(p),
            (
                ("x", Region("input")),
                ("weight", Region("weight")),
                *output_bindings(p, bias_region(p, tables)),
            ),
            grid_1d(ceil_div(invocations, workgroup), facts.limits),
        )
        return Plan(p, self.name, config, (step,), tables=tables.blob())

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        filters = int(config["filters"])
        # Each multiply-add loads a weight, and a share of an input element and of its address
        # (fitted on an H200).
        taps = problem.r * problem.s
        efficiency = 1 / (5 + (20 + 48 / taps) / filters)
        waste = ceil_div(problem.k_group, filters) * filters / problem.k_group
        waits = problem.reduction + problem.c_group  # a channel's taps are loaded together
        span = waits * facts.latency + problem.reduction * 8 * filters * facts.cycle
        sums = roofline(problem, facts, efficiency=efficiency, waste=waste, span=span)
        return sums + problem.out_bytes / facts.bandwidth  # stored when all sums are done


def direct_params(problem: ConvProblem) -> tuple[tuple[str, int | float], ...]:
    """What a kernel that computes a pixel from the tensors as they lie is told."""
    p = problem
    return params(
        n=p.n,
        h=p.h,
        w=p.w,
        out_h=p.out_h,
        out_w=p.out_w,
        c_group=p.c_group,
        k_group=p.k_group,
        groups=p.groups,
        r=p.r,
        s=p.s,
        **window_params(p),
        **strides(p)._asdict(),
        **activation_params(p),
    )
