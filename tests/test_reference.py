"""The reference is checked before anything is held against it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from wgpuconv.bilinear import cook_toom
from wgpuconv.problem import ACTIVATIONS, Activation, ConvProblem

ACTIVATION_SPECS: dict[str, tuple[object, ...]] = {
    "leaky_relu": ("leaky_relu", 0.2),
    "clip": ("clip", -0.5, 0.75),
}


def problem(text: str) -> ConvProblem:
    return ConvProblem.parse(text)


def test_a_convolution_by_hand() -> None:
    p = problem("conv2d f32 n1 c1 h3 w3 k1 r2 s2")
    x = np.arange(9.0).reshape(1, 1, 3, 3)
    w = np.array([[1.0, 2.0], [3.0, 4.0]]).reshape(1, 1, 2, 2)
    # 0*1 + 1*2 + 3*3 + 4*4 = 27, and each step to the right or down adds 10 a pixel.
    assert reference.convolve(p, x, w).tolist() == [[[[27, 37], [57, 67]]]]


def test_stride_padding_and_dilation_by_hand() -> None:
    p = problem("conv2d f32 n1 c1 h1 w5 k1 r1 s2 stride1,2 pad0,0,1,2 dil1,3")
    x = np.array([1.0, 2, 3, 4, 5]).reshape(1, 1, 1, 5)
    w = np.array([1.0, 10]).reshape(1, 1, 1, 2)
    # Padded: 0 1 2 3 4 5 0 0; taps at 0 and 3, then at 2 and 5, then at 4 and 7.
    assert reference.convolve(p, x, w).tolist() == [[[[30, 52, 4]]]]


def test_a_transposed_convolution_by_hand() -> None:
    p = problem("conv_transpose2d f32 n1 c1 h1 w3 k1 r1 s3 stride1,2 pad0,0,1,0 outpad0,1")
    x = np.array([1.0, 2, 3]).reshape(1, 1, 1, 3)
    w = np.array([1.0, 10, 100]).reshape(1, 1, 1, 3)
    # Scattered: 1 10 100+2 20 200+3 30 300 and one pixel of output_padding; the first is cropped.
    assert reference.convolve(p, x, w).tolist() == [[[[10, 102, 20, 203, 30, 300, 0]]]]


def test_groups_by_hand() -> None:
    p = problem("conv2d f32 n1 c4 h1 w1 k2 r1 s1 groups2 bias")
    x = np.array([1.0, 2, 3, 4]).reshape(1, 4, 1, 1)
    w = np.array([[1.0, 10], [100, 1000]]).reshape(2, 2, 1, 1)
    y = reference.convolve(p, x, w, np.array([0.5, 0.25]))
    assert y.ravel().tolist() == [21.5, 4300.25]


@pytest.mark.parametrize("op", ["conv2d", "conv_transpose2d"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_centred_delta_is_the_identity(op: str, layout: str) -> None:
    p = problem(f"{op} f32 n2 c3 h5 w4 k3 r3 s5 pad1,2 {layout}")
    w = np.zeros(p.weight_shape)
    for channel in range(3):
        w[channel, channel, 1, 2] = 1
    x, _, _ = reference.arrays(p)
    np.testing.assert_array_equal(reference.convolve(p, x, w), x)


pair = st.tuples(st.integers(1, 3), st.integers(1, 3))


@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    taps=pair,
    stride=pair,
    dilation=pair,
    pads=st.tuples(*[st.integers(0, 3)] * 4),
    groups=st.integers(1, 3),
    layout=st.sampled_from(["NCHW", "NHWC"]),
)
def test_the_transpose_is_the_adjoint(
    sizes: tuple[int, int],
    taps: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    pads: tuple[int, int, int, int],
    groups: int,
    layout: str,
) -> None:
    """<conv(x), y> = <x, conv_transpose(y)> for the same weight, whatever the parameters."""
    c, k = 2 * groups, 3 * groups
    span = [d * (t - 1) + 1 for d, t in zip(dilation, taps, strict=True)]
    h, w = (max(size, s) for size, s in zip(sizes, span, strict=True))
    arguments = {
        "stride": stride,
        "padding": (pads[:2], pads[2:]),
        "dilation": dilation,
        "groups": groups,
        "layout": layout,
    }
    shape = (2, c, h, w) if layout == "NCHW" else (2, h, w, c)
    weight_shape = (k, c // groups, *taps)
    there = ConvProblem.from_call("conv2d", shape, weight_shape, **arguments)
    # The output_padding that leads back to the input's size.
    extra = tuple(
        (size + pads[2 * i] + pads[2 * i + 1] - span[i]) % stride[i]
        for i, size in enumerate((h, w))
    )
    if (there.out_h - 1) * stride[0] - sum(pads[:2]) + span[0] < 1:
        return  # nothing would be left of the height without output_padding
    if (there.out_w - 1) * stride[1] - sum(pads[2:]) + span[1] < 1:
        return
    back = ConvProblem.from_call(
        "conv_transpose2d", there.out_shape, weight_shape, output_padding=extra, **arguments
    )
    assert back.out_shape == there.input_shape
    x, weight, _ = reference.arrays(there, exact=True)
    y, _, _ = reference.arrays(back, exact=True)
    left = (reference.convolve(there, x, weight) * y).sum()
    right = (x * reference.convolve(back, y, weight)).sum()
    assert left == right  # integers: no rounding


@pytest.mark.parametrize(
    "text",
    [
        "conv2d f32 n2 c6 h9 w7 k4 r3 s2 stride2,1 pad1,2 dil2,1 groups2 bias",
        "conv2d f32 n1 c4 h5 w6 k8 r3 s3 groups4 pad1",
        "conv_transpose2d f32 n2 c6 h5 w4 k4 r3 s2 stride2,3 pad1,0 dil2,1 outpad1,2 groups2 bias",
        "conv_transpose2d f32 n1 c3 h4 w3 k2 r1 s1 stride3",
    ],
)
def test_pytorch_agrees(text: str) -> None:
    torch = pytest.importorskip("torch")
    p = problem(text)
    x, w, b = (None if a is None else torch.from_numpy(a).double() for a in reference.arrays(p))
    pads = (p.padding[0], p.padding[2])
    if p.transposed:
        y = torch.nn.functional.conv_transpose2d(
            x, w, b, p.stride, pads, p.output_padding, p.groups, p.dilation
        )
    else:
        y = torch.nn.functional.conv2d(x, w, b, p.stride, pads, p.dilation, p.groups)
    got, added = reference.convolve(p, x, w, b), y.numpy()[..., ::-1]
    np.testing.assert_allclose(got, y.numpy(), rtol=1e-12, atol=1e-12)
    got = reference.convolve(p.with_(residual=True, activation=Activation("relu")), x, w, b, added)
    want = np.maximum(y.numpy() + added, 0)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_pytorch_agrees_on_activations(name: str) -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    theirs = {
        "identity": lambda v: v,
        "relu": functional.relu,
        "relu6": functional.relu6,
        "leaky_relu": lambda v: functional.leaky_relu(v, 0.2),
        "clip": lambda v: torch.clip(v, -0.5, 0.75),
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "gelu": functional.gelu,
        "silu": functional.silu,
    }
    v = np.concatenate([np.linspace(-12, 12, 1001), [-1000.0, 1000.0, math.inf, math.nan]])
    ours = reference.activate(Activation.of(ACTIVATION_SPECS.get(name, name)), v)
    want = theirs[name](torch.from_numpy(v)).numpy()
    np.testing.assert_allclose(ours, want, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["sigmoid", "silu", "gelu", "tanh", "leaky_relu", "clip", "relu"])
def test_no_activation_is_steeper_than_the_bound_assumes(name: str) -> None:
    v = np.linspace(-30, 30, 600_001)
    y = reference.activate(Activation.of(ACTIVATION_SPECS.get(name, name)), v)
    steepest = np.abs(np.diff(y) / np.diff(v)).max()
    limit = reference.STEEPEST.get(name, 1.0)
    assert 0.5 * limit < steepest <= limit * (1 + 1e-9)


def test_f32_sums_stay_within_the_bound_and_f16_sums_do_not() -> None:
    """The bound allows what f32 does in any order, and shows an accumulator of f16."""
    p = problem("conv2d f16 n1 c512 h2 w2 k4 r3 s3 pad1")
    x, w, _ = reference.arrays(p)
    columns = np.zeros((4, p.reduction), np.float32)  # one output pixel a row
    padded = np.pad(x[0], ((0, 0), (1, 1), (1, 1)))
    for pixel in range(4):
        row, column = divmod(pixel, 2)
        columns[pixel] = padded[:, row : row + 3, column : column + 3].ravel()
    rows = w.reshape(4, -1).astype(np.float32)

    def summed(dtype: type, order: np.ndarray) -> np.ndarray:
        total = np.zeros((4, 4), dtype)
        for i in order:
            total = (total + (rows[:, i, None] * columns[None, :, i]).astype(dtype)).astype(dtype)
        return total.astype(np.float16).reshape(1, 4, 2, 2)

    forward = np.arange(p.reduction)
    reference.check(p, summed(np.float32, forward), x, w)
    reference.check(p, summed(np.float32, forward[::-1]), x, w)
    with pytest.raises(AssertionError, match="elements are wrong"):
        reference.check(p, summed(np.float16, forward), x, w)


def test_one_lost_tap_shows_on_exact_data() -> None:
    p = problem("conv2d f32 n1 c300 h4 w4 k2 r3 s3 pad1 bias")
    x, w, b = reference.arrays(p, exact=True)
    good = reference.convolve(p, x, w, b).astype(np.float32)
    reference.check(p, good, x, w, b, exact=True)
    lost = w.copy()
    lost[1, np.flatnonzero(lost[1, :, 2, 2])[-1], 2, 2] = 0
    bad = reference.convolve(p, x, lost, b).astype(np.float32)
    with pytest.raises(AssertionError, match="elements are wrong"):
        reference.check(p, bad, x, w, b, exact=True)


TILED = [
    # A problem, and outputs a tile down and across.
    ("conv2d f32 n2 c5 h13 w9 k3 r3 s3 pad1", 4, 3),
    ("conv2d f32 n2 c4 h8 w11 k6 r5 s4 pad1,0,2,3 groups2 bias nhwc", 2, 3),
    ("conv2d f32 n1 c3 h17 w16 k2 r7 s9 stride2,3 pad3,0,5,2", 3, 4),
    ("conv2d f32 n1 c2 h1 w3 k1 r4 s3 stride1 pad4,2", 2, 2),
]


def bilinear(p: ConvProblem, down: int, across: int) -> reference.Pair:
    rows, columns = (-(-t // s) for t, s in zip((p.r, p.s), p.stride, strict=True))
    return cook_toom(down, rows), cook_toom(across, columns)


@pytest.mark.parametrize(("text", "down", "across"), TILED)
def test_tiles_make_the_convolution(text: str, down: int, across: int) -> None:
    """So the bound, the same with sizes, has the tiles, phases and edges of the algorithm."""
    p = problem(text)
    x, w, _ = reference.arrays(p)
    y = reference.by_tiles(p, bilinear(p, down, across), x, w)
    np.testing.assert_allclose(y, reference.linear(p, x, w), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("text", "down", "across"), TILED)
def test_a_bilinear_bound_is_wider_than_that_of_sums(text: str, down: int, across: int) -> None:
    p = problem(text)
    arguments = reference.arrays(p)
    sums = reference.bound(p, *arguments)
    tiles = reference.bound(p, *arguments, bilinear=bilinear(p, down, across))
    assert (tiles >= sums).all()
    assert (tiles > 2 * sums).any()


def test_which_outputs_share_a_tile_with_a_pixel() -> None:
    p = problem("conv2d f32 n2 c2 h9 w8 k3 r3 s3 pad1")
    x = np.zeros(p.input_shape)
    x[1, 0, 4, 7] = 1  # tiles of 4 x 3: rows -1 to 4 and 3 to 8, columns 5 to 9
    touched = reference.tiles_with(p, bilinear(p, 4, 3), x)
    want = np.zeros(p.out_shape, bool)
    want[1, :, 0:8, 6:8] = True
    np.testing.assert_array_equal(touched, want)


@pytest.mark.parametrize(("down", "across"), [(2, 2), (3, 3), (4, 4), (4, 2)])
def test_one_lost_tap_shows_beside_what_tiles_may_err(down: int, across: int) -> None:
    """On integers, with as many channels as the contract's problems have, phases included."""
    p = problem("conv2d f32 n1 c144 h14 w13 k2 r3 s3 pad1 bias")
    x, w, b = reference.arrays(p, exact=True)
    w[1, 77, 2, 1] = 1  # the least that a tap can be
    pair = bilinear(p, down, across)
    good = reference.convolve(p, x, w, b).astype(np.float32)
    reference.check(p, good, x, w, b, exact=True, bilinear=pair)
    lost = w.copy()
    lost[1, 77, 2, 1] = 0
    bad = reference.convolve(p, x, lost, b).astype(np.float32)
    with pytest.raises(AssertionError, match="elements are wrong"):
        reference.check(p, bad, x, w, b, exact=True, bilinear=pair)


def test_a_nan_is_never_within_the_bound() -> None:
    p = problem("conv2d f32 n1 c1 h2 w2 k1 r1 s1")
    x, w, _ = reference.arrays(p)
    bad = reference.convolve(p, x, w).astype(np.float32)
    bad[0, 0, 1, 1] = math.nan
    with pytest.raises(AssertionError, match="1 of 4 elements are wrong; at \\(0, 0, 1, 1\\)"):
        reference.check(p, bad, x, w)
