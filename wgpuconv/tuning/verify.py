"""Verification: a candidate must compute the right thing, twice, before it may be timed.

The reference is float64, on sampled elements of the output. The tolerance is a bound, not a
guess: of m products summed in float32 in whatever order, with or without fused multiply-adds,
each goes through at most m roundings (m + 1 with a bias), so that

    |computed - exact| <= gamma(m + 1) * (sum |x| |w| + |bias|),  gamma(m) = m u / (1 - m u)

with u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). An
activation stretches this by its Lipschitz constant and adds its own error; the result is
rounded once more to its dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..problem import ConvProblem

Array = np.ndarray[Any, Any]

SAMPLES = 256
MOST_PRODUCTS = 1 << 21
"""Products that the reference may compute in all; long sums get fewer samples."""
COUNTED = 1 << 22
"""Output elements up to which all are looked at for poison; of larger outputs every n-th."""
POISON = 0xFF
"""The byte that fills memory first: a NaN in float32 and in float16."""
_PERIOD = 1_000_003
"""Random numbers repeat after that many: a prime, so that no axis of a tensor fits it."""

_DTYPES: dict[str, np.dtype[Any]] = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}
_UNIT = {"f32": 2.0**-24, "f16": 2.0**-11}
_SMALLEST = {"f32": 2.0**-126, "f16": 2.0**-14}
"""The smallest normal number; shaders may flush what is smaller."""

_TRANSCENDENTAL = 2.0**-18
"""Error of an activation with exp or tanh in it: WGSL allows exp 3 + 2|v| units in the last place,
which is largest (2^-20) where the result still matters, and gelu's erf is good to 2^-22."""
_ACTIVATIONS = {
    # name: (Lipschitz constant, own error)
    "identity": (1.0, 0.0),
    "relu": (1.0, 0.0),
    "leaky_relu": (1.0, 0.0),
    "clip": (1.0, 0.0),
    "sigmoid": (0.25, _TRANSCENDENTAL),
    "tanh": (1.0, _TRANSCENDENTAL),
    "gelu": (1.13, _TRANSCENDENTAL),
    "silu": (1.1, _TRANSCENDENTAL),
}


def random_data(problem: ConvProblem, seed: int = 0) -> dict[str, Array]:
    """Zero-mean arguments by role; the outputs have about unit variance, so f16 holds them."""
    rng = np.random.default_rng(seed)
    dtype = _DTYPES[problem.dtype]
    scales = {"input": 1.0, "weight": 1 / math.sqrt(problem.reduction)}
    shapes: dict[str, tuple[int, ...]] = {
        "input": problem.input_shape,
        "weight": problem.weight_shape,
    }
    if problem.bias:
        scales["bias"], shapes["bias"] = 1.0, (problem.k,)
    data: dict[str, Array] = {}
    for role, shape in shapes.items():
        size = math.prod(shape)
        few = rng.uniform(-1.75, 1.75, min(size, _PERIOD)) * scales[role]
        data[role] = np.resize(few.astype(dtype), size).reshape(shape)
    return data


class Points(NamedTuple):
    """Elements of the output by logical index, whatever the layout."""

    n: Array
    k: Array
    y: Array
    x: Array


