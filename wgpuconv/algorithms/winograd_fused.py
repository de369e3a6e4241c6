"""Winograd's F(2 x 2, 3 x 3) in one dispatch, for a few channels.

winograd's passes write and read 4 values a pixel and channel, and 4 a pixel and filter: with few of
either that takes longer than to compute. Here tiles are transformed into workgroup memory, and the
sums of their points stay in registers. 16 products a tile and channel take the place of 36.
"""

from __future__ import annotations

from typing import NamedTuple

from ..bilinear import cook_toom
from ..facts import Facts, Limits
from ..plan import Config, Pass, Plan, Region, Shader, Tables, ceil_div, grid_1d
from ..problem import ConvProblem
from .base import (
    Algorithm,
    activation_params,
    bias_region,
    check_vectors,
    in_vectors,
    output_bindings,
    params,
    roofline,
    vector_params,
)
from .winograd import weight_pass

TRANSFORM = cook_toom(2, 3)
POINTS = TRANSFORM.alpha**2
LEAST_CHANNELS = 3
"""Of a group: with fewer, transforms take longer than the products that they save, and results err
more (RMS, over sums in order: 2.0 with one channel, 1.2 with three, 0.7 with sixteen)."""


class Block(NamedTuple):
    """What a workgroup computes, and the channels that it transforms at a time."""

    tiles: int
    """A multiple of 32."""
    filters: int
    """A multiple of 8."""
    channels: int
    """At most filters / 4: an invocation transforms one tile of one channel."""

    @classmethod
    def of(cls, config: Config) -> Block:
        return cls(*(int(config[name]) for name in cls._fields))

    @property
    def workgroup(self) -> int:
        """Invocations: each sums 4 points of 4 tiles and 4 filters."""
        return self.tiles * self.filters // 4

    @property
    def staged(self) -> int:
        """Quads of workgroup memory: a step's tiles and weights, or half of the sums."""
        step = self.channels * POINTS * (self.tiles + self.filters) // 4
        return max(step, self.tiles * self.filters)

    def fits(self, limits: Limits) -> bool:
        return (
            self.workgroup <= min(limits.max_invocations, limits.max_workgroup_size)
            and 16 * self.staged <= limits.max_workgroup_storage
        )

    def tile_blocks(self, p: ConvProblem) -> int:
        return ceil_div(p.n * ceil_div(p.out_h, 2) * ceil_div(p.out_w, 2), self.tiles)

    def filter_blocks(self, p: ConvProblem) -> int:
        """Of a group."""
        return ceil_div(p.k_group, self.filters)

    def workgroups(self, p: ConvProblem) -> int:
        return self.tile_blocks(p) * self.filter_blocks(p) * p.groups

    def steps(self, p: ConvProblem) -> int:
        return ceil_div(p.c_group, self.channels)

    def packed_bytes(self, p: ConvProblem) -> int:
        """Of the transformed weight."""
        filters = p.groups * self.filter_blocks(p) * self.filters
        return 4 * POINTS * filters * self.steps(p) * self.channels


BLOCKS = (Block(32, 16, 4), Block(32, 24, 4), Block(64, 8, 2))
"""Within the workgroup memory that WebGPU grants everywhere."""
LARGE_BLOCKS = (Block(32, 32, 8),)


