"""im2col, then GEMM: the columns matrix is written out, in chunks that bound its memory.

Chellapilla, Puri, Simard: High Performance Convolutional Neural Networks for Document
Processing (2006).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..errors import AlgorithmRefusedError
from ..facts import Facts
from ..plan import Config, Pass, Plan, Region, Shader, Tables, ceil_div, grid_1d
from ..problem import ConvProblem
from .base import Algorithm, bias_region, output_bindings, params, roofline, strides, window_params
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

PLACING = 400
"""Operations that finding an element's place takes: five divisions of 40 multiply-adds each."""


def weight_offsets(offsets: np.ndarray, padded: int) -> bytes:
    """The ``taps`` table of pack_weights.wgsl where only the weight's offset matters."""
    table = np.zeros((padded, 4), dtype="<i4")
    table[:, 2] = np.arange(padded)
    table[: len(offsets), 3] = offsets
    return table.tobytes()


class Im2colGemm(Algorithm):
    name = "im2col_gemm"
    summary = "writes the columns matrix in chunks of the batch, then a tiled GEMM"
    ops = ("conv2d",)
    shaders = ("im2col", "gemm", "gemm_vec4", "pack_weights")

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        p = problem
        pixels = p.n * p.out_h * p.out_w
        return tile_configs(
            facts,
            m=p.k_group,
            reduction=p.reduction,
            pixels=pixels,
            groups=p.groups,
            itemsize=p.itemsize,
        )

    def refuse(self, problem: ConvProblem, facts: Facts) -> str | None:
        return None if self.configs(problem, facts) else weight_too_large(problem, facts)

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p, limits, tile, x = problem, facts.limits, tile_of(config), strides(problem)
        tables = Tables(limits)
        bias = bias_region(p, tables)
        rows = p.c * p.r * p.s
        out_pixels = p.out_h * p.out_w
        budget = min(workspace_limit, limits.max_binding, limits.max_buffer)
        chunks = list(_chunks(p.n, out_pixels, rows * p.itemsize, budget))

        steps = ceil_div(p.reduction, tile.k)
        taps = tables.add(weight_offsets(np.arange(p.reduction), steps * tile.k))
        size = packed_elements(tile, p.k_group, p.reduction, p.groups) * p.itemsize
        packed = Region("prepared", 0, size)
        prepare = pack_pass(
            p,
            tile,
            taps,
            packed,
            limits,
            m=p.k_group,
            reduction=p.reduction,
            w_g=p.k_group * p.reduction,
            w_m=p.reduction,
        )
        passes: list[Pass] = []
        workspace = 0
        for first_image, images, first_pixel, pixels in chunks:
            elements = images * rows * pixels
            used = -(-elements * p.itemsize // 4) * 4
            workspace = max(workspace, used)
            columns = Region("workspace", 0, used)
            passes.append(
                Pass(
                    Shader.of("im2col", p.dtype),
                    params(
                        images=images,
                        first_image=first_image,
                        pixels=pixels,
                        first_pixel=first_pixel,
                        channels=p.c,
                        h=p.h,
                        w=p.w,
                        out_w=p.out_w,
                        r=p.r,
                        s=p.s,
                        **window_params(p),
                        x_n=x.x_n,
                        x_c=x.x_c,
                        x_h=x.x_h,
                        x_w=x.x_w,
                    ),
                    (("x", Region("input")), ("columns", columns)),
                    grid_1d(ceil_div(elements, 256), limits),
                )
            )
            passes.append(
                gemm_pass(
                    config,
                    limits,
                    (("b", columns), ("packed", packed), *output_bindings(p, bias)),
                    ending=p,
                    dtype=p.dtype,
                    groups=p.groups,
                    b_dtype=p.dtype,
                    y_dtype=p.dtype,
                    images=images,
                    image_pixels=pixels,
                    m=p.k_group,
                    reduction=p.reduction,
                    b=(0, p.reduction * pixels, rows * pixels, pixels, 1),
                    y=(
                        first_image * x.y_n + first_pixel * x.y_w,
                        p.k_group * x.y_k,
                        x.y_n,
                        x.y_k,
                        x.y_w,
                    ),
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
        pixels = p.n * p.out_h * p.out_w
        columns = p.c * p.r * p.s * pixels * p.itemsize
        chunks = ceil_div(columns, min(facts.workspace_limit, facts.limits.max_binding))
        workgroups = ceil_div(p.k_group, tile.m) * p.groups * ceil_div(pixels, tile.p)
        gemm = roofline(
            p,
            facts,
            efficiency=tile_efficiency(tile),
            waste=tile_waste(tile, p.k_group, pixels),
            workgroups=workgroups,
            span=tile_span(tile, ceil_div(p.reduction, tile.k), workgroups, facts),
            extra_bytes=columns,
            dispatches=1 + 2 * chunks,
        )
        packed = packed_elements(tile, p.k_group, p.reduction, p.groups) * p.itemsize
        serial = 4 * packed + p.out_bytes  # as in implicit GEMM
        placing = columns // p.itemsize * PLACING / facts.flops
        return gemm + max(placing, columns / facts.bandwidth) + serial / facts.bandwidth


def _chunks(
    images: int, pixels: int, bytes_per_pixel: int, budget: int
) -> Iterator[tuple[int, int, int, int]]:
    """(first image, images, first pixel, pixels) of chunks whose columns fit the budget.

    Whole images where one fits, the last chunk taking what remains; else parts of one image.
    """
    per_chunk = budget // (bytes_per_pixel * pixels)
    if per_chunk:
        for first in range(0, images, per_chunk):
            yield first, min(per_chunk, images - first), 0, pixels
        return
    part = budget // bytes_per_pixel
    if not part:
        raise AlgorithmRefusedError(
            f"needs {bytes_per_pixel} bytes of workspace for one output pixel's column, "
            f"may have {budget}"
        )
    for image in range(images):
        for first in range(0, pixels, part):
            yield image, 1, first, min(part, pixels - first)
