"""Verification: a candidate must compute the right thing, twice, before it may be timed.

The reference is float64, on sampled elements of the output. The tolerance is a bound, not a
guess: of m products summed in float32 in whatever order, with or without fused multiply-adds,
each goes through at most m roundings (m + 1 with a bias, m + 2 with a residual as well), so that

    |computed - exact| <= gamma(m + 2) * (sum |x| |w| + |bias| + |residual|)

with gamma(m) = m u / (1 - m u) and u = 2^-24 (Higham, Accuracy and Stability of Numerical
Algorithms, section 3.1). Where tensor cores sum floats, their algorithm says why this holds for it.
An activation stretches this by its Lipschitz constant and adds its own error; the result is rounded
once more to its dtype.

Where a problem allows TF32, each input and each weight may first be rounded to 11 bits, within
v = 2^-11 of itself, so that products err by (1 + v)^2 - 1 of their size before they are summed.

A bilinear algorithm (see bilinear.py) computes y = A^T [sum_c (G g G^T) * (B^T d B)] A, whose
terms are larger than the products, since most of them cancel. Each goes through one rounding for
each of the six matrices' elements, taps for G, alpha for B^T and for A^T (all of them down and
across), one a channel, and one for the bias and for the residual: n in all, in whatever order sums
are formed, so that

    |computed - exact| <= gamma(n) * (|A|^T [sum_c (|G| |g| |G|^T) * (|B|^T |d| |B|)] |A|
                                 + |bias| + |residual|)

(Barabasz, Anderson, Soodhalter, Gregg: Error Analysis and Improving the Accuracy of Winograd
Convolution, 2020). With a stride, each phase of the input and the taps that it meets count as a
channel. Tiles begin at multiples of their outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..bilinear import Bilinear
from ..dtypes import numpy_dtype
from ..problem import ConvProblem

Array = np.ndarray[Any, Any]

SAMPLES = 256
MOST_PRODUCTS = 1 << 21
"""Products that the reference may compute in all; long sums get fewer samples."""
COUNTED = 1 << 22
"""Output elements up to which all are looked at for poison; of larger outputs every n-th."""
POISON = 0xFF
"""The byte that fills memory first: a NaN in every dtype."""
_PERIOD = 1_000_003
"""Random numbers repeat after that many: a prime, so that no axis of a tensor fits it."""

_UNIT = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
_PRODUCT = {"default": 0.0, "tf32": (1 + 2.0**-11) ** 2 - 1}
"""How far a product may be off, relative to its size, since its factors were rounded first."""
_SMALLEST = {"f32": 2.0**-126, "f16": 2.0**-14, "bf16": 2.0**-126}
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
    """Zero-mean arguments by role, as their memory is; the outputs have about unit variance, so f16
    holds them."""
    rng = np.random.default_rng(seed)
    dtype = numpy_dtype(problem.dtype)
    scales = {"input": 1.0, "weight": 1 / math.sqrt(problem.reduction)}
    shapes: dict[str, tuple[int, ...]] = {
        "input": problem.input_shape,
        "weight": problem.weight_memory_shape,
    }
    if problem.bias:
        scales["bias"], shapes["bias"] = 1.0, (problem.k,)
    if problem.residual:
        scales["residual"], shapes["residual"] = 1.0, problem.out_shape
    data: dict[str, Array] = {}
    for role, shape in shapes.items():
        size = math.prod(shape)
        few = rng.uniform(-1.75, 1.75, min(size, _PERIOD)) * scales[role]
        data[role] = np.resize(few.astype(dtype), size).reshape(shape)
    return data


def logical_weight(problem: ConvProblem, data: Mapping[str, Array]) -> Array:
    """The weight as a caller has it, (K, C/groups, R, S) or (C, K/groups, R, S)."""
    weight = data["weight"]
    return np.moveaxis(weight, -1, 1) if problem.weight_last else weight


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
    problem: ConvProblem,
    data: Mapping[str, Array],
    points: Points,
    bilinear: tuple[Bilinear, Bilinear] | None = None,
) -> tuple[Array, Array]:
    """Expected values at the points in float64, and how far a result may be from each."""
    parts = [_exact(problem, data, part) for part in _parts(points, problem.reduction)]
    sums, sizes = (np.concatenate(values) for values in zip(*parts, strict=True))
    added = 1 + problem.residual  # a bias of zeros is added as well
    roundings = problem.reduction + added
    if bilinear is not None:
        channels = problem.c_group * math.prod(problem.stride)
        terms = channels * math.prod(axis.alpha for axis in bilinear)
        tiles = [_by_tiles(problem, data, part, bilinear) for part in _parts(points, terms)]
        sizes = np.concatenate(tiles)
        roundings = 6 + sum(axis.taps + 2 * axis.alpha for axis in bilinear) + channels + added
    unit = _UNIT["f32"]
    gamma = roundings * unit / (1 - roundings * unit)
    rounded = _PRODUCT[problem.precision] * sizes * (1 + gamma)
    if problem.bias:
        bias = data["bias"].astype(np.float64)[points.k]
        sums, sizes = sums + bias, sizes + abs(bias)
    if problem.residual:
        residual = _logical(problem, data["residual"])[tuple(points)].astype(np.float64)
        sums, sizes = sums + residual, sizes + abs(residual)
    error = gamma * sizes + rounded + roundings * _SMALLEST["f32"]
    expected = _activated(problem, sums)
    lipschitz, own = _ACTIVATIONS[problem.activation.name]
    if problem.activation.name == "leaky_relu":
        lipschitz = max(1.0, abs(problem.activation.a))
    error = lipschitz * error + own * (1 + abs(expected))
    units = _UNIT["f32"] + _UNIT[problem.dtype]
    rounding = units * (abs(expected) + error) + _SMALLEST[problem.dtype]
    return expected, error + rounding


def _logical(problem: ConvProblem, image: Array) -> Array:
    """(N, C, H, W) of an input or an output."""
    return image if problem.layout == "NCHW" else image.transpose(0, 3, 1, 2)


def _parts(points: Points, each: int) -> Iterator[Points]:
    """The points in parts of which ``each`` values a point fit in memory together."""
    step = max(MOST_PRODUCTS // each, 1)
    for start in range(0, len(points.n), step):
        yield Points(*(axis[start : start + step] for axis in points))


def _exact(problem: ConvProblem, data: Mapping[str, Array], points: Points) -> tuple[Array, Array]:
    """Sum of products, and sum of their sizes, at each point."""
    p = problem
    image = _logical(p, data["input"])
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
    weight = logical_weight(p, data)
    if p.transposed:
        w = weight[channels, (points.k % p.k_group)[:, None]]
    else:
        w = weight[points.k]
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


def _by_tiles(
    problem: ConvProblem,
    data: Mapping[str, Array],
    points: Points,
    bilinear: tuple[Bilinear, Bilinear],
) -> Array:
    """Sum of the sizes of a bilinear algorithm's terms at each point."""
    p, (down, across), (sh, sw), count = problem, bilinear, problem.stride, len(points.n)
    image = _logical(p, data["input"])
    rows, rows_in = _tile(p, 0, points.y, p.h, down)
    columns, columns_in = _tile(p, 1, points.x, p.w, across)
    channels = (points.k // p.k_group)[:, None] * p.c_group + np.arange(p.c_group)
    # By point, channel, phase down and across, and pixel down and across.
    d = image[
        points.n[:, None, None, None, None, None],
        channels[:, :, None, None, None, None],
        rows[:, None, :, None, :, None],
        columns[:, None, None, :, None, :],
    ].astype(np.float64)
    d *= rows_in[:, None, :, None, :, None] & columns_in[:, None, None, :, None, :]
    # Tap j of phase f is j * stride + f, or nothing.
    g = np.zeros((count, p.c_group, down.taps * sh, across.taps * sw))
    g[..., : p.r, : p.s] = data["weight"][points.k]
    g = g.reshape(count, p.c_group, down.taps, sh, across.taps, sw).transpose(0, 1, 3, 5, 2, 4)
    # Summed over the points of the transforms first: what each pixel weighs at each tap.
    down_weights, across_weights = (
        np.einsum("ao,at,ia->oit", *(abs(np.array(matrix)) for matrix in (axis.a, axis.g, axis.b)))
        for axis in bilinear
    )
    weights = np.einsum(
        "pit,pju->pijtu",
        down_weights[points.y % down.out],
        across_weights[points.x % across.out],
    ).reshape(count, down.alpha * across.alpha, down.taps * across.taps)
    reached = abs(d).reshape(count, -1, down.alpha * across.alpha) @ weights
    sizes: Array = np.einsum("pct,pct->p", reached, abs(g).reshape(reached.shape))
    return sizes


def _tile(
    p: ConvProblem, axis: int, at: Array, size: int, bilinear: Bilinear
) -> tuple[Array, Array]:
    """The input positions of the tile that makes an output, by phase, and if they are inside."""
    first = at // bilinear.out * bilinear.out
    pixels = first[:, None, None] + np.arange(bilinear.alpha)
    position = pixels * p.stride[axis] + np.arange(p.stride[axis])[:, None] - p.padding[2 * axis]
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
        self._expected, tolerance = reference(problem, self.data, self._points)
        self._tolerances: dict[tuple[Bilinear, Bilinear] | None, Array] = {None: tolerance}

    @cached_property
    def callers_data(self) -> dict[str, Array]:
        """The same as a caller has them."""
        weight = np.ascontiguousarray(logical_weight(self.problem, self.data))
        return self.data | {"weight": weight}

    def empty_output(self) -> Array:
        return np.empty(self.problem.out_shape, numpy_dtype(self.problem.dtype))

    def fault(self, output: Array, bilinear: tuple[Bilinear, Bilinear] | None = None) -> str | None:
        """What is wrong with an output, in a sentence with values; None where nothing is.

        ``bilinear`` is how it was computed (see ``Plan.bilinear``).
        """
        found = self._sampled(output)
        error = abs(found - self._expected)
        tolerance = self._tolerance(bilinear)
        wrong = ~(error <= tolerance)  # so that a NaN is wrong
        if wrong.any():
            i = int(np.argmax(np.where(np.isnan(error), np.inf, error / tolerance)))
            where = ", ".join(
                f"{name}={axis[i]}" for name, axis in zip("nkyx", self._points, strict=True)
            )
            return (
                f"wrong result: {int(wrong.sum())} of {wrong.size} sampled elements; at {where} "
                f"{found[i]:.9g}, expected {self._expected[i]:.9g} +- {tolerance[i]:.2g}"
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

    def _tolerance(self, bilinear: tuple[Bilinear, Bilinear] | None) -> Array:
        if bilinear not in self._tolerances:
            _, tolerance = reference(self.problem, self.data, self._points, bilinear)
            self._tolerances[bilinear] = tolerance
        return self._tolerances[bilinear]

    def _sampled(self, output: Array) -> Array:
        found: Array = _logical(self.problem, output)[tuple(self._points)].astype(np.float64)
        return found
