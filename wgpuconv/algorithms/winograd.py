"""Winograd's minimal filtering: tiles are transformed, multiplied point by point, and back.

Three passes: the input's tiles are transformed, one matrix product for each of the alpha x alpha
points sums over channels, and the products are transformed to outputs. With F(4 x 4, 3 x 3) that
takes 36 products a tile and channel where a direct method takes 144.

Lavin, Gray: Fast Algorithms for Convolutional Neural Networks (CVPR 2016). The matrices, and why
their points are what they are: bilinear.py. With a stride the input is taken apart into images of
stride 1 (polyphase), whose outputs add up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..bilinear import ALPHAS, Bilinear, Matrix, cook_toom
from ..errors import AlgorithmRefusedError
from ..facts import Facts
from ..plan import Config, Pass, Plan, Region, Shader, Tables, align, ceil_div, grid_1d
from ..problem import Activation, ConvProblem
from .base import Algorithm, activation_params, bias_region, params, strides
from .tiles import (
    gemm_pass,
    packed_elements,
    tile_configs,
    tile_efficiency,
    tile_of,
    tile_span,
    tile_waste,
)

TAPS = range(3, 6)
"""Taps an axis, of one phase: fewer save nothing."""
LEAST_CHANNELS = {2: 32, 3: 32, 4: 64}
"""Channels of a group by the outputs an axis of a tile (the fewer of both axes): with fewer, the
RMS error on zero-mean data may be twice that of float32 sums in order, the direct method's (see
bilinear.py), and the transforms do not pay."""
WORKGROUP = 64


class Winograd(Algorithm):
    name = "winograd"
    summary = "transformed tiles: fewer products, a matrix product for each point of a tile"
    ops = ("conv2d",)
    shaders = (
        "winograd_input",
        "winograd_weight",
        "winograd_output",
        "winograd_output_nhwc",
        "gemm_nhwc",
        "gemm_vec4",
    )

    def refuse(self, problem: ConvProblem, facts: Facts) -> str | None:
        p = problem
        if p.dilation != (1, 1):
            return f"needs dilation 1, got {p.dilation[0]},{p.dilation[1]}"
        taps = _taps(p)
        if not all(each in TAPS for each in taps):
            return (
                f"needs {TAPS[0]} to {TAPS[-1]} taps an axis (of each phase of the stride), "
                f"got {taps[0]} x {taps[1]}"
            )
        least = min(LEAST_CHANNELS.values())
        if p.c_group < least:
            return f"needs at least {least} channels a group, got {p.c_group}"
        if not self.configs(p, facts):
            return (
                f"needs the transformed weight within one binding of {facts.limits.max_binding} "
                f"bytes, got {p.k} x {p.c_group} filters of {p.r} x {p.s}"
            )
        return None

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        p = problem
        return [
            {"alpha": alpha, **config}
            for alpha in ALPHAS
            if _fits(p, alpha)
            for config in tile_configs(
                facts,
                m=p.k_group,
                reduction=_channels(p),
                pixels=_Grid.of(p, alpha).tiles,
                groups=alpha * alpha * p.groups,
                itemsize=4,
            )
        ]

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p, limits, tile = problem, facts.limits, tile_of(config)
        alpha = int(config["alpha"])
        grid, (down, across) = _Grid.of(p, alpha), _transforms(p, alpha)
        rows, points = _channels(p), alpha * alpha
        products = points * p.groups
        size = 4 * packed_elements(tile, p.k_group, rows, products)
        packed = Region("prepared", 0, size)
        # Of NHWC the matrices are tiles by channels, and tiles by filters; these come in fours.
        last = p.layout == "NHWC"
        channels, filters = (align(rows, 4), align(p.k_group, 4)) if last else (rows, p.k_group)
        tables = Tables(limits)
        bias, no_bias = bias_region(p, tables), tables.add(bytes(4 * filters))
        x = strides(p)
        tiling = {"image_tiles": grid.height * grid.width, "row_tiles": grid.width}
        phases = {"stride_h": p.stride[0], "stride_w": p.stride[1]}
        sizes = {"ALPHA_H": alpha, "ALPHA_W": alpha, "WORKGROUP": WORKGROUP}

        prepare = Pass(
            Shader.of(
                "winograd_weight",
                p.dtype,
                **sizes,
                TILE_M=tile.m,
                TAPS_H=down.taps,
                TAPS_W=across.taps,
                G_H=_flat(down.g),
                G_W=_flat(across.g),
            ),
            params(
                m=p.k_group,
                m_tiles=ceil_div(p.k_group, tile.m),
                c_group=p.c_group,
                k_padded=ceil_div(rows, tile.k) * tile.k,
                groups=p.groups,
                r=p.r,
                s=p.s,
                **phases,
            ),
            (("weight", Region("weight")), ("packed", packed)),
            grid_1d(ceil_div(size // (4 * points), WORKGROUP), limits),
        )
        passes: list[Pass] = []
        workspace = product_size = 0
        budget = min(workspace_limit, limits.max_binding, limits.max_buffer)
        for first, count in _parts(grid.tiles, 4 * products * (channels + filters), budget):
            tiles = count if last else align(count, 4)
            part = {"tiles": count, "first_tile": first, **tiling}
            transformed = Region("workspace", 0, 4 * products * channels * tiles)
            product = Region("product", 0, 4 * products * filters * tiles)
            workspace = max(workspace, 4 * products * channels * tiles)
            product_size = max(product_size, 4 * products * filters * tiles)
            blocks = ceil_div(count, WORKGROUP)
            passes += [
                Pass(
                    Shader.of(
                        "winograd_input",
                        p.dtype,
                        **sizes,
                        OUT_H=down.out,
                        OUT_W=across.out,
                        CHANNELS_LAST=last,
                        BT_H=_flat(down.bt),
                        BT_W=_flat(across.bt),
                    ),
                    params(
                        **part,
                        pitch=channels if last else tiles,
                        channels=p.c,
                        c_group=p.c_group,
                        h=p.h,
                        w=p.w,
                        **phases,
                        pad_top=p.padding[0],
                        pad_left=p.padding[2],
                        x_n=x.x_n,
                        x_c=x.x_c,
                        x_h=x.x_h,
                        x_w=x.x_w,
                    ),
                    (("x", Region("input")), ("transformed", transformed)),
                    grid_1d(
                        ceil_div(count * p.groups * channels, WORKGROUP)
                        if last
                        else blocks * p.groups * rows,
                        limits,
                    ),
                ),
                gemm_pass(
                    config,
                    limits,
                    (
                        ("b", transformed),
                        ("packed", packed),
                        ("bias", no_bias),
                        ("y", product),
                    ),
                    activation=Activation(),
                    dtype="f32",
                    b_dtype="f32",
                    y_dtype="f32",
                    groups=products,
                    images=1,
                    image_pixels=tiles,
                    m=filters,
                    reduction=channels,
                    b=(0, channels * tiles, 0, *((1, channels) if last else (tiles, 1))),
                    y=(0, filters * tiles, 0, *((1, filters) if last else (tiles, 1))),
                    one_bias=True,
                ),
                Pass(
                    Shader.of(
                        "winograd_output_nhwc" if last else "winograd_output",
                        p.dtype,
                        p.activation,
                        **sizes,
                        OUT_H=down.out,
                        OUT_W=across.out,
                        A_H=_flat(down.a),
                        A_W=_flat(across.a),
                    ),
                    params(
                        **part,
                        **({} if last else {"y_k": x.y_k}),
                        pitch=filters if last else tiles,
                        filters=p.k,
                        k_group=p.k_group,
                        out_h=p.out_h,
                        out_w=p.out_w,
                        y_n=x.y_n,
                        y_h=x.y_h,
                        y_w=x.y_w,
                        **activation_params(p),
                    ),
                    (("product", product), ("bias", bias), ("y", Region("out"))),
                    grid_1d(ceil_div(count * p.k, WORKGROUP) if last else blocks * p.k, limits),
                ),
            ]
        return Plan(
            p,
            self.name,
            config,
            tuple(passes),
            prepare=(prepare,),
            workspace=workspace,
            prepared=size,
            staged=(("product", product_size),),
            tables=tables.blob(),
            bilinear=(down, across),
        )

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        p, tile = problem, tile_of(config)
        alpha = int(config["alpha"])
        grid, rows, products = _Grid.of(p, alpha), _channels(p), alpha * alpha * p.groups
        per_tile = 4 * alpha * alpha * (p.groups * rows + p.k)
        parts = ceil_div(per_tile * grid.tiles, facts.workspace_limit)
        workgroups = ceil_div(p.k_group, tile.m) * products * ceil_div(grid.tiles, tile.p)
        waste = tile_waste(tile, p.k_group, grid.tiles)
        waste *= ceil_div(workgroups, facts.cores) * facts.cores / workgroups
        flop = 2 * products * p.k_group * rows * grid.tiles * waste
        span = tile_span(tile, ceil_div(rows, tile.k), workgroups, facts)
        gemm = max(flop / (facts.flops * tile_efficiency(tile)), span)
        weight = 4 * packed_elements(tile, p.k_group, rows, products)
        # Each transformed value is written, and read again.
        traffic = 2 * per_tile * grid.tiles + 2 * weight + p.input_bytes + p.out_bytes
        return gemm + traffic / facts.bandwidth + (1 + 3 * parts) * facts.launch


class _Grid(NamedTuple):
    """Tiles of the output."""

    images: int
    height: int
    width: int

    @classmethod
    def of(cls, p: ConvProblem, alpha: int) -> _Grid:
        down, across = _outs(p, alpha)
        return cls(p.n, ceil_div(p.out_h, down), ceil_div(p.out_w, across))

    @property
    def tiles(self) -> int:
        return self.images * self.height * self.width


def _taps(p: ConvProblem) -> tuple[int, int]:
    """Taps down and across that one phase of the stride has."""
    return ceil_div(p.r, p.stride[0]), ceil_div(p.s, p.stride[1])


def _channels(p: ConvProblem) -> int:
    """Channels of a group, those of every phase."""
    return p.c_group * p.stride[0] * p.stride[1]


def _outs(p: ConvProblem, alpha: int) -> tuple[int, int]:
    down, across = _taps(p)
    return alpha + 1 - down, alpha + 1 - across


def _fits(p: ConvProblem, alpha: int) -> bool:
    out = min(_outs(p, alpha))
    return out in LEAST_CHANNELS and p.c_group >= LEAST_CHANNELS[out]


def _transforms(p: ConvProblem, alpha: int) -> tuple[Bilinear, Bilinear]:
    (down, across), (r, s) = _outs(p, alpha), _taps(p)
    return cook_toom(down, r), cook_toom(across, s)


def _flat(matrix: Matrix) -> tuple[float, ...]:
    return tuple(value for row in matrix for value in row)


def _parts(tiles: int, per_tile: int, budget: int) -> Iterator[tuple[int, int]]:
    """(first tile, tiles) of parts of about the same size whose workspace fits the budget."""
    most = budget // per_tile // 4 * 4
    if not most:
        raise AlgorithmRefusedError(
            f"needs {4 * per_tile} bytes of workspace for four tiles, may have {budget}"
        )
    size = align(ceil_div(tiles, ceil_div(tiles, most)), 4)
    for first in range(0, tiles, size):
        yield first, min(size, tiles - first)
