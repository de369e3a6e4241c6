"""Tiles of the GEMM kernels, as data, and the steps that gemm and implicit GEMM share."""

from __future__ import annotations

from typing import NamedTuple

from ..facts import Facts, Limits
from ..plan import Config, Pass, Region, Shader, ceil_div, grid_1d
from ..problem import IDENTITY, ConvProblem
from .base import params


class Tile(NamedTuple):
    """A workgroup computes m filters by p pixels, k products a step; an invocation tm by tp."""

    m: int
    p: int
    k: int
    tm: int
    tp: int

    @property
    def workgroup(self) -> int:
        return (self.m // self.tm) * (self.p // self.tp)

    @property
    def storage(self) -> int:
        """Bytes of workgroup memory."""
        return 4 * self.k * (self.m + self.p)

    def fits(self, limits: Limits) -> bool:
        return (
            self.workgroup <= min(limits.max_invocations, limits.max_workgroup_size)
            and self.storage <= limits.max_workgroup_storage
        )


TILES = (
    Tile(128, 128, 8, 8, 8),
    Tile(128, 128, 16, 8, 8),
    Tile(128, 64, 16, 8, 8),
    Tile(64, 128, 16, 8, 8),
    Tile(64, 64, 16, 8, 8),
    Tile(64, 64, 16, 8, 4),
    Tile(32, 128, 8, 8, 8),
    Tile(32, 64, 8, 4, 8),
    Tile(32, 32, 8, 4, 4),
    Tile(16, 64, 8, 4, 8),
)
"""Each divides evenly: whole vec4 loads an invocation for both staged tiles."""

FMA_ORDERS = ("snake", "zigzag", "halves")
"""Orders of the multiply-adds worth trying; which wins is a matter of the driver."""


def tile_of(config: Config) -> Tile:
    return Tile(*(int(config[name]) for name in ("tile_m", "tile_p", "tile_k", "tm", "tp")))


def tile_configs(
    facts: Facts, *, m: int, reduction: int, pixels: int, groups: int, itemsize: int
) -> list[Config]:
    """Configurations for m rows and that many columns, without tiles that are mostly empty.

    Empty where the packed weight is too large for one binding.
    """
    most = min(facts.limits.max_binding, facts.limits.max_buffer) // itemsize
    fitting = [
        t
        for t in TILES
        if t.fits(facts.limits) and packed_elements(t, m, reduction, groups) <= most
    ]
    useful = [t for t in fitting if t.m < 2 * max(m, 16) and t.p < 2 * max(pixels, 32)]
    orders = FMA_ORDERS[:1] if facts.software else FMA_ORDERS
    barriers = (True,) if facts.software else (True, False)
    return [
        {
            "tile_m": t.m,
            "tile_p": t.p,
            "tile_k": t.k,
            "tm": t.tm,
            "tp": t.tp,
            "order": order,
            "last_barrier": barrier,
            "unroll": not facts.software,  # CPU drivers take seconds to compile long kernels
        }
        for order in orders
        for barrier in barriers
        for t in useful or fitting[-1:]
    ]


def tile_efficiency(tile: Tile) -> float:
    """The share of the multiply-add rate that a full device reaches, fitted on an H200.

    Larger register tiles load less a multiply-add; each step costs as much as two products.
    """
    loads = 1 / tile.tm + 1 / tile.tp
    return 0.7 / (1 + 1.2 * (loads - 0.25)) * tile.k / (tile.k + 1.8)


def tile_span(tile: Tile, steps: int, workgroups: int, facts: Facts) -> float:
    """Seconds that one workgroup takes for that many steps, times the rounds of workgroups."""
    rounds = ceil_div(workgroups * tile.workgroup, 512 * facts.cores)
    step = 2 * facts.latency + tile.k * tile.tm * tile.tp * facts.cycle
    return rounds * steps * step


def tile_waste(tile: Tile, m: int, pixels: int) -> float:
    """Work done in whole tiles over work needed."""
    rows, columns = ceil_div(m, tile.m) * tile.m, ceil_div(pixels, tile.p) * tile.p
    return rows * columns / (m * pixels)


def gemm_shader(file: str, dtype: str, config: Config, **constants: int | bool | str) -> Shader:
    tile = tile_of(config)
    return Shader.of(
        file,
        dtype,
        TILE_M=tile.m,
        TILE_P=tile.p,
        TILE_K=tile.k,
        THREAD_M=tile.tm,
        THREAD_P=tile.tp,
        FMA_ORDER=str(config["order"]),
        LAST_BARRIER=bool(config["last_barrier"]),
        UNROLL_K=bool(config["unroll"]),
        **constants,
    )


def gemm_pass(
    config: Config,
    limits: Limits,
    bindings: tuple[tuple[str, Region], ...],
    *,
    ending: ConvProblem | None = None,
    dtype: str,
    b_dtype: str,
    y_dtype: str,
    groups: int,
    images: int,
    image_pixels: int,
    m: int,
    reduction: int,
    b: tuple[int, int, int, int, int],
    y: tuple[int, int, int, int, int],
    one_bias: bool = False,
) -> Pass:
    """y[m, p] = A[m, k] * B[k, p] + bias for all groups and images, ending as that problem does.

    ``b`` and ``y`` are (base, over groups, over images, over k or m, over pixels) in elements.
    ``dtype`` is that of A and the bias, of which all groups share m values with ``one_bias``.
    Pixels side by side that come in fours go through a kernel that moves four at a time, and so
    do k and m.
    """
    tile = tile_of(config)
    pixels = images * image_pixels
    m_tiles, p_tiles = ceil_div(m, tile.m), ceil_div(pixels, tile.p)
    bias_g = 0 if one_bias else m
    strides = dict(zip(("b_base", "b_g", "b_n", "b_k", "b_p"), b, strict=True))
    strides |= dict(zip(("y_base", "y_g", "y_n", "y_m", "y_p"), y, strict=True))
    sizes = {"pixels": pixels, "image_pixels": image_pixels}
    if _fours(strides, b_p=image_pixels, y_p=image_pixels):
        file = "gemm_vec4"
        sizes = {"quads": pixels // 4, "image_quads": image_pixels // 4}
        sizes |= {"reduction": reduction, "m": m, "bias_g": bias_g}
        strides = {name: v // 4 for name, v in strides.items() if name not in ("b_p", "y_p")}
    elif _fours(strides, b_k=reduction, y_m=m):
        file = "gemm_nhwc"
        sizes |= {"k_quads": reduction // 4, "m_quads": m // 4, "bias_g": bias_g // 4}
        strides = {name: v // 4 for name, v in strides.items() if name not in ("b_k", "y_m")}
    else:
        file = "gemm"
        sizes |= {"reduction": reduction, "m": m, "bias_g": bias_g}
    shader = gemm_shader(file, dtype, config, In=b_dtype, Out=y_dtype)
    activation = IDENTITY if ending is None else ending.activation
    return Pass(
        shader if ending is None else shader.ending_as(ending),
        params(
            **sizes,
            **strides,
            m_tiles=m_tiles,
            p_tiles=p_tiles,
            groups=groups,
            k_steps=ceil_div(reduction, tile.k),
            act_a=activation.a,
            act_b=activation.b,
        ),
        bindings,
        grid_1d(m_tiles * p_tiles * groups, limits),
    )


def _fours(strides: dict[str, int], **lengths: int) -> bool:
    """Whether elements lie side by side along the axes of these strides, in whole fours."""
    others = (v for name, v in strides.items() if name not in lengths)
    return all(strides[name] == 1 for name in lengths) and not any(
        v % 4 for v in (*others, *lengths.values())
    )


def packed_elements(tile: Tile, m: int, reduction: int, groups: int) -> int:
    return groups * ceil_div(m, tile.m) * tile.m * ceil_div(reduction, tile.k) * tile.k


def pack_pass(
    problem: ConvProblem,
    tile: Tile,
    taps: Region,
    packed: Region,
    limits: Limits,
    *,
    m: int,
    reduction: int,
    w_g: int,
    w_m: int,
) -> Pass:
    """The pass that brings the weight into the order in which GEMM kernels read it."""
    blocks = (
        problem.groups
        * ceil_div(m, tile.m)
        * (tile.m // 16)
        * ceil_div(ceil_div(reduction, tile.k) * tile.k, 16)
    )
    return Pass(
        Shader.of("pack_weights", problem.dtype, TILE_M=tile.m),
        params(
            m=m,
            m_tiles=ceil_div(m, tile.m),
            reduction=reduction,
            k_padded=ceil_div(reduction, tile.k) * tile.k,
            groups=problem.groups,
            w_g=w_g,
            w_m=w_m,
        ),
        (("weight", Region("weight")), ("taps", taps), ("packed", packed)),
        grid_1d(blocks, limits),
    )


def weight_too_large(problem: ConvProblem, facts: Facts) -> str:
    """Why a problem has no tile_configs."""
    return (
        f"needs the packed weight within one binding of {facts.limits.max_binding} bytes, got "
        f"{problem.weight_bytes} bytes of weights ({problem.k_group} filters a group)"
    )
