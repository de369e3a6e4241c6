"""The parameters of a gather, as the kernels name them."""

from __future__ import annotations

from typing import Protocol

from ....algorithms.base import strides
from ....algorithms.phases import (
    MOST_COLUMNS,
    MOST_PHASES,
    MOST_ROWS,
    Phase,
    count_phases,
    phases,
)
from ....plan import ceil_div
from ....problem import ConvProblem
from .lowering import Source

LEAST_STEPS = 4
"""Steps over k below which another split does not pay."""
MOST_SPLITS = 32


class OutTile(Protocol):
    """What a block computes: p pixels by m filters."""

    @property
    def p(self) -> int: ...
    @property
    def m(self) -> int: ...


def refuse_phases(problem: ConvProblem) -> str | None:
    """Why a launch for each phase of the stride would be too many; None where it is not."""
    count = count_phases(problem)
    if count <= MOST_PHASES:
        return None
    return (
        f"needs at most {MOST_PHASES} phases of the stride, each of which is a launch, "
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


def count_tiles(problem: ConvProblem, tile: OutTile) -> int:
    """Tiles of the output, of all phases and groups."""
    p = problem
    per_phase = sum(ceil_div(p.n * phase.pixels, tile.p) for phase in phases(p))
    return per_phase * ceil_div(p.k_group, tile.m) * p.groups


def most_splits(steps: int) -> int:
    """Into how many parts a sum of so many steps over k may be split."""
    return min(steps // LEAST_STEPS, MOST_SPLITS)


def gather_params(problem: ConvProblem, phase: Phase, x: Source) -> dict[str, int]:
    """A phase's output pixels, and where its taps lie in the input."""
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
        "x_g": x.x_g,
        "x_n": x.strides.x_n,
        "x_h": x.strides.x_h,
        "x_w": x.strides.x_w,
    }


def output_params(problem: ConvProblem, phase: Phase) -> dict[str, int]:
    """Where a phase's pixels and filters lie in the output."""
    y = strides(problem)
    return {
        "y_base": phase.h.first * y.y_h + phase.w.first * y.y_w,
        "y_g": problem.k_group * y.y_k,
        "y_n": y.y_n,
        "y_m": y.y_k,
        "y_h": phase.h.step * y.y_h,
        "y_w": phase.w.step * y.y_w,
        "m": problem.k_group,
    }
