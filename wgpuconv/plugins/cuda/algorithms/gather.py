"""Products of a gathered matrix: their tiles, and their parameters as the kernels name them."""

from __future__ import annotations

from typing import Protocol

from ....algorithms.base import activation_params, strides
from ....algorithms.phases import Phase, SharedGather, gather_params, phases
from ....plan import Region, ceil_div
from ....problem import ConvProblem
from .base import output_bindings
from .lowering import Lowering

LEAST_STEPS = 4
"""Steps over k below which another split does not pay."""
MOST_SPLITS = 32


class OutTile(Protocol):
    """What a block computes: p pixels by m filters."""

    @property
    def p(self) -> int: ...
    @property
    def m(self) -> int: ...


def phase_tiles(problem: ConvProblem, phase: Phase, tile: OutTile) -> int:
    """Tiles of the outputs of a phase, of all groups."""
    p = problem
    return ceil_div(p.n * phase.pixels, tile.p) * ceil_div(p.k_group, tile.m) * p.groups


def count_tiles(problem: ConvProblem, tile: OutTile) -> int:
    """Those of all phases."""
    return sum(phase_tiles(problem, phase, tile) for phase in phases(problem))


def most_splits(steps: int) -> int:
    """Into how many parts a sum of so many steps over k may be split."""
    return min(steps // LEAST_STEPS, MOST_SPLITS)


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


def phase_params(problem: ConvProblem, gather: SharedGather) -> dict[str, int]:
    """Where the outputs of the phases that share a gather lie, from those of its first one."""
    y = strides(problem)
    return {
        "phases": gather.phases,
        "phase_columns": gather.columns,
        "y_phase_h": y.y_h,
        "y_phase_w": y.y_w,
    }


def product_params(
    lowering: Lowering, phase: Phase, tile: OutTile, *, steps: int, splits: int
) -> dict[str, int | float]:
    """What every kernel that gathers a matrix is told of a phase's product."""
    p, x = lowering.problem, lowering.source
    return {
        **gather_params(p, phase, x.strides),
        "x_g": x.x_g,
        **output_params(p, phase),
        "m_tiles": ceil_div(p.k_group, tile.m),
        "p_tiles": ceil_div(p.n * phase.pixels, tile.p),
        "groups": p.groups,
        "k_steps": steps,
        "splits": splits,
        "y_elements": lowering.elements,
        **activation_params(p),
    }


def product_bindings(
    lowering: Lowering, packed: Region, taps: Region
) -> tuple[tuple[str, Region], ...]:
    return (
        ("x", lowering.source.region),
        ("packed", packed),
        ("taps", taps),
        *output_bindings(lowering.problem, lowering.bias, lowering.target),
    )
