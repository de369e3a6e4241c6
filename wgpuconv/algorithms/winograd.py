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
from ..facts import Facts, Limits
from ..plan import Config, Constant, Pass, Plan, Region, Shader, Tables, align, ceil_div, grid_1d
from ..problem import ConvProblem
from .base import Algorithm, activation_params, bias_region, output_bindings, params, strides
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
LEAST_TERMS = {2: 288, 3: 288, 4: 576}
"""Terms of a sum (32 or 64 channels of 3 x 3) by the outputs an axis of a tile (the fewer of both
axes): with fewer, the RMS error on zero-mean data may be twice that of float32 sums in order, the
direct method's, which grows with the terms (see bilinear.py), and the transforms do not pay."""
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
        least = min(LEAST_TERMS.values())
        if _terms(p) < least:
            less = ", less for the zeros in the phases of the stride" if p.stride != (1, 1) else ""
            return (
                f"needs sums of at least {least} terms, got {int(_terms(p))} ({p.c_group} channels "
                f"of {p.r} x {p.s}{less})"
            )
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
        passes = _Passes(problem, config, facts.limits)
        limit = min(workspace_limit, facts.limits.max_binding, facts.limits.max_buffer)
        parts = list(_parts(passes.grid.tiles, passes.bytes_per_tile, limit))
        most = passes.padded(max(count for _, count in parts))
        return Plan(
            problem,
            self.name,
            config,
            tuple(step for part in parts for step in passes.part(*part)),
            prepare=(passes.weight(),),
            workspace=passes.transformed(most),
            prepared=passes.packed_bytes,
            staged=(("product", passes.product(most)),),
            tables=passes.tables.blob(),
            bilinear=passes.transforms,
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
        traffic = 2 * per_tile * grid.tiles + 2 * weight
        traffic += p.input_bytes + p.out_bytes + p.residual_bytes
        return gemm + traffic / facts.bandwidth + (1 + 3 * parts) * facts.launch


class _Passes:
    """The passes of one problem with one configuration, and the sizes of what they exchange."""

    def __init__(self, problem: ConvProblem, config: Config, limits: Limits) -> None:
        p, self.tile = problem, tile_of(config)
        self.problem, self.config, self.limits = problem, config, limits
        self.alpha = int(config["alpha"])
        self.grid, self.transforms = _Grid.of(p, self.alpha), _transforms(p, self.alpha)
        self.products = self.alpha * self.alpha * p.groups
        self.rows = _channels(p)
        # Of NHWC the matrices are tiles by channels, and tiles by filters; these come in fours.
        self.last = p.layout == "NHWC"
        self.channels = align(self.rows, 4) if self.last else self.rows
        self.filters = align(p.k_group, 4) if self.last else p.k_group
        self.packed_bytes = 4 * packed_elements(self.tile, p.k_group, self.rows, self.products)
        self.packed = Region("prepared", 0, self.packed_bytes)
        self.tables = Tables(limits)
        self.bias = bias_region(p, self.tables)
        self.no_bias = self.tables.add(bytes(4 * self.filters))

    @property
    def bytes_per_tile(self) -> int:
        return self.transformed(1) + self.product(1)

    def padded(self, tiles: int) -> int:
        """From one channel's tiles to the next's; NHWC has channels next to each other."""
        return tiles if self.last else align(tiles, 4)

    def transformed(self, tiles: int) -> int:
        """Bytes of that many transformed tiles of the input."""
        return 4 * self.products * self.channels * tiles

    def product(self, tiles: int) -> int:
        """Bytes of the products of that many tiles."""
        return 4 * self.products * self.filters * tiles

    def weight(self) -> Pass:
        steps = ceil_div(self.rows, self.tile.k)
        return weight_pass(
            self.problem,
            self.transforms,
            self.packed,
            tile=self.tile.m,
            channels=steps * self.tile.k,
            limits=self.limits,
        )

    def part(self, first: int, count: int) -> tuple[Pass, Pass, Pass]:
        """Those that compute so many tiles of the output."""
        tiles = self.padded(count)
        transformed = Region("workspace", 0, self.transformed(tiles))
        product = Region("product", 0, self.product(tiles))
        part = {
            "tiles": count,
            "first_tile": first,
            "image_tiles": self.grid.height * self.grid.width,
            "row_tiles": self.grid.width,
        }
        return (
            self._input(part, tiles, transformed),
            self._product(tiles, transformed, product),
            self._output(part, tiles, product),
        )

    def _input(self, part: dict[str, int], tiles: int, transformed: Region) -> Pass:
        p, x, (down, across) = self.problem, strides(self.problem), self.transforms
        if self.last:
            workgroups = ceil_div(part["tiles"] * p.groups * self.channels, WORKGROUP)
        else:
            workgroups = ceil_div(part["tiles"], WORKGROUP) * p.groups * self.rows
        return Pass(
            self._shader(
                "winograd_input",
                OUT_H=down.out,
                OUT_W=across.out,
                CHANNELS_LAST=self.last,
                BT_H=_flat(down.bt),
                BT_W=_flat(across.bt),
            ),
            params(
                **part,
                pitch=self.channels if self.last else tiles,
                channels=p.c,
                c_group=p.c_group,
                h=p.h,
                w=p.w,
                stride_h=p.stride[0],
                stride_w=p.stride[1],
                pad_top=p.padding[0],
                pad_left=p.padding[2],
                x_n=x.x_n,
                x_c=x.x_c,
                x_h=x.x_h,
                x_w=x.x_w,
            ),
            (("x", Region("input")), ("transformed", transformed)),
            grid_1d(workgroups, self.limits),
        )

    def _product(self, tiles: int, transformed: Region, product: Region) -> Pass:
        channels, filters = self.channels, self.filters
        return gemm_pass(
            self.config,
            self.limits,
            (("b", transformed), ("packed", self.packed), ("bias", self.no_bias), ("y", product)),
            dtype="f32",
            b_dtype="f32",
            y_dtype="f32",
            groups=self.products,
            images=1,
            image_pixels=tiles,
            m=filters,
            reduction=channels,
            b=(0, channels * tiles, 0, *((1, channels) if self.last else (tiles, 1))),
            y=(0, filters * tiles, 0, *((1, filters) if self.last else (tiles, 1))),
            one_bias=True,
        )

    def _output(self, part: dict[str, int], tiles: int, product: Region) -> Pass:
        p, y, (down, across) = self.problem, strides(self.problem), self.transforms
        if self.last:
            workgroups = ceil_div(part["tiles"] * p.k, WORKGROUP)
        else:
            workgroups = ceil_div(part["tiles"], WORKGROUP) * p.k
        return Pass(
            self._shader(
                "winograd_output_nhwc" if self.last else "winograd_output",
                OUT_H=down.out,
                OUT_W=across.out,
                A_H=_flat(down.a),
                A_W=_flat(across.a),
            ).ending_as(p),
            params(
                **part,
                **({} if self.last else {"y_k": y.y_k}),
                pitch=self.filters if self.last else tiles,
                filters=p.k,
                k_group=p.k_group,
                out_h=p.out_h,
                out_w=p.out_w,
                y_n=y.y_n,
                y_h=y.y_h,
                y_w=y.y_w,
                **activation_params(p),
            ),
            (("product", product), *output_bindings(p, self.bias)),
            grid_1d(workgroups, self.limits),
        )

    def _shader(self, file: str, **constants: Constant) -> Shader:
        return _shader(self.problem, self.transforms, file, **constants)


def weight_pass(
    problem: ConvProblem,
    transforms: tuple[Bilinear, Bilinear],
    packed: Region,
    *,
    tile: int,
    channels: int,
    limits: Limits,
) -> Pass:
    """Transforms the weight, in tiles of so many filters, each with so many channels of a group."""
    p, (down, across) = problem, transforms
    tiles = ceil_div(p.k_group, tile)
    return Pass(
        _shader(
            p,
            transforms,
            "winograd_weight",
            TILE_M=tile,
            TAPS_H=down.taps,
            TAPS_W=across.taps,
            G_H=_flat(down.g),
            G_W=_flat(across.g),
        ),
        params(
            m=p.k_group,
            m_tiles=tiles,
            c_group=p.c_group,
            k_padded=channels,
            groups=p.groups,
            r=p.r,
            s=p.s,
            stride_h=p.stride[0],
            stride_w=p.stride[1],
        ),
        (("weight", Region("weight")), ("packed", packed)),
        grid_1d(ceil_div(p.groups * tiles * tile * channels, WORKGROUP), limits),
    )


def _shader(
    problem: ConvProblem, transforms: tuple[Bilinear, Bilinear], file: str, **constants: Constant
) -> Shader:
    down, across = transforms
    sizes = {"ALPHA_H": down.alpha, "ALPHA_W": across.alpha, "WORKGROUP": WORKGROUP}
    return Shader.of(file, problem.dtype, **sizes, **constants)


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


def _terms(p: ConvProblem) -> float:
    """Terms of a sum, made fewer by the zeros that fill the phases of a stride: they add to the
    error as terms do, and sums in order, with which it is compared, have none."""
    down, across = _taps(p)
    return p.reduction**2 / (_channels(p) * down * across)


def _outs(p: ConvProblem, alpha: int) -> tuple[int, int]:
    down, across = _taps(p)
    return alpha + 1 - down, alpha + 1 - across


def _fits(p: ConvProblem, alpha: int) -> bool:
    out = min(_outs(p, alpha))
    return out in LEAST_TERMS and _terms(p) >= LEAST_TERMS[out]


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
