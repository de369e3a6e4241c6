"""A 1x1 convolution of stride 1 is a matrix product on the input as it lies."""

from __future__ import annotations

import numpy as np

from ..facts import Facts
from ..plan import Config, Plan, Region, Tables, ceil_div
from ..problem import ConvProblem
from .base import Algorithm, bias_region, output_bindings, roofline, strides
from .im2col_gemm import weight_offsets
from .tiles import (
    gemm_pass,
    pack_pass,
    packed_elements,
    tile_configs,
    tile_efficiency,
    tile_of,
    tile_span,
    tile_waste,
    weight_too_large,
)


class Gemm1x1(Algorithm):
    name = "gemm_1x1"
    summary = "1x1 kernels of stride 1: a tiled GEMM on the input as it lies"
    ops = ("conv2d",)
    shaders = ("gemm", "gemm_nhwc", "gemm_vec4", "pack_weights")

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        p = problem
        pixels = p.n * p.h * p.w
        return tile_configs(
            facts,
            m=p.k_group,
            reduction=p.c_group,
            pixels=pixels,
            groups=p.groups,
            itemsize=p.itemsize,
        )

    def refuse(self, problem: ConvProblem, facts: Facts) -> str | None:
        p = problem
        if (p.r, p.s) != (1, 1):
            return f"needs a 1x1 kernel, got {p.r}x{p.s}"
        if p.stride != (1, 1):
            return f"needs stride 1, got {p.stride[0]},{p.stride[1]}"
        if p.padding != (0, 0, 0, 0):
            return f"needs no padding, got {p.padding}"
        return None if self.configs(p, facts) else weight_too_large(p, facts)

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p, limits, tile, x = problem, facts.limits, tile_of(config), strides(problem)
        tables = Tables(limits)
        steps = ceil_div(p.c_group, tile.k)
        taps = tables.add(weight_offsets(np.arange(p.c_group), steps * tile.k))
        size = packed_elements(tile, p.k_group, p.c_group, p.groups) * p.itemsize
        packed = Region("prepared", 0, size)
        prepare = pack_pass(
            p,
            tile,
            taps,
            packed,
            limits,
            m=p.k_group,
            reduction=p.c_group,
            w_g=p.k_group * p.c_group,
            w_m=p.c_group,
        )
        step = gemm_pass(
            config,
            limits,
            (
                ("b", Region("input")),
                ("packed", packed),
                *output_bindings(p, bias_region(p, tables)),
            ),
            ending=p,
            dtype=p.dtype,
            groups=p.groups,
            b_dtype=p.dtype,
            y_dtype=p.dtype,
            images=p.n,
            image_pixels=p.h * p.w,
            m=p.k_group,
            reduction=p.c_group,
            b=(0, p.c_group * x.x_c, x.x_n, x.x_c, x.x_w),
            y=(0, p.k_group * x.y_k, x.y_n, x.y_k, x.y_w),
        )
        return Plan(
            p,
            self.name,
            config,
            (step,),
            prepare=(prepare,),
            prepared=size,
            tables=tables.blob(),
        )

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        p, tile = problem, tile_of(config)
        pixels = p.n * p.h * p.w
        workgroups = ceil_div(p.k_group, tile.m) * p.groups * ceil_div(pixels, tile.p)
        steps = ceil_div(p.c_group, tile.k)
        packed = packed_elements(tile, p.k_group, p.c_group, p.groups) * p.itemsize
        gemm = roofline(
            p,
            facts,
            # No table of taps to read; filling and draining the pipeline takes a step.
            efficiency=1.05 * tile_efficiency(tile) * steps / (steps + 1),
            waste=tile_waste(tile, p.k_group, pixels),
            workgroups=workgroups,
            span=tile_span(tile, steps, workgroups, facts),
            dispatches=2,
        )
        # Packing comes before the sums, and storing after them, as in implicit_gemm.
        return gemm + (4 * packed + p.out_bytes) / facts.bandwidth
