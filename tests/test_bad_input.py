"""What can go wrong in a call, through the public names: one clear exception each.

Each is of the kind that a caller who knows nothing of wgpuconv would catch, says what came and
what was expected, and leaves the device usable. test_problem.py has all that concerns shapes and
parameters in detail, test_robustness.py what could kill the process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from wgpuconv import (
    Conv2d,
    ConvProblem,
    Device,
    Tensor,
    conv2d,
    conv_transpose2d,
    errors,
    prewarm,
    tensor,
)

X = np.ones((2, 4, 6, 6), np.float32)
W = np.ones((6, 4, 3, 3), np.float32)
WT = np.ones((4, 6, 3, 3), np.float32)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


Case = tuple[Callable[[Device], Any], type[Exception], type[Exception], str]

CASES: dict[str, Case] = {
    "input rank": (
        lambda d: conv2d(ones(4, 4), W, device=d),
        errors.ProblemError, ValueError,
        r"input must have 4 dimensions \(N, C, H, W\) or 3 .* got shape \(4, 4\)",
    ),
    "weight rank": (
        lambda d: conv2d(X, ones(6, 4, 3), device=d),
        errors.ProblemError, ValueError,
        r"weight must have 4 dimensions \(K, C/groups, R, S\), got shape \(6, 4, 3\)",
    ),
    "channels": (
        lambda d: conv2d(ones(2, 5, 6, 6), W, device=d),
        errors.ProblemError, ValueError, r"5 channels a group, got shape \(6, 4, 3, 3\)",
    ),
    "channels of a transposed convolution": (
        lambda d: conv_transpose2d(X, W, device=d),
        errors.ProblemError, ValueError, r"4 input channels as the input has, got shape \(6, 4",
    ),
    "channels in the other layout": (
        lambda d: conv2d(X, W, layout="NHWC", device=d),
        errors.ProblemError, ValueError, r"6 channels a group",
    ),
    "problems to prewarm": (
        lambda d: prewarm(None, d),  # type: ignore[arg-type]
        errors.DtypeError, TypeError, "prewarm takes problems or their texts, got None",
    ),
    "a problem's text": (
        lambda d: ConvProblem.parse(3),  # type: ignore[arg-type]
        errors.DtypeError, TypeError, "a problem's text must be a string, got an int",
    ),
    "groups": (
        lambda d: conv2d(X, W, groups=3, device=d),
        errors.ProblemError, ValueError, "groups must divide the 4 input channels, got groups=3",
    ),
    "bias length": (
        lambda d: conv2d(X, W, ones(5), device=d),
        errors.ProblemError, ValueError, r"bias must have shape \(6,\), .* got \(5,\)",
    ),
    "residual shape": (
        lambda d: conv2d(X, W, residual=ones(2, 6, 4, 5), device=d),
        errors.ProblemError, ValueError,
        r"residual must have the result's shape \(2, 6, 4, 4\), got \(2, 6, 4, 5\)",
    ),
    "residual of one image": (
        lambda d: conv2d(X[0], W, residual=ones(1, 6, 4, 4), device=d),
        errors.ProblemError, ValueError, r"result's shape \(6, 4, 4\), got \(1, 6, 4, 4\)",
    ),
    "residual dtype": (
        lambda d: conv2d(X, W, residual=ones(2, 6, 4, 4).astype("f2"), device=d),
        errors.DtypeError, TypeError, "residual must have the input's dtype float32, got float16",
    ),
    "residual that is no array": (
        lambda d: conv2d(X, W, residual=1.0, device=d),
        errors.DtypeError, TypeError, "numpy array or a wgpuconv.Tensor of values, got a float$",
    ),
    "input that is a list": (
        lambda d: conv2d([[1.0]], W, device=d),
        errors.DtypeError, TypeError, r"got a list; pass numpy.asarray\(value, numpy.float32\)$",
    ),
    "input that is nothing": (
        lambda d: conv2d(None, W, device=d),
        errors.DtypeError, TypeError, "input must be a numpy array .* got None$",
    ),
    "weight that is a number": (
        lambda d: conv2d(X, 3, device=d),
        errors.DtypeError, TypeError, "weight must be a numpy array .* got an int$",
    ),
    "numbers of channels": (
        lambda d: Conv2d(8, 16, 3, device=d),
        errors.DtypeError, TypeError,
        r"^a Conv2d takes the weight array \(K, C/groups, R, S\), not numbers of channels",
    ),
    "a layer as weight": (
        lambda d: Conv2d(Conv2d(W, device=d), device=d),
        errors.DtypeError, TypeError, "got a wgpuconv.Conv2d; pass its .weight$",
    ),
    "tensor of a string": (
        lambda d: tensor("a", d),
        errors.DtypeError, TypeError, "^tensor takes an array of numbers, got a str$",
    ),
    "tensor of nothing": (
        lambda d: tensor(None, d),
        errors.DtypeError, TypeError, "^tensor takes an array of numbers, got None$",
    ),
    "residual on another device": (
        lambda d: conv2d(X, W, residual=tensor(ones(2, 6, 4, 4), Device()), device=d),
        errors.MixedDevicesError, ValueError, "residual and the call use two Device objects",
    ),
    "residual in the place of the result": (
        lambda d: conv2d(X, W, residual=(r := tensor(ones(2, 6, 4, 4), d)), out=r, device=d),
        errors.ProblemError, ValueError, "out must not be the buffer of the residual; give",
    ),
    "stride": (
        lambda d: conv2d(X, W, stride=0, device=d),
        errors.ProblemError, ValueError, "stride must be positive, got 0",
    ),
    "dilation": (
        lambda d: conv2d(X, W, dilation=-1, device=d),
        errors.ProblemError, ValueError, "dilation must be positive, got -1",
    ),
    "padding": (
        lambda d: conv2d(X, W, padding=-1, device=d),
        errors.ProblemError, ValueError, "padding must be zero or positive, got -1",
    ),
    "output_padding": (
        lambda d: conv_transpose2d(X, WT, stride=2, output_padding=2, device=d),
        errors.ProblemError, ValueError, r"output_padding must be smaller .* \(2 along .* got 2",
    ),
    "kernel larger than the padded input": (
        lambda d: conv2d(X[:, :, :1], W, device=d),
        errors.ProblemError, ValueError, "spans 3 pixels along the height .* has only 1",
    ),
    "padding crops all": (
        lambda d: conv_transpose2d(X[:, :, :1], WT, padding=2, device=d),
        errors.ProblemError, ValueError, "output would have -1 pixels along the height",
    ),
    "NaN": (
        lambda d: conv2d(X, W, stride=float("nan"), device=d),
        errors.DtypeError, TypeError, "stride must be an integer or a pair of them, got nan",
    ),
    "fraction": (
        lambda d: conv2d(X, W, padding=1.5, device=d),
        errors.DtypeError, TypeError, "padding must be an integer, a pair of them or .*, got 1.5",
    ),
    "huge": (
        lambda d: conv2d(X, W, padding=1 << 40, device=d),
        errors.ProblemError, ValueError, r"padding must be below 2\^31",
    ),
    "overflow of the output": (
        lambda d: conv2d(X, W, padding=1 << 28, device=d),
        errors.ProblemError, ValueError, "more than any device holds",
    ),
    "larger than the device": (
        lambda d: conv2d(X, W, padding=1 << 17, device=d),
        errors.DeviceError, RuntimeError, "max-buffer-size|no memory left",
    ),
    "two devices": (
        lambda d: conv2d(tensor(X, d), tensor(W, Device())),
        errors.MixedDevicesError, ValueError, "weight and the call use two Device objects",
    ),
    "unknown algorithm": (
        lambda d: conv2d(X, W, algorithm="fft", device=d),
        errors.UnknownAlgorithmError, ValueError, "unknown algorithm 'fft'; known are direct",
    ),
    "algorithm that does not apply": (
        lambda d: conv2d(X, W, algorithm="gemm_1x1", device=d),
        errors.AlgorithmRefusedError, ValueError,
        "'gemm_1x1' does not apply to conv2d f32 n2 .*; those that apply: .*direct",
    ),
    "algorithm of the other operation": (
        lambda d: conv2d(X, W, algorithm="col2im", device=d),
        errors.AlgorithmRefusedError, ValueError, "computes conv_transpose2d, not conv2d",
    ),
    "dtype": (
        lambda d: conv2d(X.astype(np.float64), W, device=d),
        errors.DtypeError, TypeError, r"got float64; convert it with .astype\(numpy.float32\)",
    ),
    "integers": (
        lambda d: conv2d(X.astype(np.int32), W.astype(np.int32), device=d),
        errors.DtypeError, TypeError, "must have dtype float32 or float16, got int32",
    ),
    "layout": (
        lambda d: conv2d(X, W, layout="CHWN", device=d),
        errors.ProblemError, ValueError, "'NCHW' or 'NHWC', got 'CHWN'",
    ),
    "activation": (
        lambda d: conv2d(X, W, activation="mish", device=d),
        errors.ProblemError, ValueError, "unknown activation 'mish'; known are identity, relu",
    ),
    "out of another shape": (
        lambda d: conv2d(X, W, out=ones(2, 6, 4, 5), device=d),
        errors.ProblemError, ValueError, r"out must have shape \(2, 6, 4, 4\)",
    ),
    "workspace_limit": (
        lambda d: conv2d(X, W, workspace_limit=-1, device=d),
        errors.ProblemError, ValueError, "workspace_limit must be zero or more bytes, got -1",
    ),
    "device that is not there": (
        lambda d: conv2d(X, W, device="wgpu:99"),
        errors.NoAdapterError, RuntimeError, "no device 'wgpu:99'",
    ),
    "module with a bad call": (
        lambda d: Conv2d(W, device=d)(ones(2, 3, 6, 6)),
        errors.ProblemError, ValueError, "3 channels a group",
    ),
    "tensor of a bad shape": (
        lambda d: Tensor.empty((2, -1), device=d),
        errors.ProblemError, ValueError, "no negative sizes",
    ),
    "workspace that cannot suffice": (
        lambda d: conv2d(X, W, algorithm="im2col_gemm", workspace_limit=64, device=d),
        errors.AlgorithmRefusedError, ValueError, "workspace",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_one_clear_exception(device: Device, name: str) -> None:
    call, kind, builtin, says = CASES[name]
    with pytest.raises(kind, match=says) as caught:
        call(device)
    assert isinstance(caught.value, errors.WgpuConvError)
    assert isinstance(caught.value, builtin)
    message = str(caught.value)
    assert message[0] == message[0].lower() or message[0].isdigit()  # fits after 'error: '
    assert not message.endswith(".")
    assert np.array_equal(conv2d(ones(1, 1, 2, 2), ones(1, 1, 2, 2), device=device), [[[[4]]]])


def test_the_tree_of_errors() -> None:
    """The docstring's tree, class by class."""
    tree = errors.__doc__ or ""
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass)]
    assert classes
    for kind in classes:
        if kind.__module__ != errors.__name__:
            continue
        assert kind.__name__ in tree
        assert kind.__doc__
        if issubclass(kind, Warning):
            continue
        assert issubclass(kind, errors.WgpuConvError)
        line = next(line for line in tree.splitlines() if f" {kind.__name__}" in f" {line}")
        for base in kind.__bases__:
            if base.__module__ == "builtins" and base is not Exception:
                assert base.__name__ in line, line


def test_nothing_is_accepted_that_has_no_meaning(device: Device) -> None:
    with pytest.raises(TypeError):
        conv2d(X, W, None, 1, 0, 1, 1, "relu")  # by name only
    with pytest.raises(TypeError):
        conv2d(X, W, output_padding=1)
    with pytest.raises(TypeError):
        conv2d(X)
