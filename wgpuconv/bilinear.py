"""Bilinear algorithms for short convolutions (Cook-Toom, known from Winograd), as matrices.

In one dimension, F(out, taps) computes ``out`` outputs of a correlation with ``taps`` taps from
alpha = out + taps - 1 inputs d with alpha products instead of out * taps:

    y = A^T [ (G g) * (B^T d) ]

It multiplies polynomials by their values at alpha points, one of them infinity. Nesting it once
a dimension gives F(out x out, taps x taps).

Lavin, Gray: Fast Algorithms for Convolutional Neural Networks (CVPR 2016); Barabasz, Anderson,
Soodhalter, Gregg: Error Analysis and Improving the Accuracy of Winograd Convolution (2020), on
points.

Points decide about rounding errors: those of pairs of reciprocals keep each polynomial's
coefficients near one. On zero-mean data, summed over 32 channels, the RMS error of float32 is this
many times that of the direct method, its products summed in order (less with more channels):

    alpha  points                  F(2, 3)  F(3, 3)  F(4, 3)  F(2, 4)  F(3, 4)  F(2, 5)
    4      0, +-1                     0.6
    5      0, +-1, 2                            2.2                1.8
    5      +-1/2, +-5/4                         1.2                0.9
    6      0, +-1, +-2                                   4.0                3.2      2.9
    6      0, +-sqrt(1/2), +-sqrt(2)                     2.0                1.5      1.3
    6      0, +-2/3, +-3/2                               1.9                1.4      1.3
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

Matrix = tuple[tuple[float, ...], ...]
"""Rows."""

_POINTS: dict[int, tuple[Fraction, ...]] = {
    4: (Fraction(0), Fraction(1), Fraction(-1)),
    5: (Fraction(1, 2), Fraction(-1, 2), Fraction(5, 4), Fraction(-5, 4)),
    6: (Fraction(0), Fraction(2, 3), Fraction(-2, 3), Fraction(3, 2), Fraction(-3, 2)),
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

    A and G evaluate polynomials at the points. B^T is the transposed interpolation: for each
    finite point, the coefficients of the polynomial that is zero at the others, whose value at the
    point itself G is divided by; for infinity, of the one that is zero at all of them.
    """
    points = _POINTS[out + taps - 1]
    a, g, bt = [], [], []
    for point in points:
        zeros = [other for other in points if other != point]
        scale = 1 / math.prod((point - zero for zero in zeros), start=Fraction(1))
        a.append([point**power for power in range(out)])
        g.append([point**power * scale for power in range(taps)])
        bt.append([*_coefficients(zeros), Fraction(0)])
    a.append(_at_infinity(out))
    g.append(_at_infinity(taps))
    bt.append(_coefficients(points))
    return Bilinear(out, taps, _rows(a), _rows(zip(*bt, strict=True)), _rows(g))


def _coefficients(zeros: Iterable[Fraction]) -> list[Fraction]:
    """Of the product of all (x - zero), that of the lowest power first."""
    found = [Fraction(1)]
    for zero in zeros:
        found = [
            low - zero * high
            for low, high in zip([Fraction(0), *found], [*found, Fraction(0)], strict=True)
        ]
    return found


def _at_infinity(count: int) -> list[Fraction]:
    """The value there of a polynomial of that many coefficients: its last one."""
    return [Fraction(power == count - 1) for power in range(count)]


def _rows(matrix: Iterable[Iterable[Fraction]]) -> Matrix:
    return tuple(tuple(float(value) for value in row) for row in matrix)
