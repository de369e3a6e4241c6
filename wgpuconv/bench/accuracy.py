"""Whether an output of a peer is right, by the precision that it computes in.

Our own kernels are held to the bound of ``tuning/verify.py``: float32 sums of products, in any
order. A peer may compute otherwise: by Winograd's or a Fourier transform, with factors rounded
to TF32, with sums in float16. So a peer is given a multiple of the spread that its roundings
have on random data of zero mean (Higham and Mary, Sharper Probabilistic Backward Error Analysis
for Basic Linear Algebra Kernels with Random Data, 2020): of sums in the unit u, u times the
square root of their length; of rounded factors alone, u. That tells an output that is wrong from
one that is rounded, and TF32 from f32. The largest error stands in the result in any case.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..problem import ConvProblem
from ..tuning.verify import Check, reference, sample_points

Array = np.ndarray[Any, Any]

UNITS = {"f32": 2.0**-24, "f16": 2.0**-11, "tf32": 2.0**-10, "bf16": 2.0**-8}
"""Of the roundings of each precision. Hardware truncates to TF32's 10 bits rather than round."""
SUMMED = ("f32", "f16")
"""Precisions in which whole sums may be held; in the others only factors are."""
ROOM = {"f32": 32.0, "f16": 12.0, "tf32": 12.0, "bf16": 12.0}
"""Times u and the square root of the length, for outputs of variance 1, as those of
``random_data`` are. A sum in order has a spread of 0.4 of that, its largest error among hundreds
three times as much; transforms in float32 (Winograd's F(4x4, 3x3)) err up to 20 times more."""
STEEPEST = 1.13
"""How much an activation may stretch an error; gelu does most (leaky_relu apart)."""
TRANSCENDENTAL = ("sigmoid", "tanh", "gelu", "silu")
OWN = 2.0**-18
"""Error that these may add, as in ``tuning/verify.py``."""


class Judge:
    """Compares samples of a problem's outputs with float64; without the bias on demand."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self._points = sample_points(check.problem)
        n, k, y, x = self._points
        self.points = (n, k, y, x) if check.problem.layout == "NCHW" else (n, y, x, k)
        """Indices of the sampled elements, along each axis of an output."""
        self._expected: dict[bool, Array] = {}

    @property
    def problem(self) -> ConvProblem:
        return self.check.problem

    def error(self, found: Array, precision: str, *, bias: bool = True) -> float:
        """The largest error of an output's elements at the points, in units of the largest of
        them. Raises ValueError, in a sentence with values, where they are wrong."""
        expected = self._reference(bias)
        tolerance = self._tolerance(expected, precision)
        error = abs(found.astype(np.float64) - expected)
        wrong = ~(error <= tolerance)  # so that a NaN is wrong
        if wrong.any():
            i = int(np.argmax(np.where(np.isnan(error), np.inf, error / tolerance)))
            raise ValueError(
                f"wrong result: {int(wrong.sum())} of {wrong.size} sampled elements; "
                f"{found[i]:.6g}, expected {expected[i]:.6g} +- {tolerance[i]:.2g}"
            )
        return float(error.max()) / (float(abs(expected).max()) or 1.0)

    def _reference(self, bias: bool) -> Array:
        bias = bias and self.problem.bias
        if bias not in self._expected:
            problem = self.problem.with_(bias=bias)
            self._expected[bias], _ = reference(problem, self.check.data, self._points)
        return self._expected[bias]

    def _tolerance(self, expected: Array, precision: str) -> Array:
        unit, activation = UNITS[precision], self.problem.activation
        length = self.problem.reduction + 1 if precision in SUMMED else 1
        slope = abs(activation.a) if activation.name == "leaky_relu" else 0.0
        summed = ROOM[precision] * unit * math.sqrt(length) * max(STEEPEST, slope)
        own = OWN if activation.name in TRANSCENDENTAL else 0.0
        # The sum is rounded, and again when a bias is added in a pass of its own.
        found: Array = summed + own + (2 * unit + own) * abs(expected)
        return found
