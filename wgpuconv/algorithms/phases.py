"""A convolution as gathers: which input pixel lies under which tap of which output pixel.

A ``conv2d`` is one gather. A ``conv_transpose2d`` falls apart into one for each phase of its
stride: the output pixels whose coordinates have the same remainder are reached by the same
taps, and among themselves they are a convolution of stride 1 (sub-pixel convolution, Shi et
al. 2016, arXiv:1609.07009). No product with a zero is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from ..problem import ConvProblem
from .base import Strides, weight_strides


class Tap(NamedTuple):
    place: int
    """r or s of the weight."""
    offset: int
    """Input pixels from ``in_stride * q`` to the one under this tap, for output pixel q."""


@dataclass(frozen=True)
class Axis:
    """One axis of a phase: output pixel ``first + q * step``, q below ``count``."""

    count: int
    first: int
    step: int
    in_stride: int
    taps: tuple[Tap, ...]

    @property
    def first_offset(self) -> int:
        return self.taps[0].offset if self.taps else 0

    @property
    def offset_step(self) -> int:
        """Input pixels from one tap to the next; the same between all of them."""
        return self.taps[1].offset - self.taps[0].offset if len(self.taps) > 1 else 0

    def crosses_border(self, size: int) -> bool:
        """Whether any tap of any output pixel lies outside of an input of that size."""
        offsets = [tap.offset for tap in self.taps]
        return bool(offsets) and (
            min(offsets) < 0 or (self.count - 1) * self.in_stride + max(offsets) >= size
        )


@dataclass(frozen=True)
class Phase:
    h: Axis
    w: Axis

    @property
    def pixels(self) -> int:
        """Output pixels of one image."""
        return self.h.count * self.w.count

    @property
    def taps(self) -> int:
        return len(self.h.taps) * len(self.w.taps)


MOST_PHASES = 1024
"""A stride of 32 both ways. Beyond, launches and planning take longer than any other algorithm."""


def count_phases(problem: ConvProblem) -> int:
    """How many ``phases`` would give, without making them."""
    if not problem.transposed:
        return 1
    return min(problem.stride[0], problem.out_h) * min(problem.stride[1], problem.out_w)


def phases(problem: ConvProblem) -> list[Phase]:
    """The gathers that together write every output pixel once."""
    return [Phase(h, w) for h in _axes(problem, 0) for w in _axes(problem, 1)]


@dataclass(frozen=True)
class SharedGather:
    """Phases of neighbouring output pixels that gather the same input pixels.

    They are ``phase`` and those up to so many rows and columns of output pixels after it, whose
    taps lie as many rows and columns after its own. So they are one product, of the filters of
    all of them.
    """

    phase: Phase
    rows: int
    columns: int

    @property
    def phases(self) -> int:
        return self.rows * self.columns


def shared_gathers(problem: ConvProblem) -> list[SharedGather]:
    """All ``phases``, in as few gathers as neighbours can share: one where kernel and stride are
    the same and nothing is padded."""
    return [
        SharedGather(Phase(h, w), rows, columns)
        for h, rows in _alike(_axes(problem, 0))
        for w, columns in _alike(_axes(problem, 1))
    ]


def _alike(axes: list[Axis]) -> list[tuple[Axis, int]]:
    """The first of each run of axes that move output pixel and taps on together, and how many."""

    def moved_back(axis: Axis) -> Axis:
        taps = tuple(Tap(tap.place - axis.first, tap.offset) for tap in axis.taps)
        return replace(axis, first=0, taps=taps)

    runs = [list(run) for _, run in groupby(axes, moved_back)]
    return [(run[0], len(run)) for run in runs]


def _axes(problem: ConvProblem, axis: int) -> list[Axis]:
    out = (problem.out_h, problem.out_w)[axis]
    count = (problem.r, problem.s)[axis]
    stride, dilation = problem.stride[axis], problem.dilation[axis]
    pad = problem.padding[2 * axis]
    if not problem.transposed:
        taps = tuple(Tap(i, i * dilation - pad) for i in range(count))
        return [Axis(out, 0, 1, stride, taps)]
    axes = []
    for first in range(min(stride, out)):
        # Output pixel first + q * stride meets input pixel q + offset through tap i where
        # first + pad - i * dilation = offset * stride.
        taps = tuple(
            Tap(i, (first + pad - i * dilation) // stride)
            for i in range(count)
            if (first + pad - i * dilation) % stride == 0
        )
        axes.append(Axis(-(-(out - first) // stride), first, stride, 1, taps))
    return axes


MOST_ROWS, MOST_COLUMNS = 16, 15
"""Rows and columns of taps that fit into a pixel's mask of 32 bits, the last bit being..."""
NEVER = -(2**31)
"""...the one that no pixel's mask has: the tap of a k past the end."""


