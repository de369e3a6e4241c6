"""Bilinear algorithms: their matrices, how much they err, and how tuning judges them."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import reference
from contract import PLANNED, Runner, lowered, quick_configs, verify

from wgpuconv import Device
from wgpuconv.algorithms import find, winograd_fused
from wgpuconv.algorithms.winograd import LEAST_TERMS, TAPS
from wgpuconv.bilinear import ALPHAS, Bilinear, cook_toom
from wgpuconv.errors import AlgorithmRefusedError
from wgpuconv.facts import WEBGPU_DEFAULTS, Facts
from wgpuconv.plan import Plan
from wgpuconv.problem import ConvProblem
from wgpuconv.tuning import verify as tuning

WINOGRAD, FUSED = find("winograd"), find("winograd_fused")
PAIRS = [
    (out, taps)
    for taps in TAPS
    for out in (alpha + 1 - taps for alpha in ALPHAS)
    if out in LEAST_TERMS
]


# ---- matrices ----


@pytest.mark.parametrize(("out", "taps"), PAIRS)
def test_the_matrices_make_a_convolution(out: int, taps: int) -> None:
    """Output o is the sum of tap t times input o + t: the sum over points of A, G and B."""
    f = cook_toom(out, taps)
    a, b, g = (np.array(matrix) for matrix in (f.a, f.b, f.g))
    assert (a.shape, b.shape, g.shape) == ((f.alpha, out), (f.alpha, f.alpha), (f.alpha, taps))
    terms = np.einsum("po,pt,ip->oti", a, g, b)
    want = np.zeros_like(terms)
    for o in range(out):
        for t in range(taps):
            want[o, t, o + t] = 1
    np.testing.assert_allclose(terms, want, rtol=0, atol=1e-15 * abs(a).max() * f.alpha)
    np.testing.assert_array_equal(f.bt, b.T)


@pytest.mark.parametrize(("out", "taps"), PAIRS)
def test_the_matrices_are_rational_but_for_their_last_rounding(out: int, taps: int) -> None:
    """So one rounding to f32 is all that an element errs by."""
    f = cook_toom(out, taps)
    for matrix in (f.a, f.b, f.g):
        for value in (value for row in matrix for value in row):
            near = Fraction(value).limit_denominator(10_000)
            assert abs(Fraction(value) - near) <= abs(near) / 2**53


def test_lavin_and_grays_first_algorithm() -> None:
    f = cook_toom(2, 3)
    assert f.bt == ((-1, 0, 1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, -1, 0, 1))
    assert f.g == ((-1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1))
    assert f.a == ((1, 0), (1, 1), (1, -1), (0, 1))


# ---- how much a result errs ----


def rms(error: np.ndarray) -> float:
    return math.sqrt(np.mean(np.square(error)))


def summed_in_order(p: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The direct method: each output's products, one after the other, in float32."""
    y = np.zeros(p.out_shape, np.float32)
    for c in range(p.c):
        for r in range(p.r):
            for s in range(p.s):
                rows = slice(r, r + p.out_h * p.stride[0], p.stride[0])
                columns = slice(s, s + p.out_w * p.stride[1], p.stride[1])
                pixels = x[:, None, c, rows, columns]
                y += w[None, :, c, r, s, None, None] * pixels
    return y


def offered(p: ConvProblem) -> list[Plan]:
    return [lowered(WINOGRAD, p, config) for config in quick_configs(WINOGRAD, p)]


KERNELS = [
    *((r, s, 1) for r, s in [(3, 3), (4, 4), (5, 5), (3, 4), (3, 5), (5, 4)]),
    *((r, r, stride) for r, stride in [(5, 2), (7, 2), (9, 3), (11, 4)]),
]


