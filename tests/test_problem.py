"""ConvProblem: what is accepted, what is refused and how, shapes, and the text form."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wgpuconv.errors import DtypeError, ProblemError
from wgpuconv.problem import ACTIVATIONS, IDENTITY, Activation, ConvProblem

OPS = ("conv2d", "conv_transpose2d")


def conv(x: Any = (2, 4, 9, 8), w: Any = (6, 4, 3, 3), **kw: Any) -> ConvProblem:
    return ConvProblem.from_call("conv2d", x, w, **kw)


def transpose(x: Any = (2, 4, 9, 8), w: Any = (4, 6, 3, 3), **kw: Any) -> ConvProblem:
    return ConvProblem.from_call("conv_transpose2d", x, w, **kw)


# ---- text ----

small = st.integers(1, 9)
pairs = st.tuples(small, small)
floats = st.floats(-1e6, 1e6, width=32)
activations = st.one_of(
    st.sampled_from(["identity", "relu", "relu6", "sigmoid", "tanh", "gelu", "silu"]),
    st.tuples(st.just("leaky_relu"), floats),
    st.tuples(floats, floats).map(lambda bounds: ("clip", *sorted(bounds))),
)


@st.composite
def problems(draw: st.DrawFn) -> ConvProblem:
    op, groups = draw(st.sampled_from(OPS)), draw(st.integers(1, 4))
    c, k = draw(small) * groups, draw(small) * groups
    r, s = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    stride, dilation = draw(pairs), draw(pairs)
    span = [d * (t - 1) + 1 for d, t in zip(dilation, (r, s), strict=True)]
    h, w = (v + draw(small) for v in span)
    pads = draw(st.tuples(*[st.integers(0, 4)] * 4))
    extra = (0, 0)
    if op == "conv_transpose2d":
        extra = tuple(draw(st.integers(0, max(p) - 1)) for p in zip(stride, dilation, strict=True))
        h, w = h + 9, w + 9  # so that the padding does not crop all of the output
    layout = draw(st.sampled_from(["NCHW", "NHWC"]))
    n, dtype = draw(st.integers(0, 5)), draw(st.sampled_from(["f32", "f16"]))
    problem = ConvProblem.from_call(
        op,
        (n, c, h, w) if layout == "NCHW" else (n, h, w, c),
        (k, c // groups, r, s) if op == "conv2d" else (c, k // groups, r, s),
        dtype=dtype,
        precision=draw(st.sampled_from(["default", "tf32"] if dtype == "f32" else ["default"])),
        bias_shape=(k,) if draw(st.booleans()) else None,
        residual=draw(st.booleans()),
        stride=stride,
        padding=(pads[:2], pads[2:]),
        dilation=dilation,
        output_padding=extra,
        groups=groups,
        layout=layout,
        activation=draw(activations),
    )
    return problem.with_(weight_last=draw(st.booleans()))


def test_the_order_of_a_weight() -> None:
    """Is told where it matters."""
    problem = ConvProblem.parse("conv2d f16 n1 c6 h9 w9 k4 r3 s2 groups2 wlast")
    assert problem.weight_last
    assert problem.weight_shape == (4, 3, 3, 2)
    assert problem.weight_memory_shape == (4, 3, 2, 3)
    assert problem.with_(weight_last=False).weight_memory_shape == (4, 3, 3, 2)
    for same in ("r1 s1", "r3 s2 groups6"):
        text = f"conv2d f16 n1 c6 h9 w9 k6 {same}"
        assert ConvProblem.parse(f"{text} wlast") == ConvProblem.parse(text)


@given(problems())
@settings(max_examples=300)
def test_text_round_trip(problem: ConvProblem) -> None:
    text = str(problem)
    assert ConvProblem.parse(text) == problem
    assert str(ConvProblem.parse(text)) == text
    first, *rest = text.split()
    assert ConvProblem.parse(" ".join([first, *reversed(rest)])) == problem  # any order
    assert hash(ConvProblem.parse(text)) == hash(problem)


@pytest.mark.parametrize(
    "text",
    [
        "conv2d f32 n16 c64 h56 w56 k128 r3 s3 stride1 pad1",
        "conv_transpose2d f16 n1 c8 h5 w5 k4 r3 s3 stride2 pad1 outpad1,0 groups2 nhwc bias "
        "act:clip,0,6",
        "conv2d f32 n1 c4 h9 w9 k4 r3 s2 stride1,2 pad0,1,2,3 dil2 act:leaky_relu,0.2",
        "conv2d f32 n1 c64 h56 w56 k64 r3 s3 stride1 pad1 bias residual act:relu",
    ],
)
def test_texts_of_the_documentation(text: str) -> None:
    assert str(ConvProblem.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "begins with 'conv2d'"),
        ("conv3d n1", "begins with 'conv2d'"),
        ("conv2d f32 n1 c4 h9 w9 k4 r3", "one number after 's'"),
        ("conv2d n1 n2 c4 h9 w9 k4 r3 s3", "'n2'.*repeated"),
        ("conv2d f64 n1 c4 h9 w9 k4 r3 s3", "cannot read 'f64'"),
        ("conv2d n1,2 c4 h9 w9 k4 r3 s3", "one number after 'n'"),
        ("conv2d n1 c4 h9 w9 k4 r3 s3 groups3", "groups must divide"),
        ("conv2d n1 c4 h9 w9 k4 r3 s3 groups0", "groups must divide"),
        ("conv2d n1 c4 h9 w9 k4 r3 s3 groups1,2", "groups takes one number"),
        ("conv2d n1 c4 h9 w9 k4 r3 s3 stride1,2,3", "stride must be an integer or a pair"),
        ("conv2d n1 c4 h9 w9 k4 r3 s3 stride-1", "cannot read 'stride-1'"),
        ("conv2d n1 c4 h9 w9 k4 r3 s3 act:mish", "unknown activation 'mish'"),
        ("conv2d n1 c4 h9 w9 k4 r3 s3 act:clip,0,x", "must be numbers"),
        ("conv2d n1 c4 h1 w9 k4 r3 s3", "kernel spans 3"),
    ],
)
def test_bad_texts(text: str, says: str) -> None:
    with pytest.raises(ProblemError, match=says):
        ConvProblem.parse(text)


# ---- what is refused, and how ----


@pytest.mark.parametrize(
    ("made", "kind", "says"),
    [
        (lambda: conv((4, 9, 8, 2, 1)), ProblemError, r"4 dimensions \(N, C, H, W\) or 3"),
        (lambda: conv((9,)), ProblemError, r"got shape \(9,\)"),
        (lambda: conv(w=(6, 4, 3)), ProblemError, r"weight must have 4 dimensions \(K, C/groups"),
        (lambda: conv((2, 4, float("nan"), 8)), DtypeError, "input's shape must be an integer"),
        (lambda: conv((2, 4, 9.0, 8)), DtypeError, "input's shape must be an integer, got 9.0"),
        (lambda: conv((2, 4, -9, 8)), ProblemError, "zero or positive, got -9"),
        (lambda: conv((2, 4, 2**31, 8)), ProblemError, "below 2"),
        (lambda: conv(7), DtypeError, "sequence of integers, got 7"),
        (lambda: conv("2498"), DtypeError, "sequence of integers"),
        (lambda: conv((2, 0, 9, 8)), ProblemError, "only the batch may be empty"),
        (lambda: conv((2, 4, 0, 8)), ProblemError, "only the batch may be empty"),
        (lambda: conv(w=(0, 4, 3, 3)), ProblemError, "weight must not be empty"),
        (lambda: conv(w=(6, 4, 0, 3)), ProblemError, "weight must not be empty"),
        (lambda: conv(w=(6, 5, 3, 3)), ProblemError, r"4 channels a group, got shape \(6, 5"),
        (lambda: transpose(w=(5, 6, 3, 3)), ProblemError, "4 input channels as the input has"),
        (lambda: conv(groups=3), ProblemError, "divide the 4 input channels, got groups=3"),
        (lambda: conv(w=(5, 2, 3, 3), groups=2), ProblemError, "divide the 5 filters"),
        (lambda: conv(groups=0), ProblemError, "groups must be positive, got 0"),
        (lambda: conv(groups=-1), ProblemError, "groups must be positive, got -1"),
        (lambda: conv(groups=1.0), DtypeError, r"groups must be an integer, got 1.0 \(float\)"),
        (lambda: conv(groups=(1,)), DtypeError, "groups must be an integer"),
        (lambda: conv(bias_shape=(5,)), ProblemError, r"bias must have shape \(6,\)"),
        (lambda: conv(bias_shape=(6, 1)), ProblemError, r"bias must have shape \(6,\)"),
        (lambda: conv(bias_shape=()), ProblemError, r"bias must have shape \(6,\)"),
        (lambda: conv(stride=0), ProblemError, "stride must be positive, got 0"),
        (
            lambda: conv(stride=(1, -2)),
            ProblemError,
            r"stride must be positive, got -2 as the second of \(1, -2\)$",
        ),
        (
            lambda: conv(stride=(1, "a")),
            DtypeError,
            r"an integer or a pair of them, got 'a' \(str\) as the second of \(1, 'a'\)$",
        ),
        (
            lambda: conv(stride=[None]),
            DtypeError,
            r"got None \(NoneType\) as the first of \[None\]$",
        ),
        (lambda: conv(stride=(1, 2, 3)), ProblemError, "integer or a pair of them"),
        (lambda: conv(stride=()), ProblemError, "integer or a pair of them"),
        (
            lambda: conv(stride=1.5),
            DtypeError,
            r"stride must be an integer or a pair of them, got 1.5 \(float\)",
        ),
        (lambda: conv(stride=2.0), DtypeError, "stride must be an integer"),
        (
            lambda: conv(stride=float("nan")),
            DtypeError,
            "stride must be an integer or a pair of them, got nan",
        ),
        (lambda: conv(stride="1"), DtypeError, "stride must be an integer"),
        (lambda: conv(stride=True), DtypeError, r"got True \(bool\)"),
        (lambda: conv(stride=np.True_), DtypeError, "stride must be an integer"),
        (lambda: conv(stride=None), DtypeError, "stride must be an integer"),
        (lambda: conv(stride={1, 2}), DtypeError, "stride must be an integer"),
        (lambda: conv(stride={0: 1, 1: 2}), DtypeError, "stride must be an integer"),
        (lambda: conv(stride=2**31), ProblemError, "stride must be below 2"),
        (lambda: conv(dilation=0), ProblemError, "dilation must be positive, got 0"),
        (lambda: conv(dilation=(2, "x")), DtypeError, "dilation must be an integer"),
        (lambda: conv(padding=-1), ProblemError, "padding must be zero or positive, got -1"),
        (lambda: conv(padding=((1, 2), (3, -4))), ProblemError, r"got -4 as the right of \(\("),
        (lambda: conv(padding=((1, 2), (3,))), ProblemError, r"\(\(top, bottom\), \(left"),
        (lambda: conv(padding=((1, 2), "ab")), ProblemError, r"\(\(top, bottom\), \(left"),
        (lambda: conv(padding=(1, (2, 3))), DtypeError, "padding must be an integer"),
        (
            lambda: conv(padding=(1, 2, 3, 4)),
            ProblemError,
            r"is written \(\(top, bottom\), \(left, right\)\), got \(1, 2, 3, 4\)$",
        ),
        (lambda: conv(padding=1.0), DtypeError, "padding must be an integer"),
        (lambda: conv(padding="SAME"), ProblemError, "'valid', 'same', an integer"),
        (
            lambda: conv(padding="same", stride=2),
            ProblemError,
            r"stride 1 only, got .*give the pixels of padding",
        ),
        (lambda: transpose(padding="same"), ProblemError, "padding must be an integer, a pair"),
        (lambda: conv((1, 4, 2, 8)), ProblemError, "spans 3 pixels along the height .*only 2"),
        (lambda: conv((1, 4, 9, 5), dilation=3), ProblemError, "spans 7 .* width .* only 5"),
        (lambda: transpose(output_padding=1), ProblemError, r"output_padding .*\(1 along the hei"),
        (lambda: transpose(output_padding=(0, 2), stride=2), ProblemError, "along the width"),
        (lambda: transpose(output_padding=-1), ProblemError, "zero or positive"),
        (lambda: transpose((1, 4, 1, 8), padding=2), ProblemError, "crops all of it"),
        (lambda: conv(padding=2**30), ProblemError, "below 2|elements"),
        (lambda: transpose(stride=2**30), ProblemError, "below 2|elements"),
        (lambda: conv((2**20, 4, 2**15, 2**15)), ProblemError, "more than any device holds"),
        (lambda: conv(layout="nchW"), ProblemError, "'NCHW' or 'NHWC', got 'nchW'"),
        (lambda: conv(dtype="f64"), DtypeError, "'f32', 'f16' or 'bf16', got 'f64'"),
        (lambda: conv(activation="mish"), ProblemError, "unknown activation 'mish'; known are"),
        (lambda: conv(activation=3), DtypeError, "None, a name or a tuple"),
        (lambda: conv(activation=()), DtypeError, "None, a name or a tuple"),
        (lambda: conv(activation=(["relu"],)), ProblemError, "unknown activation"),
        (lambda: conv(activation=("clip", 1)), ProblemError, r"written \('clip', low, high\), got"),
        (
            lambda: conv(activation="clip"),
            ProblemError,
            r"written \('clip', low, high\), got 'clip'",
        ),
        (lambda: conv(activation=("relu", 1)), ProblemError, r"written 'relu', got \('relu', 1\)"),
        (lambda: conv(activation=("clip", 2, 1)), ProblemError, "low <= high, got 2 and 1"),
        (lambda: conv(activation=("clip", math.nan, 1)), ProblemError, "must not be NaN"),
        (lambda: conv(activation=("leaky_relu", "x")), DtypeError, "must be numbers"),
        (lambda: conv(precision="bf16"), ProblemError, "must be 'default' or 'tf32', got 'bf16'"),
        (lambda: conv(dtype="f16", precision="tf32"), ProblemError, "of float32, got f16"),
    ],
)
def test_refused(made: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        made()


@pytest.mark.parametrize("value", [np.int64(2), np.uint8(2), np.array(2), (2,), [2, 2], (2, 2)])
def test_integers_and_pairs_of_many_kinds(value: Any) -> None:
    assert conv(stride=value).stride == (2, 2)
    assert conv(padding=value).padding == (2, 2, 2, 2)
    assert all(type(v) is int for v in conv(stride=value).stride)


def test_layouts_in_lower_case() -> None:
    assert conv(layout="nchw") == conv()
    shapes = (2, 9, 8, 4), (6, 4, 3, 3)
    lower, upper = (
        ConvProblem.from_call("conv2d", *shapes, layout=layout) for layout in ("nhwc", "NHWC")
    )
    assert lower == upper
    assert lower.c == 4


def test_a_problem_has_one_of_two_layouts_however_it_is_made() -> None:
    """One that has neither would show itself as NCHW and be computed as NHWC."""
    upper = conv().with_(layout="NHWC")
    assert conv().with_(layout="nhwc") == upper
    assert str(conv().with_(layout="nhwc")) == str(upper)
    assert ConvProblem("conv2d", "f32", 1, 1, 1, 1, 1, 1, 1, layout="nchw").layout == "NCHW"
    for layout in ("HWC", None, 1):
        with pytest.raises(ProblemError, match="layout must be 'NCHW' or 'NHWC', got"):
            conv().with_(layout=layout)


def test_arrays_as_pairs() -> None:
    assert conv(stride=np.array([1, 2])).stride == (1, 2)
    assert conv(padding=np.array([[1, 2], [3, 4]])).padding == (1, 2, 3, 4)
    assert conv(np.array([2, 4, 9, 8])).input_shape == (2, 4, 9, 8)


@pytest.mark.parametrize(
    ("taps", "dilation", "expected"),
    [
        ((3, 3), 1, (1, 1, 1, 1)),
        ((2, 4), 1, (0, 1, 1, 2)),  # an odd total puts the extra pixel behind
        ((2, 3), (3, 2), (1, 2, 2, 2)),
        ((1, 1), 5, (0, 0, 0, 0)),
    ],
)
def test_padding_same(taps: Any, dilation: Any, expected: Any) -> None:
    problem = conv(w=(6, 4, *taps), padding="same", dilation=dilation)
    assert problem.padding == expected
    assert problem.out_shape == (2, 6, 9, 8)


def test_padding_valid() -> None:
    assert conv(padding="valid", stride=2).padding == (0, 0, 0, 0)


# ---- derived ----


def test_shapes_and_sizes() -> None:
    p = conv((2, 9, 8, 4), (6, 2, 3, 2), groups=2, layout="NHWC", bias_shape=(6,), dtype="f16")
    assert p.input_shape == (2, 9, 8, 4)
    assert p.weight_shape == (6, 2, 3, 2)
    assert p.out_shape == (2, 7, 7, 6)
    assert (p.c_group, p.k_group, p.reduction) == (2, 3, 12)
    assert p.multiply_adds == 2 * 7 * 7 * 6 * 12
    assert (p.input_bytes, p.out_bytes, p.weight_bytes) == (2 * 1152 // 2, 2 * 588, 2 * 72)
    assert p.bias
    assert not p.residual
    assert p.residual_bytes == 0
    assert p.with_(residual=True).residual_bytes == p.out_bytes
    assert not p.empty
    assert conv((0, 4, 9, 8)).empty
    t = transpose(stride=2, padding=1, output_padding=(1, 0))
    assert t.out_shape == (2, 6, 18, 15)
    assert t.multiply_adds == 2 * 9 * 8 * 4 * 6 * 9


def test_parameters_beyond_float32_are_infinite() -> None:
    bounds = Activation.of(("clip", -1e300, 3.5e38))
    assert (bounds.a, bounds.b) == (-math.inf, math.inf)
    assert bounds == Activation.of(tuple(str(bounds).split(",")))
    largest = float(np.finfo(np.float32).max)
    assert Activation.of(("clip", -largest, largest)).b == largest


def test_activations() -> None:
    assert Activation.of(None) == IDENTITY
    assert Activation.of("relu6") == Activation.of(("clip", 0, 6))
    assert Activation.of("leaky_relu").parameters == (0.01,)
    assert Activation.of(["clip", -1, 1]).parameters == (-1.0, 1.0)
    assert Activation.of(Activation("relu")) == Activation("relu")
    assert str(Activation.of(("clip", 0, 6))) == "clip,0,6"
    for name in ACTIVATIONS:
        if name != "clip":
            assert isinstance(Activation.of(name), Activation)


# ---- PyTorch ----


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, ...]:
    """Calls near the border between right and wrong: one or two things may be off."""
    op = draw(st.sampled_from(OPS))
    groups = draw(st.sampled_from([1, 1, 2]))
    c, k = draw(st.integers(1, 3)) * groups, draw(st.integers(1, 3)) * groups
    taps = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    x = [draw(st.integers(1, 2)), c, draw(st.integers(1, 8)), draw(st.integers(1, 8))]
    w = [k, c // groups, *taps] if op == "conv2d" else [c, k // groups, *taps]
    one_or_two = st.one_of(st.integers(1, 3), st.tuples(st.integers(1, 3), st.integers(1, 3)))
    arguments: dict[str, Any] = {
        "stride": draw(one_or_two),
        "padding": draw(
            st.one_of(st.integers(0, 2), st.tuples(st.integers(0, 3), st.integers(0, 2)))
        ),
        "dilation": draw(one_or_two),
        "groups": groups,
    }
    if op == "conv2d":
        arguments["padding"] = draw(
            st.sampled_from([arguments["padding"], arguments["padding"], "same", "valid"])
        )
    else:
        arguments["output_padding"] = draw(st.integers(0, 2))
    bias = draw(st.sampled_from([None, [k]]))
    for _ in range(draw(st.integers(0, 2))):
        match draw(st.integers(0, 7)):
            case 0:
                x[1] += 1
            case 1:
                w[draw(st.integers(0, 1))] += 1
            case 2:
                del x[0]
            case 3:
                x.append(1)
            case 4:
                del w[0]
            case 5:
                bias = [k + 1]
            case 6:
                name = draw(st.sampled_from(["stride", "padding", "dilation"]))
                arguments[name] = draw(st.sampled_from([-1, (1, 2, 3), (2,), [1, 2], 1.5, True]))
            case 7:
                x[0] = 0
    return op, tuple(x), tuple(w), bias, arguments


@given(calls())
@settings(max_examples=400)
def test_agrees_with_pytorch(call: tuple[Any, ...]) -> None:
    torch = pytest.importorskip("torch")
    op, x, w, bias, arguments = call
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the speed of padding='same'
            bias_given = None if bias is None else torch.zeros(bias)
            function = getattr(torch.nn.functional, op)
            theirs = tuple(function(torch.zeros(x), torch.zeros(w), bias_given, **arguments).shape)
    except (RuntimeError, TypeError, ValueError):
        theirs = None
    try:
        shape = (1, *x) if len(x) == 3 else x
        problem = ConvProblem.from_call(op, shape, w, bias_shape=bias, **arguments)
        ours = problem.out_shape if len(x) == 4 else problem.out_shape[1:]
    except ProblemError:
        ours = None
    if ours is None and theirs is not None:
        # What only we refuse: an output without pixels, and with an empty batch anything that
        # PyTorch does not come to look at.
        assert 0 in theirs, (theirs, call)
    else:
        assert ours == theirs
