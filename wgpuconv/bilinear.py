"""Bilinear algorithms for short convolutions (Cook-Toom, known from Winograd), as matrices.

In one dimension, F(out, taps) computes ``out`` outputs of a correlation with ``taps`` taps from
alpha = out + taps - 1 inputs d with alpha products instead of out * taps:

    y = A^T [ (G g) * (B^T d) ]

It multiplies polynomials by their values at alpha points, one of them infinity. Nesting it once
a dimension gives F(out x out, taps x taps).

Lavin, Gray: Fast Algorithms for Convolutional Neural Networks (CVPR 2016); Barabasz, Anderson,
Soodhalter, Gregg: Error Analysis and Improving the Accuracy of Winograd Convolution (2020), on
points. With the points 0, +-sqrt(1/2), +-sqrt(2) a tile of six errs less than half as much as with
0, +-1, +-2: each polynomial's coefficients stay near one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

Matrix = tuple[tuple[float, ...], ...]
"""Rows."""

_ROOT = math.sqrt(2)
_POINTS: dict[int, tuple[float, ...]] = {
    4: (0, 1, -1),
    5: (0, 1, -1, 2),
    6: (0, _ROOT, -_ROOT, 1 / _ROOT, -1 / _ROOT),
}
"""Finite points by the size of a tile, alpha; infinity is one more."""

ALPHAS = tuple(_POINTS)


@dataclass(frozen=True)
class Bilinear:
    """F(out, taps) in one dimension."""

    out: int
    taps: int
    a: Matrix
    """alpha x out"""
    b: Matrix
    """alpha x alpha: column j holds what input point j takes of each input, B^T its transpose."""
    g: Matrix
    """alpha x taps"""

    @property
    def alpha(self) -> int:
        return self.out + self.taps - 1

    @property
    def bt(self) -> Matrix:
        return tuple(zip(*self.b, strict=True))


@cache
def cook_toom(out: int, taps: int) -> Bilinear:
    """F(out, taps), for an alpha of ``ALPHAS``.

    A and G evaluate polynomials at the points. B^T is the transposed interpolation, its rows
    scaled to a last coefficient of one; G takes the scales.
    """
    alpha = out + taps - 1
    points = np.array(_POINTS[alpha])

    def evaluate(coefficients: int) -> np.ndarray:
        at_infinity = np.eye(coefficients)[-1:]
        return np.vstack([np.vander(points, coefficients, increasing=True), at_infinity])

    a, g, bt = evaluate(out), evaluate(taps), np.linalg.inv(evaluate(alpha)).T
    bt[abs(bt) < 1e-12] = 0.0  # what the inversion leaves of a zero
    scale = np.array([row[np.flatnonzero(row)[-1]] for row in bt])[:, None]
    return Bilinear(out, taps, _rows(a), _rows((bt / scale).T), _rows(g * scale))


def _rows(matrix: np.ndarray) -> Matrix:
    return tuple(tuple(float(value) for value in row) for row in matrix)