class WinogradFused(Algorithm):
    name = "winograd_fused"
    summary = "transformed tiles that never leave the workgroup; for few channels of 3 x 3"
    ops = ("conv2d",)
    shaders = ("winograd_fused", "winograd_weight")

    def refuse(self, problem: ConvProblem, facts: Facts) -> str | None:
        p = problem
        if (p.r, p.s) != (TRANSFORM.taps, TRANSFORM.taps):
            return f"needs a kernel of 3 x 3, got {p.r} x {p.s}"
        if p.stride != (1, 1) or p.dilation != (1, 1):
            return (
                f"needs stride and dilation 1, got stride {p.stride[0]},{p.stride[1]} and dilation "
                f"{p.dilation[0]},{p.dilation[1]}"
            )
        if p.layout != "NCHW":
            return f"needs pixels side by side (NCHW), got {p.layout}"
        if p.c_group < LEAST_CHANNELS:
            return f"needs at least {LEAST_CHANNELS} channels a group, got {p.c_group}"
        if not self.configs(p, facts):
            return (
                f"needs the transformed weight within one binding of {facts.limits.max_binding} "
                f"bytes, got {p.k} x {p.c_group} filters"
            )
        return None

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        p, limits = problem, facts.limits
        blocks = BLOCKS if facts.software else (*BLOCKS, *LARGE_BLOCKS)
        fitting = dict.fromkeys(
            block._replace(channels=min(block.channels, p.c_group))
            for block in blocks
            if block.fits(limits)
            and block.packed_bytes(p) <= min(limits.max_binding, limits.max_buffer)
        )
        useful = [block for block in fitting if block.filters < 2 * max(p.k_group, 8)]
        return [
            {
                **block._asdict(),
                "pairs": pairs,
                "unroll": not facts.software,  # CPU drivers take seconds to compile long kernels
            }
            for pairs in ((True,) if in_vectors(p, 2) else (False,))
            for block in useful
        ]

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        p, block, pairs = problem, Block.of(config), bool(config["pairs"])
        columns = 2 if pairs else 1
        check_vectors(p, columns)
        tables, steps = Tables(facts.limits), block.steps(p)
        rows, across = ceil_div(p.out_h, 2), ceil_div(p.out_w, 2)
        packed = Region("prepared", 0, block.packed_bytes(p))
        suffix = "h" if p.dtype == "f16" else "f"
        shader = Shader.of(
            "winograd_fused",
            p.dtype,
            Vector=f"vec2{suffix}" if pairs else p.dtype,
            Sums="vec2f" if pairs else "f32",
            COLUMNS=columns,
            SHIFT=p.padding[2] % columns,
            TILES=block.tiles,
            FILTERS=block.filters,
            CHANNELS=block.channels,
            STAGED=block.staged,
            MASKED=_masked(p, block),
            UNROLL=bool(config["unroll"]),
        )
        values = params(
            tiles=p.n * rows * across,
            image_tiles=rows * across,
            row_tiles=across,
            tile_blocks=block.tile_blocks(p),
            filter_blocks=block.filter_blocks(p),
            groups=p.groups,
            steps=steps,
            weight_point=block.packed_bytes(p) // (16 * POINTS),
            c_group=p.c_group,
            k_group=p.k_group,
            h=p.h,
            out_h=p.out_h,
            pad_top=p.padding[0],
            **vector_params(p, columns),
            **activation_params(p),
        )
        step = Pass(
            shader.ending_as(p),
            values,
            (
                ("x", Region("input")),
                ("packed", packed),
                *output_bindings(p, bias_region(p, tables)),
            ),
            grid_1d(block.workgroups(p), facts.limits),
        )
        transforms = (TRANSFORM, TRANSFORM)
        weight = weight_pass(
            p,
            transforms,
            packed,
            tile=block.filters,
            channels=steps * block.channels,
            limits=facts.limits,
        )
        return Plan(
            p,
            self.name,
            config,
            (step,),
            prepare=(weight,),
            prepared=block.packed_bytes(p),
            tables=tables.blob(),
            bilinear=transforms,
        )

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        p, block = problem, Block.of(config)
        slots = block.workgroups(p) * block.workgroup * _slots(p, block, bool(config["pairs"]))
        step = 2 * facts.latency + 64 * block.channels * facts.cycle
        return roofline(
            p,
            facts,
            efficiency=p.multiply_adds / slots,
            workgroups=block.workgroups(p),
            span=block.steps(p) * step,
            extra_bytes=2 * block.packed_bytes(p),
            dispatches=2,
        )


def _masked(p: ConvProblem, block: Block) -> bool:
    """Whether tiles reach past the image, or steps past the channels."""
    whole = p.out_h % 2 == 0 and p.out_w % 2 == 0 and p.c_group % block.channels == 0
    return any(p.padding) or not whole


def _slots(p: ConvProblem, block: Block, pairs: bool) -> float:
    """What an invocation takes, in multiply-adds: counted instructions, fitted on an H200."""
    load, quad = 9, 3  # from storage, as fitted for direct_tiled; a quad from workgroup memory
    segment = (4 + p.padding[2] % 2 + 1) // 2 if pairs else 4
    transform = 4 * segment * load + 32 + 4 * quad + (48 if _masked(p, block) else 0)
    staging = transform * block.tiles * block.channels / block.workgroup
    weights = ceil_div(POINTS * block.channels, block.tiles) * (load + quad)
    step = staging + weights + block.channels * (64 + 8 * quad) + 20
    outputs = 16 // (2 if pairs else 1) * (load + p.residual * load) + 4 * load
    place, sums = 80, 16 * 4 + 16 * quad + 32 + 16
    # Large workgroups leave registers unused, and wait longer at barriers.
    waits = 1.2 if block.workgroup > 128 else 1.0
    return waits * (1.23 * block.steps(p) * step + 3.2 * (outputs + place + sums))