@pytest.mark.parametrize("terms", sorted(set(LEAST_TERMS.values())))
@pytest.mark.parametrize(("r", "s", "stride"), KERNELS)
@pytest.mark.xdist_group("bilinear errors")
def test_every_tile_errs_less_than_twice_as_much_as_sums_in_order(
    device: Device, terms: int, r: int, s: int, stride: int
) -> None:
    """With the fewest channels that make so many terms, of which the zeros that fill the phases
    of a stride take some away."""
    taken = (-(-r // stride) * stride) * (-(-s // stride) * stride) / (r * s)
    c, h, across = math.ceil(terms * taken / (r * s)), 23 * stride + r, 23 * stride + s
    p = ConvProblem.parse(f"conv2d f32 n1 c{c} h{h} w{across} k32 r{r} s{s} stride{stride}")
    x, w, _ = reference.arrays(p)  # normal numbers of zero mean
    want = reference.linear(p, x, w)
    limit = 2 * rms(summed_in_order(p, x, w) - want)
    plans = offered(p)
    assert plans
    for plan in plans:
        assert rms(Runner(device, plan)(x, w, None) - want) < limit, plan.label


@pytest.mark.parametrize("channels", [winograd_fused.LEAST_CHANNELS, 16])
def test_tiles_that_stay_in_the_workgroup_err_no_more(device: Device, channels: int) -> None:
    p = ConvProblem.parse(f"conv2d f32 n1 c{channels} h25 w27 k32 r3 s3")
    x, w, _ = reference.arrays(p)
    want = reference.linear(p, x, w)
    limit = 2 * rms(summed_in_order(p, x, w) - want)
    plan = lowered(FUSED, p, quick_configs(FUSED, p)[0])
    assert rms(Runner(device, plan)(x, w, None) - want) < limit


def test_every_pair_is_offered_at_the_terms_that_it_needs() -> None:
    for terms in (n + more for n in LEAST_TERMS.values() for more in (0, -1)):
        found, wanted = set(), set()
        for r in TAPS:
            c = terms // (r * r)
            p = ConvProblem.parse(f"conv2d f32 n1 c{c} h26 w26 k32 r{r} s{r}")
            if WINOGRAD.refusal(p, PLANNED) is None:
                found |= {(f.out, f.taps) for plan in offered(p) for f in plan.bilinear or ()}
            wanted |= {(o, t) for o, t in PAIRS if t == r and LEAST_TERMS[o] <= c * r * r}
        assert found == wanted


# ---- verification ----

JUDGED = [
    ("conv2d f32 n2 c37 h13 w17 k33 r3 s3 pad1 bias", 3, 3),
    ("conv2d f16 n1 c66 h9 w10 k8 r5 s4 pad1,0,2,3 groups2 bias nhwc", 2, 3),
    ("conv2d f32 n1 c33 h27 w16 k5 r7 s9 stride2,3 pad3,0,5,2", 3, 4),
]


def transforms(p: ConvProblem, down: int, across: int) -> tuple[Bilinear, Bilinear]:
    rows, columns = (-(-t // s) for t, s in zip((p.r, p.s), p.stride, strict=True))
    return cook_toom(down, rows), cook_toom(across, columns)


@pytest.mark.parametrize(("text", "down", "across"), JUDGED)
def test_tuning_allows_what_the_bound_does(text: str, down: int, across: int) -> None:
    """At the sampled points, by another computation."""
    p = ConvProblem.parse(text)
    bilinear = transforms(p, down, across)
    data = tuning.random_data(p)
    points = tuning.sample_points(p)
    expected, tolerance = tuning.reference(p, data, points, bilinear)
    want, allowed = reference.expected(
        p, data["input"], data["weight"], data.get("bias"), bilinear=bilinear
    )
    if p.layout == "NHWC":
        want, allowed = want.transpose(0, 3, 1, 2), allowed.transpose(0, 3, 1, 2)
    at = tuple(points)
    np.testing.assert_allclose(expected, want[at], rtol=1e-12, atol=1e-12)
    room = tolerance - allowed[at]  # it grants a last rounding to f32 as well
    most = 2.0**-23 * (abs(expected) + tolerance) + reference.LEAST_NORMAL[p.dtype]
    assert (room >= 0).all()
    assert (room <= most).all()


def test_a_check_judges_by_how_a_result_was_computed() -> None:
    p = ConvProblem.parse("conv2d f32 n1 c64 h16 w16 k8 r3 s3 pad1")
    check, bilinear = tuning.Check(p), transforms(p, 4, 4)
    data = check.data
    want, allowed = reference.expected(p, data["input"], data["weight"], bilinear=bilinear)
    inside, outside = ((want + part * allowed).astype(np.float32) for part in (0.99, 1.01))
    assert check.fault(inside, bilinear) is None
    assert "wrong result" in (check.fault(inside) or "")
    assert "wrong result" in (check.fault(outside, bilinear) or "")


# ---- the algorithm's own limits ----

STAGED = ConvProblem.parse("conv2d f32 n3 c32 h13 w9 k5 r3 s3 pad1 bias")


def test_it_computes_in_parts_where_memory_is_short(device: Device) -> None:
    """Parts of tiles, four at a time at least, which begin inside an image and end in the next."""
    config = quick_configs(WINOGRAD, STAGED)[0]
    whole = lowered(WINOGRAD, STAGED, config)
    assert len(whole.passes) == 3
    tiles = 3 * 7 * 5
    four = 4 * 16 * 4 * (32 + 5)  # bytes of four tiles: 16 points of channels and filters
    for limit, most in ((four, 4), (4 * four, 16), (30 * four - 1, 116)):
        plan = verify(device, WINOGRAD, STAGED, config, workspace_limit=limit)
        assert plan.scratch - plan.prepared <= limit
        assert len(plan.passes) == 3 * -(-tiles // most)
    with pytest.raises(AlgorithmRefusedError) as refused:
        lowered(WINOGRAD, STAGED, config, workspace_limit=four - 1)
    assert str(refused.value) == (
        f"needs {four} bytes of workspace for four tiles, may have {four - 1}"
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("conv2d c32 h9 w9 k4 r3 s3 dil1,2", "needs dilation 1, got 1,2"),
        (
            "conv2d c32 h9 w9 k4 r3 s2",
            "needs 3 to 5 taps an axis (of each phase of the stride), got 3 x 2",
        ),
        (
            "conv2d c32 h9 w9 k4 r6 s5 stride2,1",
            None,
        ),
        (
            "conv2d c32 h9 w9 k4 r4 s5 stride2,1",
            "needs 3 to 5 taps an axis (of each phase of the stride), got 2 x 5",
        ),
        (
            "conv2d c62 h9 w9 k4 r3 s3 groups2",
            "needs sums of at least 288 terms, got 279 (31 channels of 3 x 3)",
        ),
        (
            "conv2d c12 h19 w19 k4 r5 s5 stride2",  # of 300 terms: 300 * 25 / 36
            "needs sums of at least 288 terms, got 208 (12 channels of 5 x 5, less for the zeros "
            "in the phases of the stride)",
        ),
        (
            "conv2d c2048 h9 w9 k2048 r3 s3",
            "needs the transformed weight within one binding of 134217728 bytes, got 2048 x 2048 "
            "filters of 3 x 3",
        ),
        ("conv_transpose2d c32 h9 w9 k4 r3 s3", "computes conv2d, not conv_transpose2d"),
    ],
)
def test_refusals(text: str, sentence: str | None) -> None:
    p = ConvProblem.parse(f"{text} n1")
    assert WINOGRAD.refusal(p, Facts(limits=WEBGPU_DEFAULTS)) == sentence


def test_a_large_weight_leaves_only_small_tiles() -> None:
    """Of 36, 25 and 16 points by filters by channels, one binding holds the last alone."""
    p = ConvProblem.parse("conv2d n1 c1024 h14 w14 k1024 r3 s3 pad1")
    limits = dataclasses.replace(WEBGPU_DEFAULTS, max_binding=80 << 20)
    configs = WINOGRAD.configs(p, Facts(limits=limits))
    assert {config["alpha"] for config in configs} == {4}


# ---- those of the kernel in one dispatch ----


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("conv2d c16 h9 w9 k4 r3 s4", "needs a kernel of 3 x 3, got 3 x 4"),
        (
            "conv2d c16 h9 w9 k4 r3 s3 stride1,2",
            "needs stride and dilation 1, got stride 1,2 and dilation 1,1",
        ),
        (
            "conv2d c16 h9 w9 k4 r3 s3 dil2",
            "needs stride and dilation 1, got stride 1,1 and dilation 2,2",
        ),
        ("conv2d c16 h9 w9 k4 r3 s3 nhwc", "needs pixels side by side (NCHW), got NHWC"),
        ("conv2d c4 h9 w9 k4 r3 s3 groups2", "needs at least 3 channels a group, got 2"),
        (
            "conv2d c2048 h9 w9 k2048 r3 s3",
            "needs the transformed weight within one binding of 134217728 bytes, got 2048 x 2048 "
            "filters",
        ),
        ("conv_transpose2d c16 h9 w9 k4 r3 s3", "computes conv2d, not conv_transpose2d"),
    ],
)
def test_refusals_of_the_fused_kernel(text: str, sentence: str) -> None:
    p = ConvProblem.parse(f"{text} n1")
    assert FUSED.refusal(p, Facts(limits=WEBGPU_DEFAULTS)) == sentence


@pytest.mark.parametrize("block", [*winograd_fused.BLOCKS, *winograd_fused.LARGE_BLOCKS], ids=str)
def test_blocks_are_what_the_kernel_can_share_out(block: winograd_fused.Block) -> None:
    assert block.tiles % 32 == block.filters % 8 == 0
    assert block.channels <= block.filters // 4
    assert block.fits(WEBGPU_DEFAULTS) == (block in winograd_fused.BLOCKS)
