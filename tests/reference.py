"""What the kernels are held against: convolutions in float64, and how far f32 may be off.

The reference shares nothing with the kernels but the problem. It pads and sums over taps (a
transposed convolution scatters over taps), and test_reference.py checks it against itself, by
hand-computed cases and with PyTorch.

``bound`` is rigorous, element by element. With u = 2^-24, the unit roundoff of f32, any order of
n multiply-adds, fused or not, errs by at most gamma(n) = n u / (1 - n u) times the same sum over
absolute values (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1).
A bilinear algorithm errs by the roundings of its own terms: see ``_roundings``.
What an activation adds is bounded by the accuracies that WGSL guarantees, and f16 and bf16 outputs
are rounded once more. The data made here holds no subnormal numbers, since WGSL lets a device flush
them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from wgpuconv.bilinear import Bilinear
from wgpuconv.problem import Activation, ConvProblem

Pair = tuple[Bilinear, Bilinear]
"""What a bilinear algorithm does down and across."""

U = 2.0**-24
"""Unit roundoff of f32."""
TF32 = 2.0**-11
"""Unit roundoff of TF32, to which inputs and weights may be rounded where a problem allows it."""
ULP = 2.0**-23
"""The unit in which WGSL states accuracies, relative to the result."""
NUMPY = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
ROUNDED = {"f16": 2.0**-11, "bf16": 2.0**-8}
"""Unit roundoff of the narrower dtypes."""
LEAST_NORMAL = {"f32": 2.0**-126, "f16": 2.0**-14, "bf16": 2.0**-126}
"""A result below this may be flushed to zero."""
STEEPEST = {"sigmoid": 0.25, "silu": 1.0999, "gelu": 1.1290}
"""Largest absolute derivatives; 1 for the others, but for leaky_relu."""


# ---- data ----


def arrays(problem: ConvProblem, *, exact: bool = False) -> tuple[Any, Any, Any]:
    """Random input, weight and bias (None without one), the same for the same problem.

    Normal numbers, scaled so that outputs are of the order of one; or, with ``exact``, small
    integers, whose sums f32 holds exactly in any order, so that one lost tap shows.
    """
    draw = _drawing(problem, f"{problem} {exact}", exact)
    x = draw(problem.input_shape, 1.0)
    w = draw(problem.weight_shape, problem.reduction**-0.5)
    b = draw((problem.k,), 1.0) if problem.bias else None
    assert not exact or problem.reduction * 16 + 8 < 2**24, "too long for exact sums"
    return x, w, b


def residual(problem: ConvProblem, *, exact: bool = False) -> Any:
    """The same for the residual (None without one)."""
    if not problem.residual:
        return None
    return _drawing(problem, f"residual of {problem} {exact}", exact)(problem.out_shape, 1.0)


def _drawing(
    problem: ConvProblem, seed: str, exact: bool
) -> Callable[[tuple[int, ...], float], np.ndarray]:
    """A function that draws arrays, one after the other."""
    rng = np.random.default_rng(zlib.crc32(seed.encode()))
    dtype = NUMPY[problem.dtype]

    def draw(shape: tuple[int, ...], scale: float) -> np.ndarray:
        if exact:
            return rng.integers(-4, 5, shape).astype(dtype)
        made = (rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(dtype)
        made[np.abs(made) < LEAST_NORMAL[problem.dtype]] = 0
        return made

    return draw


# ---- the convolution itself ----


def linear(problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The convolution alone, in float64, without bias and activation; in the problem's layout."""
    p = problem
    x = np.asarray(x, np.float64).reshape(p.input_shape)
    w = np.asarray(w, np.float64).reshape(p.weight_shape)
    if p.layout == "NHWC":
        x = x.transpose(0, 3, 1, 2)
    x = x.reshape(p.n, p.groups, p.c_group, p.h, p.w)
    y = _scatter(p, x, w) if p.transposed else _gather(p, x, w)
    y = y.reshape(p.n, p.k, p.out_h, p.out_w)
    return y.transpose(0, 2, 3, 1) if p.layout == "NHWC" else y