def sample_points(problem: ConvProblem, seed: int = 0) -> Points:
    """Corners and the last element, borders, some of each group, and random elements."""
    p, rng = problem, np.random.default_rng(seed)
    groups = np.linspace(0, p.groups - 1, min(p.groups, 16)).astype(int)
    edges = np.concatenate([groups * p.k_group, (groups + 1) * p.k_group - 1])
    count = max(min(SAMPLES, MOST_PRODUCTS // p.reduction), 32 + len(edges))
    sizes = (p.n, p.k, p.out_h, p.out_w)
    n, k, y, x = (rng.integers(0, size, count) for size in sizes)
    corners = np.indices((2, 2, 2, 2)).reshape(4, 16)  # the last element is among them
    for axis, size, corner in zip((n, k, y, x), sizes, corners, strict=True):
        axis[:16] = corner * (size - 1)
    y[16:20], y[20:24] = 0, p.out_h - 1
    x[24:28], x[28:32] = 0, p.out_w - 1
    k[32 : 32 + len(edges)] = edges
    return Points(n, k, y, x)


def reference(
    problem: ConvProblem, data: Mapping[str, Array], points: Points
) -> tuple[Array, Array]:
    """Expected values at the points in float64, and how far a result may be from each."""
    parts = [
        _exact(problem, data, Points(*(axis[part] for axis in points)))
        for part in _parts(len(points.n), problem.reduction)
    ]
    sums, sizes = (np.concatenate(values) for values in zip(*parts, strict=True))
    if problem.bias:
        bias = data["bias"].astype(np.float64)[points.k]
        sums, sizes = sums + bias, sizes + abs(bias)
    roundings = problem.reduction + 1
    unit = _UNIT["f32"]
    gamma = roundings * unit / (1 - roundings * unit)
    error = gamma * sizes + roundings * _SMALLEST["f32"]
    expected = _activated(problem, sums)
    lipschitz, own = _ACTIVATIONS[problem.activation.name]
    if problem.activation.name == "leaky_relu":
        lipschitz = max(1.0, abs(problem.activation.a))
    error = lipschitz * error + own * (1 + abs(expected))
    units = _UNIT["f32"] + _UNIT[problem.dtype]
    rounding = units * (abs(expected) + error) + _SMALLEST[problem.dtype]
    return expected, error + rounding


def _parts(count: int, reduction: int) -> Iterator[slice]:
    """Slices of the points whose products fit in memory together."""
    step = max(MOST_PRODUCTS // reduction, 1)
    return (slice(start, start + step) for start in range(0, count, step))


def _exact(problem: ConvProblem, data: Mapping[str, Array], points: Points) -> tuple[Array, Array]:
    """Sum of products, and sum of their sizes, at each point."""
    p = problem
    image = data["input"] if p.layout == "NCHW" else data["input"].transpose(0, 3, 1, 2)
    rows, rows_in = _taps(p, 0, points.y, p.h, p.r)
    columns, columns_in = _taps(p, 1, points.x, p.w, p.s)
    group = points.k // p.k_group
    channels = group[:, None] * p.c_group + np.arange(p.c_group)
    x = image[
        points.n[:, None, None, None],
        channels[:, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ].astype(np.float64)
    x *= rows_in[:, None, :, None] & columns_in[:, None, None, :]
    if p.transposed:
        w = data["weight"][channels, (points.k % p.k_group)[:, None]]
    else:
        w = data["weight"][points.k]
    products = x * w.astype(np.float64)
    axes = (1, 2, 3)
    return products.sum(axis=axes), abs(products).sum(axis=axes)


def _taps(p: ConvProblem, axis: int, at: Array, size: int, taps: int) -> tuple[Array, Array]:
    """The input position of each tap for output positions along an axis, and if it is inside."""
    shift = np.arange(taps) * p.dilation[axis] - p.padding[2 * axis]
    if p.transposed:
        strided = at[:, None] - shift
        position, off = np.divmod(strided, p.stride[axis])
        inside = (off == 0) & (position >= 0) & (position < size)
    else:
        position = at[:, None] * p.stride[axis] + shift
        inside = (position >= 0) & (position < size)
    return np.where(inside, position, 0), inside


def _activated(problem: ConvProblem, v: Array) -> Array:
    a, b = (float(np.float32(value)) for value in (problem.activation.a, problem.activation.b))
    match problem.activation.name:
        case "relu":
            v = np.maximum(v, 0)
        case "leaky_relu":
            v = np.where(v < 0, a * v, v)
        case "clip":
            v = np.clip(v, a, b)
        case "sigmoid":
            v = 1 / (1 + np.exp(-v))
        case "tanh":
            v = np.tanh(v)
        case "silu":
            v = v / (1 + np.exp(-v))
        case "gelu":
            erf = np.array([math.erf(value / math.sqrt(2)) for value in v])
            v = 0.5 * v * (1 + erf)
    return v


class Check:
    """Judges outputs of one problem on one set of random data."""

    def __init__(self, problem: ConvProblem, seed: int = 0) -> None:
        self.problem = problem
        self.data = random_data(problem, seed)
        self._points = sample_points(problem, seed)
        self._expected, self._tolerance = reference(problem, self.data, self._points)

    def empty_output(self) -> Array:
        return np.empty(self.problem.out_shape, _DTYPES[self.problem.dtype])

    def fault(self, output: Array) -> str | None:
        """What is wrong with an output, in a sentence with values; None where nothing is."""
        found = self._sampled(output)
        error = abs(found - self._expected)
        wrong = ~(error <= self._tolerance)  # so that a NaN is wrong
        if wrong.any():
            i = int(np.argmax(np.where(np.isnan(error), np.inf, error / self._tolerance)))
            where = ", ".join(
                f"{name}={axis[i]}" for name, axis in zip("nkyx", self._points, strict=True)
            )
            return (
                f"wrong result: {int(wrong.sum())} of {wrong.size} sampled elements; at {where} "
                f"{found[i]:.9g}, expected {self._expected[i]:.9g} +- {self._tolerance[i]:.2g}"
            )
        flat = output.reshape(-1)
        seen = flat[:: flat.size // COUNTED | 1]  # odd, so as not to follow the tiles
        missing = seen.size - int(np.isfinite(seen).sum())
        if missing:
            return f"wrong result: {missing} of {seen.size} elements not finite or not written"
        return None

    def error(self, output: Array) -> float:
        """The largest error of the sampled elements, in units of the largest of them."""
        largest = float(abs(self._expected).max()) or 1.0
        return float(abs(self._sampled(output) - self._expected).max()) / largest

    def _sampled(self, output: Array) -> Array:
        logical = output if self.problem.layout == "NCHW" else output.transpose(0, 3, 1, 2)
        found: Array = logical[tuple(self._points)].astype(np.float64)
        return found