def refuse_phases(problem: ConvProblem) -> str | None:
    """Why a dispatch for each phase of the stride would be too many; None where it is not."""
    count = count_phases(problem)
    if count <= MOST_PHASES:
        return None
    return (
        f"needs at most {MOST_PHASES} phases of the stride, each of which is a dispatch, "
        f"got {count} (stride {problem.stride[0]},{problem.stride[1]})"
    )


def refuse_gather(problem: ConvProblem) -> str | None:
    """Why the pixels cannot be gathered by masks of taps; None where they can."""
    too_many = refuse_phases(problem)
    if too_many is not None:
        return too_many
    rows = max(len(phase.h.taps) for phase in phases(problem))
    columns = max(len(phase.w.taps) for phase in phases(problem))
    if rows > MOST_ROWS or columns > MOST_COLUMNS:
        return (
            f"needs at most {MOST_ROWS} x {MOST_COLUMNS} taps that meet one output pixel, "
            f"got {rows} x {columns}"
        )
    return None


def gather_params(problem: ConvProblem, phase: Phase, x: Strides, unit: int = 1) -> dict[str, int]:
    """Where the input elements of a phase's pixels lie, as the implicit GEMM shaders name it;
    strides in units of so many elements."""
    return {
        "pixels": problem.n * phase.pixels,
        "q_hw": phase.pixels,
        "q_w": phase.w.count,
        "in_h": problem.h,
        "in_w": problem.w,
        "in_stride_h": phase.h.in_stride,
        "in_stride_w": phase.w.in_stride,
        "tap_rows": len(phase.h.taps),
        "tap_columns": len(phase.w.taps),
        "tap_h": phase.h.first_offset,
        "tap_w": phase.w.first_offset,
        "tap_step_h": phase.h.offset_step,
        "tap_step_w": phase.w.offset_step,
        "x_g": problem.c_group * x.x_c // unit,
        "x_n": x.x_n // unit,
        "x_h": x.x_h // unit,
        "x_w": x.x_w // unit,
    }


def tap_table(problem: ConvProblem, phase: Phase, x: Strides, padded: int, *, block: int) -> bytes:
    """``vec4<i32>(input offset, mask, packed k, weight offset)``, ``padded`` of them.

    The first two are those of each k; the mask has the bit of the tap's row and, from bit 16 on,
    that of its column. The order of k is (block of ``block`` channels, r, s, channel of the
    block). The last two say which weight goes to which k, in the order of the weight's memory.
    """
    strides = weight_strides(problem)
    h = np.array(phase.h.taps, dtype=np.int64).reshape(-1, 2)
    w = np.array(phase.w.taps, dtype=np.int64).reshape(-1, 2)
    axes = np.arange(problem.c_group), np.arange(len(h)), np.arange(len(w))
    c, hi, wi = (a.ravel() for a in np.meshgrid(*axes, indexing="ij"))
    order = np.lexsort((c % block, wi, hi, c // block))
    c, hi, wi = c[order], hi[order], wi[order]
    offsets = c * strides.w_c + h[hi, 0] * strides.w_r + w[wi, 0] * strides.w_s
    table = np.empty((padded, 4), dtype="<i4")
    table[:] = (0, NEVER, 0, 0)
    table[: len(c), 0] = c * x.x_c + h[hi, 1] * x.x_h + w[wi, 1] * x.x_w
    table[: len(c), 1] = (1 << hi) | (1 << (wi + 16))
    table[: len(c), 2:] = np.stack((np.arange(len(c)), offsets), 1)[np.argsort(offsets)]
    table[len(c) :, 2] = np.arange(len(c), padded)
    return table.tobytes()