def _gather(p: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    top, bottom, left, right = p.padding
    x = np.pad(x, ((0, 0), (0, 0), (0, 0), (top, bottom), (left, right)))
    w = w.reshape(p.groups, p.k_group, p.c_group, p.r, p.s)
    y = np.zeros((p.n, p.groups, p.k_group, p.out_h, p.out_w))
    for r in range(p.r):
        for s in range(p.s):
            rows = _every(r * p.dilation[0], p.stride[0], p.out_h)
            columns = _every(s * p.dilation[1], p.stride[1], p.out_w)
            y += np.einsum("ngchw,gkc->ngkhw", x[..., rows, columns], w[..., r, s], optimize=True)
    return y


def _scatter(p: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    top, bottom, left, right = p.padding
    w = w.reshape(p.groups, p.c_group, p.k_group, p.r, p.s)
    y = np.zeros((p.n, p.groups, p.k_group, p.out_h + top + bottom, p.out_w + left + right))
    for r in range(p.r):
        for s in range(p.s):
            rows = _every(r * p.dilation[0], p.stride[0], p.h)
            columns = _every(s * p.dilation[1], p.stride[1], p.w)
            y[..., rows, columns] += np.einsum("ngchw,gck->ngkhw", x, w[..., r, s], optimize=True)
    return y[..., top : top + p.out_h, left : left + p.out_w]


def _every(first: int, step: int, count: int) -> slice:
    return slice(first, first + (count - 1) * step + 1, step)


def _along_channels(problem: ConvProblem, b: np.ndarray) -> np.ndarray:
    b = np.asarray(b, np.float64)
    return b if problem.layout == "NHWC" else b[:, None, None]


def activate(activation: Activation, v: np.ndarray) -> np.ndarray:
    """The activation in float64; NaN stays NaN."""
    a, b = activation.a, activation.b
    with np.errstate(over="ignore"):  # exp of a huge number: its reciprocal is zero
        match activation.name:
            case "identity":
                return v
            case "relu":
                return np.where(v < 0, 0.0, v)
            case "leaky_relu":
                return np.where(v < 0, a * v, v)
            case "clip":
                return np.where(v < a, a, np.where(v > b, b, v))
            case "sigmoid":
                return 1 / (1 + np.exp(-v))
            case "tanh":
                return np.tanh(v)
            case "gelu":
                erfc = np.vectorize(math.erfc, otypes=[np.float64])
                return 0.5 * v * erfc(-v / math.sqrt(2))
            case "silu":
                return v / (1 + np.exp(-v))
    raise AssertionError(f"the reference knows no {activation.name!r}")


def convolve(
    problem: ConvProblem,
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray | None = None,
    residual: np.ndarray | None = None,
) -> np.ndarray:
    """What the problem is to compute, in float64."""
    v = linear(problem, x, w)
    if b is not None:
        v = v + _along_channels(problem, b)
    if residual is not None:
        v = v + np.asarray(residual, np.float64).reshape(problem.out_shape)
    return activate(problem.activation, v)


# ---- how far a kernel may be off ----


def gamma(operations: int) -> float:
    return operations * U / (1 - operations * U)


def expected(
    problem: ConvProblem,
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    *,
    exact: bool = False,
    bilinear: Pair | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """What the problem is to compute, and the largest error that f32 allows each element of it.

    ``exact`` says that all sums are held exactly (see ``arrays``): what remains is the
    activation's own error and the rounding of the output, which is none for f32. A bilinear
    algorithm, whose transforms multiply by fractions, holds no sums exactly.
    """
    v = linear(problem, x, w)
    if bilinear is None:
        size = linear(problem, np.abs(x), np.abs(w))
        # n products, n - 1 additions in one chain at most, one more for the bias and for a
        # residual.
        roundings = 0 if exact else problem.reduction + 1 + problem.residual
    else:
        size = by_tiles(problem, bilinear, x, w, np.abs)
        roundings = _roundings(problem, bilinear)
    # A product of two rounded factors errs by (1 + TF32)^2 - 1 of its size; small integers are
    # held exactly.
    product = (1 + TF32) ** 2 - 1 if problem.precision == "tf32" and not exact else 0.0
    rounded = product * size * (1 + gamma(roundings))
    if b is not None:
        v = v + _along_channels(problem, b)
        size = size + _along_channels(problem, np.abs(b))
    assert (residual is not None) == problem.residual
    if residual is not None:
        added = np.asarray(residual, np.float64).reshape(problem.out_shape)
        v, size = v + added, size + np.abs(added)
    error = gamma(roundings) * size + rounded
    activation = problem.activation
    want = activate(activation, v)
    slope = STEEPEST.get(activation.name, 1.0)
    if activation.name == "leaky_relu":
        slope = max(1.0, abs(activation.a))
    error = slope * error + _activation_error(activation, v, error)
    if problem.dtype in ROUNDED:
        y = np.abs(want) + error
        error = error + np.maximum(y * ROUNDED[problem.dtype], LEAST_NORMAL[problem.dtype])
    elif activation.name != "identity":
        error = error + LEAST_NORMAL["f32"]
    return want, error


def bound(
    problem: ConvProblem,
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    *,
    exact: bool = False,
    bilinear: Pair | None = None,
) -> np.ndarray:
    """The largest error that f32 allows each output element."""
    return expected(problem, x, w, b, residual, exact=exact, bilinear=bilinear)[1]


def _roundings(p: ConvProblem, bilinear: Pair) -> int:
    """How often a bilinear algorithm may round one of its terms.

    Written out, an output of a tile is a sum over channels c, taps g, pixels d of the tile and
    the points of the transforms, down (i, a, s) and across:

        y[o] = sum A[a, o] G[a, s] g[s, c] B[i, a] d[i, c]

    That is the convolution only after terms have cancelled; the roundings know nothing of this.
    Whatever the order of each sum, a term comes by as many as these, each a factor within 1 +- u:

    - one for each of the six matrices (A, G and B, down and across), whose elements are rounded
      to f32;
    - transforms are chains of multiply-adds, fused or not, of at most as many as the matrix has
      columns: taps for G, alpha for B^T and for A^T, down and across;
    - the sum over channels is a chain of a multiply-add each;
    - the bias is added once, and a residual is.

    So |error| <= gamma(n) * |A|^T [sum_c (|G| |g| |G|^T) * (|B|^T |d| |B|)] |A|, and gamma(n) |b|
    (Higham, section 3.1; Barabasz, Anderson, Soodhalter, Gregg: Error Analysis and Improving the
    Accuracy of Winograd Convolution, 2020, who count the same way). The matrices are float64; what
    they lack of their exact values, 2^-53 beside 2^-24, is left out, as in the reference.
    """
    channels = p.c_group * p.stride[0] * p.stride[1]
    return 6 + sum(f.taps + 2 * f.alpha for f in bilinear) + channels + 1 + p.residual


def by_tiles(
    p: ConvProblem,
    bilinear: Pair,
    x: np.ndarray,
    w: np.ndarray,
    of: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> np.ndarray:
    """The convolution as a bilinear algorithm computes it, in float64, of such a value of every
    factor: with ``np.abs``, the sizes of its terms, summed.

    Tiles begin at multiples of their outputs. With a stride, each phase of the input and the taps
    that it meets count as a channel of stride 1.
    """
    assert not p.transposed
    assert p.dilation == (1, 1)
    down, across = bilinear
    (sh, sw), (top, _, left, _) = p.stride, p.padding
    rows, columns = -(-p.out_h // down.out), -(-p.out_w // across.out)
    x = of(np.asarray(x, np.float64)).reshape(p.input_shape)
    x = x.transpose(0, 3, 1, 2) if p.layout == "NHWC" else x
    at_h, at_w = _pixels(rows, down, sh), _pixels(columns, across, sw)
    x = np.pad(x, ((0, 0), (0, 0), (top, at_h.max() + 1), (left, at_w.max() + 1)))
    d = x[:, :, at_h[:, :, :, None, None, None], at_w].reshape(
        p.n, p.groups, p.c_group, sh, rows, down.alpha, sw, columns, across.alpha
    )
    # Tap j of phase f is j * stride + f, or nothing.
    g = np.zeros((p.groups, p.k_group, p.c_group, down.taps * sh, across.taps * sw))
    w = of(np.asarray(w, np.float64))
    g[..., : p.r, : p.s] = w.reshape(p.groups, p.k_group, p.c_group, p.r, p.s)
    g = g.reshape(p.groups, p.k_group, p.c_group, down.taps, sh, across.taps, sw)
    (g_h, b_h, a_h), (g_w, b_w, a_w) = (
        [of(np.array(m)) for m in (f.g, f.b, f.a)] for f in bilinear
    )
    u = np.einsum("gkcsfzd,as,bz->abgkcfd", g, g_h, g_w, optimize=True)
    v = np.einsum("ngcftidxj,ia,jb->abgcfdntx", d, b_h, b_w, optimize=True)
    points, channels = (down.alpha, across.alpha, p.groups), p.c_group * sh * sw
    m = u.reshape(*points, p.k_group, channels) @ v.reshape(*points, channels, -1)
    m = m.reshape(*points, p.k_group, p.n, rows, columns)
    y = np.einsum("abgkntx,ao,bq->ngktoxq", m, a_h, a_w, optimize=True)
    y = y.reshape(p.n, p.k, rows * down.out, columns * across.out)[:, :, : p.out_h, : p.out_w]
    return y.transpose(0, 2, 3, 1) if p.layout == "NHWC" else y


def tiles_with(p: ConvProblem, bilinear: Pair, x: np.ndarray) -> np.ndarray:
    """Which outputs lie in a tile that reads an input element other than zero, of any channel."""
    everything = [
        Bilinear(f.out, f.taps, *(np.ones((f.alpha, n)).tolist() for n in (f.out, f.alpha, f.taps)))
        for f in bilinear
    ]
    return by_tiles(p, (everything[0], everything[1]), x, np.ones(p.weight_shape), np.abs) > 0


def _pixels(tiles: int, axis: Bilinear, stride: int) -> np.ndarray:
    """Where the padded input has the pixels of each phase, tile and point of the tile."""
    phases, tile, pixel = np.ogrid[:stride, :tiles, : axis.alpha]
    return (tile * axis.out + pixel) * stride + phases


def _activation_error(activation: Activation, v: np.ndarray, error: np.ndarray) -> np.ndarray:
    """What evaluating it in f32 adds, at an argument within ``error`` of v.

    By WGSL's accuracies: exp(t) within 3 + 2|t| ULP, a division within 2.5 ULP, additions and
    multiplications rounded to nearest. 1.01 covers products of two errors.
    """
    size = np.abs(v) + error
    y = np.abs(activate(activation, v)) + error
    match activation.name:
        case "leaky_relu":  # the slope is rounded to f32, then the product is
            return np.where(v - error < 0, 2 * U * size * abs(activation.a), 0.0) * 1.01
        case "clip":  # the bounds are rounded to f32
            return np.full_like(v, U * _largest_finite(activation.a, activation.b))
        case "sigmoid" | "silu":
            # Relative: exp, one addition, one division. Where exp(-v) passes 2^126, and soon
            # overflows, WGSL promises nothing of a division by it: the result may be zero.
            vanishing = 2.0**-126 * (size if activation.name == "silu" else 1.0)
            return y * (3 + 2 * size + 0.5 + 2.5) * ULP * 1.01 + vanishing
        case "tanh":
            # The worse of 1e-5 and what sinh / cosh by exp gives: each within an exp's error
            # and a rounding relative to cosh, then a division. Arguments are clamped to 10,
            # where tanh is 1 to 2^-27.
            by_exp = (2 * (3 + 2 * np.minimum(size, 10)) + 2 + 2.5) * ULP * 1.01
            return np.maximum(1e-5, by_exp)
        case "gelu":
            # v * Phi(v). erfc by Abramowitz and Stegun 7.1.26 is within 1.5e-7 in exact
            # arithmetic. Rounding, in U: Horner's scheme 10 steps times the sum of the absolute
            # coefficients (4.5); t = 1 / (1 + p z) 7 relative, times |t P'(t)| <= 3.5; exp at
            # most 3 ULP * exp(-z^2) plus its argument's own error, 8; 3 for the rest; all
            # halved. Then one product.
            phi = 0.5 * 1.5e-7 + 0.5 * (45 + 25 + 8 + 3) * U
            return (size * phi + y * U) * 1.01
    return np.zeros_like(v)


def _largest_finite(*values: float) -> float:
    return max((abs(v) for v in values if math.isfinite(v)), default=0.0)


def check(
    problem: ConvProblem,
    got: np.ndarray,
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    *,
    exact: bool = False,
    bilinear: Pair | None = None,
    label: str = "",
) -> None:
    """Asserts that a result is of the right kind and within its bound everywhere."""
    found = expected(problem, x, w, b, residual, exact=exact, bilinear=bilinear)
    compare(problem, got, *found, label=label)


def compare(
    problem: ConvProblem, got: np.ndarray, want: np.ndarray, allowed: np.ndarray, label: str = ""
) -> None:
    """The same with what ``expected`` has found."""
    assert got.dtype == NUMPY[problem.dtype], f"{label} {problem}: dtype {got.dtype}"
    assert got.shape == want.shape, f"{label} {problem}: shape {got.shape}, not {want.shape}"
    error = np.abs(got.astype(np.float64) - want)
    wrong = ~(error <= allowed)  # a NaN is wrong
    if wrong.any():
        excess = np.where(np.isnan(error), np.inf, error - allowed)
        at = np.unravel_index(np.argmax(excess), error.shape)
        raise AssertionError(
            f"{label} {problem}: {wrong.sum()} of {wrong.size} elements are wrong; at "
            f"{tuple(map(int, at))} got {got[at]!r}, want {want[at]!r} within {allowed[at]:.3g}"
        )
