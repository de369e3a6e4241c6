"""A 1x1 convolution of stride 1 is a matrix product on the input as it lies."""

from __future__ import annotations

import numpy as np

from ..facts import Facts
from ..plan import Config, Pass, Plan, Region, Tables, ceil_div, grid_1d
from ..problem import ConvProblem
from .base import Algorithm, activation_params, bias_region, params, roofline, strides
from .im2col_gemm import weight_offsets
from .tiles import (
    gemm_shader,
    pack_pass,
    packed_elements,
    packed_refusal,
    tile_configs,
    tile_efficiency,
    tile_of,
    tile_waste,
)


class Gemm1x1(Algorithm):
    name = "gemm_1x1"
    summary = "1x1 kernels of stride 1: a tiled GEMM on the input as it lies"
    ops = ("conv2d",)
    shaders = ("gemm", "pack_weights")

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        p = problem
        return [
            config
            for config in tile_configs(facts, p.k_group, p.n * p.h * p.w)
            if not packed_refusal(tile_of(config), p, p.k_group, p.c_group, facts)
        ]

    def refuse(self, problem: ConvProblem, facts: Facts) -> str | None:
        p = problem
        if (p.r, p.s) != (1, 1):
            return f"needs a 1x1 kernel, got {p.r}x{p.s}"
        if p.stride != (1, 1):
            return f"needs stride 1, got {p.stride[0]},{p.stride[1]}"
        if p.padding != (0, 0, 0, 0):
            return f"needs no padding, got {p.padding}"
        if not self.configs(p, facts):
            return (
                "needs the packed weight within one binding of "
                f"{facts.limits.max_binding} bytes, got {p.weight_bytes} bytes of weights"
            )
        return None

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
        m_tiles, p_tiles = ceil_div(p.k_group, tile.m), ceil_div(p.n * p.h * p.w, tile.p)
        step = Pass(
            gemm_shader("gemm", p, config, In=p.dtype, Out=p.dtype).ending_with(p.activation),
            params(
                pixels=p.n * p.h * p.w,
                image_pixels=p.h * p.w,
                reduction=p.c_group,
                b_base=0,
                b_g=p.c_group * x.x_c,
                b_n=x.x_n,
                b_k=x.x_c,
                b_p=x.x_w,
                y_base=0,
                y_g=p.k_group * x.y_k,
                y_n=x.y_n,
                y_m=x.y_k,
                y_p=x.y_w,
                m=p.k_group,
                m_tiles=m_tiles,
                p_tiles=p_tiles,
                groups=p.groups,
                k_steps=steps,
                **activation_params(p),
            ),
            (
                ("b", Region("input")),
                ("packed", packed),
                ("bias", bias_region(p, tables)),
                ("y", Region("out")),
            ),
            grid_1d(m_tiles * p_tiles * p.groups, limits),
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
        return roofline(
            p,
            facts,
            efficiency=1.05 * tile_efficiency(tile),  # no table of taps to read
            waste=tile_waste(tile, p.k_group, pixels),
            workgroups=ceil_div(p.k_group, tile.m) * p.groups * ceil_div(pixels, tile.p),
            dispatches=2,
        )
