"""ONNX's own tests of Conv and ConvTranspose, through the public API.

The `onnx` package holds them in two forms: node tests that its Python files make, and models
converted from PyTorch's tests of its layers, with stored inputs and outputs.
"""

from __future__ import annotations

import importlib
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wgpuconv
from wgpuconv import Device

onnx = pytest.importorskip("onnx")
helper, numpy_helper = onnx.helper, onnx.numpy_helper

pytestmark = pytest.mark.xdist_group("onnx")

SKIPPED = {
    "test_convtranspose_1d": "one spatial dimension",
    "test_convtranspose_3d": "three spatial dimensions",
    "test_Conv1d": "one spatial dimension",
    "test_Conv3d": "three spatial dimensions",
    "test_convinteger": "integers: a quantised operation",
    "test_qlinearconv": "integers: a quantised operation",
    "test_basic_deform_conv": "deformable: each tap has an offset of its own",
    "test_deform_conv": "deformable: each tap has an offset of its own",
    "test_causal_conv": "one spatial dimension, with a state",
}
"""Prefixes of names, and why none of these is an operation of this package."""


@dataclass(frozen=True)
class Case:
    name: str
    node: Any
    inputs: tuple[np.ndarray, ...]
    output: np.ndarray
    rtol: float
    atol: float


def reason_to_skip(name: str) -> str | None:
    return next((why for prefix, why in SKIPPED.items() if name.startswith(prefix)), None)


def node_cases() -> list[Any]:
    package = importlib.import_module("onnx.backend.test.case.node")
    folder = Path(package.__file__).parent
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # onnx 1.23 with NumPy 2.5
        for path in sorted(folder.glob("*conv*.py")):  # importing a file makes its cases
            importlib.import_module(f"{package.__name__}.{path.stem}")
    return [case for case in package._NodeTestCases if "conv" in case.name.lower()]


def converted_models() -> list[Path]:
    data = Path(importlib.import_module("onnx.backend.test").__file__).parent / "data"
    return sorted(
        folder
        for kind in ("pytorch-converted", "pytorch-operator")
        for folder in (data / kind).glob("*[Cc]onv*")
    )


def from_model(folder: Path) -> Case:
    """A stored model of one convolution; its weights are initializers or inputs."""
    model = onnx.load(folder / "model.onnx")
    known = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    free = [i.name for i in model.graph.input if i.name not in known]
    stored = folder / "test_data_set_0"
    for number, name in enumerate(free):
        known[name] = array(stored / f"input_{number}.pb")
    (node,) = model.graph.node
    inputs = tuple(known[name] for name in node.input)
    return Case(folder.name, node, inputs, array(stored / "output_0.pb"), 1e-3, 1e-7)


def array(path: Path) -> np.ndarray:
    tensor = onnx.TensorProto()
    tensor.ParseFromString(path.read_bytes())
    return np.array(numpy_helper.to_array(tensor))


def cases() -> list[Any]:
    found = []
    for made in node_cases():
        if reason_to_skip(made.name) is None:
            (inputs, outputs) = made.data_sets[0]
            (node,) = made.model.graph.node
            found.append(Case(made.name, node, tuple(inputs), outputs[0], made.rtol, made.atol))
    found += [from_model(f) for f in converted_models() if reason_to_skip(f.name) is None]
    return [pytest.param(case, id=case.name) for case in found]


def call(case: Case, device: Device) -> np.ndarray:
    """The public call that an ONNX node stands for."""
    given = {a.name: helper.get_attribute_value(a) for a in case.node.attribute}
    x, weight, *rest = case.inputs
    taps = weight.shape[2:]
    assert tuple(given.pop("kernel_shape", taps)) == taps
    stride, dilation = (tuple(given.pop(name, (1, 1))) for name in ("strides", "dilations"))
    arguments = {
        "stride": stride,
        "dilation": dilation,
        "groups": given.pop("group", 1),
        "bias": rest[0] if rest else None,
        "device": device,
    }
    auto = given.pop("auto_pad", b"NOTSET").decode()
    pads = given.pop("pads", (0, 0, 0, 0))  # tops and lefts, then bottoms and rights
    span = [d * (t - 1) + 1 for d, t in zip(dilation, taps, strict=True)]
    size = x.shape[2:]
    if case.node.op_type == "Conv":
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            total = [
                max(0, (math.ceil(size[i] / stride[i]) - 1) * stride[i] + span[i] - size[i])
                for i in (0, 1)
            ]
            pads = _shared(total, upper=auto == "SAME_UPPER")
        assert not given, f"attributes without a meaning here: {given}"
        padding = ((pads[0], pads[2]), (pads[1], pads[3]))
        return wgpuconv.conv2d(x, weight, padding=padding, **arguments)
    assert case.node.op_type == "ConvTranspose"
    extra = tuple(given.pop("output_padding", (0, 0)))
    shape = given.pop("output_shape", None)
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        shape = [size[i] * stride[i] for i in (0, 1)]
    if shape is not None:
        total = [stride[i] * (size[i] - 1) + extra[i] + span[i] - shape[i] for i in (0, 1)]
        # What is missing becomes output_padding: padding is never negative here.
        extra = tuple(extra[i] + max(0, -total[i]) for i in (0, 1))
        pads = _shared([max(0, t) for t in total], upper=auto == "SAME_UPPER")
    assert not given, f"attributes without a meaning here: {given}"
    return wgpuconv.conv_transpose2d(
        x,
        weight,
        padding=((pads[0], pads[2]), (pads[1], pads[3])),
        output_padding=extra,
        **arguments,
    )


def _shared(total: list[int], *, upper: bool) -> tuple[int, int, int, int]:
    """ONNX's split of a total padding: an odd pixel goes behind for 'upper', else before."""
    small, large = [t // 2 for t in total], [t - t // 2 for t in total]
    return (*small, *large) if upper else (*large, *small)


@pytest.mark.parametrize("case", cases())
def test_onnx(device: Device, case: Case) -> None:
    y = call(case, device)
    assert y.dtype == case.output.dtype == np.float32
    np.testing.assert_allclose(y, case.output, rtol=case.rtol, atol=case.atol)


def test_nothing_is_skipped_without_a_reason_that_holds() -> None:
    """Every case that ONNX ships runs, or is of another operation or rank."""
    names = [case.name for case in node_cases()] + [f.name for f in converted_models()]
    assert len([name for name in names if reason_to_skip(name) is None]) >= 26
    for case in node_cases():
        if reason_to_skip(case.name) is None:
            continue
        operations = {node.op_type for node in case.model.graph.node}
        x = case.data_sets[0][0][0]
        supported = x.ndim == 4 and x.dtype in (np.float32, np.float16)
        assert not (operations & {"Conv", "ConvTranspose"} and supported), case.name
    for folder in converted_models():
        if reason_to_skip(folder.name) is not None:
            weights = onnx.load(folder / "model.onnx").graph.initializer
            assert all(len(t.dims) in (1, 3, 5) for t in weights), folder.name
