"""Transposed convolution as GEMM, then col2im.

The GEMM computes what each input pixel contributes through each tap; col2im gathers, for each
output pixel, the contributions that reach it. Chunks bound the memory of the columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..errors import AlgorithmRefusedError
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


class Col2im(Algorithm):
    name = "col2im"
    summary = "a tiled GEMM writes each input pixel's contributions, col2im gathers them"
    ops = ("conv_transpose2d",)
    shaders = ("gemm", "gemm_vec4", "pack_weights", "col2im")

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        p = problem
        m = p.k_group * p.r * p.s
        return tile_configs(
            facts,
            m=m,
            reduction=p.c_group,
            pixels=p.n * p.h * p.w,
            groups=p.groups,
            itemsize=p.itemsize,
        )

    def refuse(self, problem: ConvProblem, facts: Facts) -> str | None:
        return None if self.configs(problem, facts) else weight_too_large(problem, facts)

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p, limits, tile, x = problem, facts.limits, tile_of(config), strides(problem)
        taps = p.r * p.s
        m = p.k_group * taps
        tables = Tables(limits)
        bias = bias_region(p, tables)
        no_bias = tables.add(bytes(p.k * taps * p.itemsize))
        steps = ceil_div(p.c_group, tile.k)
        offsets = tables.add(weight_offsets(np.arange(p.c_group) * m, steps * tile.k))
        size = packed_elements(tile, m, p.c_group, p.groups) * p.itemsize
        packed = Region("prepared", 0, size)
        prepare = pack_pass(
            p,
            tile,
            offsets,
            packed,
            limits,
            m=m,
            reduction=p.c_group,
            w_g=p.c_group * m,
            w_m=1,
        )
        budget = min(workspace_limit, limits.max_binding, limits.max_buffer)
        passes: list[Pass] = []
        workspace = 0
        for chunk in _chunks(p, budget):
            first_image, images, first_row, out_rows, first_h, in_rows = chunk
            pixels = in_rows * p.w
            used = 4 * images * p.k * taps * pixels
            workspace = max(workspace, used)
            columns = Region("workspace", 0, used)
            passes.append(
                gemm_pass(
                    config,
                    limits,
                    (
                        ("b", Region("input")),
                        ("packed", packed),
                        ("bias", no_bias),
                        ("y", columns),
                    ),
                    dtype=p.dtype,
                    groups=p.groups,
                    b_dtype=p.dtype,
                    y_dtype="f32",
                    images=images,
                    image_pixels=pixels,
                    m=m,
                    reduction=p.c_group,
                    b=(
                        first_image * x.x_n + first_h * x.x_h,
                        p.c_group * x.x_c,
                        x.x_n,
                        x.x_c,
                        x.x_w,
                    ),
                    y=(0, m * pixels, p.k * taps * pixels, pixels, 1),
                )
            )
            passes.append(
                Pass(
                    Shader.of("col2im", p.dtype).ending_as(p),
                    params(
                        images=images,
                        first_image=first_image,
                        first_row=first_row,
                        out_rows=out_rows,
                        out_w=p.out_w,
                        k=p.k,
                        h=in_rows,
                        first_h=first_h,
                        w=p.w,
                        r=p.r,
                        s=p.s,
                        **window_params(p),
                        y_n=x.y_n,
                        y_k=x.y_k,
                        y_h=x.y_h,
                        y_w=x.y_w,
                        **activation_params(p),
                    ),
                    (("columns", columns), *output_bindings(p, bias)),
                    grid_1d(ceil_div(images * p.k * out_rows * p.out_w, 256), limits),
                )
            )
        return Plan(
            p,
            self.name,
            config,
            tuple(passes),
            prepare=(prepare,),
            workspace=workspace,
            prepared=size,
            tables=tables.blob(),
        )

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        p, tile = problem, tile_of(config)
        m, pixels = p.k_group * p.r * p.s, p.n * p.h * p.w
        columns = 4 * p.k * p.r * p.s * pixels
        chunks = ceil_div(columns, min(facts.workspace_limit, facts.limits.max_binding))
        workgroups = ceil_div(m, tile.m) * p.groups * ceil_div(pixels, tile.p)
        gemm = roofline(
            p,
            facts,
            efficiency=tile_efficiency(tile),
            waste=tile_waste(tile, m, pixels),
            workgroups=workgroups,
            span=tile_span(tile, ceil_div(p.c_group, tile.k), workgroups, facts),
            dispatches=1 + 2 * chunks,
        )
        return gemm + 2 * columns / facts.bandwidth


def input_rows(p: ConvProblem, first: int, end: int) -> tuple[int, int]:
    """First and end of the input rows that reach output rows first..end-1; never none."""
    stride, span = p.stride[0], p.dilation[0] * (p.r - 1)
    low = ceil_div(first + p.padding[0] - span, stride)
    high = (end - 1 + p.padding[0]) // stride + 1
    low = min(max(low, 0), p.h - 1)
    return low, max(min(high, p.h), low + 1)


def _chunks(p: ConvProblem, budget: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """(first image, images, first row, rows, first input row, input rows) of each chunk."""
    per_row = 4 * p.k * p.r * p.s * p.w
    per_chunk = budget // (per_row * p.h)
    if per_chunk:
        for first in range(0, p.n, per_chunk):
            yield first, min(per_chunk, p.n - first), 0, p.out_h, 0, p.h
        return
    # Rows of the output whose contributions fit: at least one, or there is no way.
    rows = p.out_h
    while rows > 1 and _most_input_rows(p, rows) * per_row > budget:
        rows = ceil_div(rows, 2)
    if _most_input_rows(p, rows) * per_row > budget:
        raise AlgorithmRefusedError(
            f"needs {_most_input_rows(p, 1) * per_row} bytes of workspace for one output row, "
            f"may have {budget}"
        )
    for image in range(p.n):
        for first in range(0, p.out_h, rows):
            count = min(rows, p.out_h - first)
            low, high = input_rows(p, first, first + count)
            yield image, 1, first, count, low, high - low


def _most_input_rows(p: ConvProblem, rows: int) -> int:
    return max(
        high - low
        for first in range(0, p.out_h, rows)
        for low, high in [input_rows(p, first, min(first + rows, p.out_h))]
    )
