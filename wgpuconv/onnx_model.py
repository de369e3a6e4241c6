"""The convolutions of a user's ONNX model, as a suite's entries. The only module that imports onnx.

Shapes come from onnx's shape inference. Nothing is computed, so weights that lie in files beside
the model need not be there.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

from .errors import MissingExtraError, ModelWarning, ProblemError
from .problem import Activation, ConvProblem, Op
from .suites import Entry

Shape = tuple[int | None, ...]

_OPS: dict[str, Op] = {"Conv": "conv2d", "ConvTranspose": "conv_transpose2d"}
_RELATED = re.compile(r"\w*Conv(Integer|Transpose|WithState)?")
"""Operators that a reader would look for among a model's convolutions: QLinearConv, FusedConv."""
_STANDARD = ("", "ai.onnx")
_DTYPES = {1: "f32", 10: "f16", 16: "bf16"}
"""By ONNX's number of a type (TensorProto.DataType)."""


def read_model(
    path: str | PathLike[str], *, batch: int | None = None, size: tuple[int, int] | None = None
) -> list[Entry]:
    """Every Conv and ConvTranspose of a model, equal ones once with their count.

    They come in the model's order, each under the name of its first node; those inside of If,
    Loop, Scan and of functions count once. A 1-D convolution is one of height 1. What is alone in
    taking a convolution's output becomes part of it, as runtimes do it: a batch normalisation is
    folded into the weights and a bias, and an activation behind either is applied in place.

    ``batch`` and ``size`` (height, width) stand for what the model's inputs leave open. Where the
    model fixes its batch, the layers' batches are multiplied instead.

    What cannot be a problem here (three spatial dimensions, a quantised operator, a shape that is
    known only when the model runs) is left out, and a ModelWarning says what and why.

    Raises ProblemError if the file is no ONNX model, an input's open dimension is not given, or no
    convolution is left; MissingExtraError without the package ``onnx``.
    """
    onnx = _onnx()
    name = Path(path).name
    model = _loaded(onnx, Path(path))
    inputs = _bind(name, model.graph, batch, size)
    model = _inferred(onnx, name, model)
    counts: dict[ConvProblem, int] = {}
    names: dict[ConvProblem, str] = {}
    left_out: defaultdict[str, list[str]] = defaultdict(list)
    for node, scope in _nodes(onnx, model.graph):
        if not _RELATED.fullmatch(_decoded(node.op_type)):
            continue
        label = _label(node)
        try:
            problem = _problem(node, scope)
        except _UnknownShape as unknown:
            if inputs.unbound:
                raise ProblemError(f"{name}: {unknown} at {label}; {inputs.advice()}") from None
            left_out[f"{unknown} before the model runs"].append(label)
        except ProblemError as error:
            left_out[str(error)].append(label)
        else:
            problem = inputs.rebatched(problem)
            names.setdefault(problem, label)
            counts[problem] = counts.get(problem, 0) + 1
    reasons = [f"{_some(labels)} ({reason})" for reason, labels in left_out.items()]
    if not counts:
        raise ProblemError(
            f"{name} has no convolution that can be read: {'; '.join(reasons)}"
            if reasons
            else f"{name} has no convolution: no Conv and no ConvTranspose"
        )
    for reason in reasons:
        warnings.warn(ModelWarning(f"{name}: left out {reason}"), stacklevel=2)
    return [Entry(names[problem], problem, count) for problem, count in counts.items()]


# ---- the file ----


def _onnx() -> Any:
    try:
        import onnx
        import onnx.inliner
    except ImportError as error:
        raise MissingExtraError(
            f"reading a model needs onnx ({error}); install it with: pip install 'wgpuconv[bench]'"
        ) from error
    return onnx


def _loaded(onnx: Any, path: Path) -> Any:
    """The model, with its local functions written out and without the values of its weights."""
    from google.protobuf.message import DecodeError

    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ProblemError(f"there is no model '{path}'") from None
    except OSError as error:
        raise ProblemError(f"'{path}' cannot be read: {error.strerror}") from error
    try:
        model = onnx.load_model_from_string(data)
    except DecodeError:
        model = onnx.ModelProto()
    if not model.graph.node or not model.opset_import:
        raise ProblemError(
            f"'{path}' is no ONNX model, as torch.onnx.export and other exporters write them"
        )
    for tensor in model.graph.initializer:
        # Inference copies the model several times, and reads the values of shapes alone.
        if math.prod(tensor.dims) > 4096:
            for values in ("raw_data", "float_data", "int32_data"):
                tensor.ClearField(values)
    if model.functions:
        try:
            model = onnx.inliner.inline_local_functions(model)
        except RuntimeError as error:
            raise ProblemError(f"{path.name} has functions that are wrong: {error}") from error
    return model


def _inferred(onnx: Any, name: str, model: Any) -> Any:
    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError) as error:
        raise ProblemError(f"the shapes of {name} cannot be inferred: {error}") from error


# ---- the model's inputs ----


@dataclass(frozen=True)
class _Inputs:
    """What a model's inputs leave open, and what was given for it."""

    unbound: dict[str, str]
    """'batch' or 'size', and the first input that leaves it open."""
    factor: tuple[int, int] = (1, 1)
    """Every layer's batch is multiplied by the first, divided by the second."""

    def advice(self) -> str:
        (text, *_) = self.unbound.values()
        examples = {"batch": "--batch 1", "size": "--size 224,224"}
        return (
            f"the model's input {text} leaves it open: give the {' and the '.join(self.unbound)} "
            f"({' '.join(examples[what] for what in self.unbound)})"
        )

    def rebatched(self, problem: ConvProblem) -> ConvProblem:
        batch, rest = divmod(problem.n * self.factor[0], self.factor[1])
        return problem if rest else replace(problem, n=batch)


def _bind(name: str, graph: Any, batch: int | None, size: tuple[int, int] | None) -> _Inputs:
    """Writes what is given into the inputs' open dimensions."""
    given = {"batch": batch, "height": size and size[0], "width": size and size[1]}
    for what, wanted in given.items():
        if wanted is not None and wanted < 1:
            raise ProblemError(f"the {what} must be at least 1, got {wanted}")
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    shown = ", ".join(map(_text, inputs))
    unbound: dict[str, str] = {}
    bound, fixed = set(), set()
    for value in inputs:
        text, dims = _text(value), value.type.tensor_type.shape.dim
        for axis, what in _roles(dims).items():
            wanted = given[what]
            if dims[axis].dim_value > 0:
                if what == "batch" and len(dims) > 2:
                    fixed.add(dims[axis].dim_value)
            elif wanted is None:
                unbound.setdefault("batch" if what == "batch" else "size", text)
            else:
                dims[axis].dim_value = wanted
                bound.add(what)
    if size is not None and not bound & {"height", "width"}:
        raise ProblemError(f"a size was given, but the inputs of {name} have theirs: {shown}")
    if bound:
        # What the model says of its other values may state the sizes that it was made with.
        del graph.value_info[:]
        for value in graph.output:
            value.type.tensor_type.ClearField("shape")
    if batch is None or "batch" in bound:
        return _Inputs(unbound)
    if len(fixed) != 1:
        raise ProblemError(f"a batch was given, but the inputs of {name} share none: {shown}")
    return _Inputs(unbound, (batch, fixed.pop()))


def _roles(dims: Any) -> dict[int, str]:
    """What an input's dimensions are, by position."""
    if len(dims) == 4:
        channels_last = dims[1].dim_value < 1 <= dims[3].dim_value  # as from TensorFlow
        first = 1 if channels_last else 2
        return {0: "batch", first: "height", first + 1: "width"}
    return {0: "batch", 2: "width"} if len(dims) == 3 else {0: "batch"} if dims else {}


def _text(value: Any) -> str:
    """An input's name and shape."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return f"{_decoded(value.name)} (no shape)"
    sizes = (d.dim_value if d.dim_value > 0 else d.dim_param or "?" for d in tensor.shape.dim)
    return f"{_decoded(value.name)} ({', '.join(map(str, sizes))})"


# ---- graphs ----


class _UnknownShape(Exception):
    """A shape that inference did not find."""


class _Scope:
    """What is known of the values of a graph and of those around it."""

    def __init__(self, onnx: Any, graph: Any, outer: _Scope | None = None) -> None:
        self.onnx = onnx
        self.shapes: dict[str, Shape] = dict(outer.shapes) if outer else {}
        self.dtypes: dict[str, int] = dict(outer.dtypes) if outer else {}
        self.constants: dict[str, Any] = dict(outer.constants) if outer else {}
        self.users: defaultdict[str, list[Any]] = defaultdict(list)
        """The nodes that take a value, once for each time; None for an output of the graph."""
        for value in (*graph.input, *graph.output, *graph.value_info):
            tensor = value.type.tensor_type
            self.dtypes[value.name] = tensor.elem_type
            if tensor.HasField("shape"):
                self.shapes[value.name] = tuple(
                    d.dim_value if d.dim_value > 0 else None for d in tensor.shape.dim
                )
        for tensor in graph.initializer:
            self.dtypes[tensor.name] = tensor.data_type
            self.shapes[tensor.name] = tuple(tensor.dims)
            self.constants[tensor.name] = tensor
        for node in graph.node:
            if node.op_type == "Constant":
                for attribute in node.attribute:
                    if attribute.name == "value":
                        self.constants[node.output[0]] = attribute.t
            for name in _reads(node):
                self.users[name].append(node)
        for value in graph.output:
            self.users[value.name].append(None)

    def number(self, name: str) -> float | None:
        """A constant of one element."""
        tensor = self.constants.get(name)
        if tensor is None or math.prod(tensor.dims) != 1 or tensor.data_location:
            return None
        return float(self.onnx.numpy_helper.to_array(tensor).item())


def _nodes(onnx: Any, graph: Any, outer: _Scope | None = None) -> Iterator[tuple[Any, _Scope]]:
    """The nodes of a graph and of the graphs in them, each with what is known around it."""
    scope = _Scope(onnx, graph, outer)
    for node in graph.node:
        yield node, scope
        for inner in _subgraphs(node):
            yield from _nodes(onnx, inner, scope)


def _subgraphs(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _reads(node: Any) -> Iterator[str]:
    """The values that a node takes, also for the graphs in it."""
    yield from node.input
    for graph in _subgraphs(node):
        for inner in graph.node:
            yield from _reads(inner)
        yield from (value.name for value in graph.output)


def _label(node: Any) -> str:
    """The node's name in the form that a suite's line takes."""
    return re.sub(r"[\s#]+", "_", _decoded(node.name or next(iter(node.output), node.op_type)))


def _decoded(text: str | bytes) -> str:
    """A model's text; protobuf leaves one that is not UTF-8 as bytes."""
    return text if isinstance(text, str) else text.decode(errors="replace")


def _some(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
    return ", ".join(labels[:3]) + more


# ---- nodes ----


@dataclass(frozen=True)
class _Attributes:
    """Those of a Conv or ConvTranspose, as ONNX defines what is absent."""

    group: int
    kernel_shape: list[int]
    strides: list[int]
    dilations: list[int]
    pads: list[int]
    """Before each dimension, then behind each."""
    auto_pad: bytes
    output_padding: list[int]
    output_shape: list[int]
    """Empty where absent."""

    @classmethod
    def of(cls, node: Any, taps: list[int]) -> _Attributes:
        given = {attribute.name: attribute for attribute in node.attribute}
        rank = len(taps)

        def numbers(name: str, default: list[int]) -> list[int]:
            return list(given[name].ints) if name in given else default

        return cls(
            given["group"].i if "group" in given else 1,
            numbers("kernel_shape", taps),
            numbers("strides", [1] * rank),
            numbers("dilations", [1] * rank),
            numbers("pads", [0] * 2 * rank),
            given["auto_pad"].s if "auto_pad" in given else b"NOTSET",
            numbers("output_padding", [0] * rank),
            numbers("output_shape", [])[-rank:],
        )

    def wrong(self, taps: list[int]) -> bool:
        """Whether they are of another number of dimensions, or of another kernel."""
        rank = len(taps)
        ranks = {len(v) for v in (self.strides, self.dilations, self.output_padding)}
        return (
            ranks != {rank}
            or len(self.pads) != 2 * rank
            or len(self.output_shape) not in (0, rank)
            or self.kernel_shape != taps
            or min(self.strides) < 1
        )

    def __str__(self) -> str:
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))


def _problem(node: Any, scope: _Scope) -> ConvProblem:
    """The problem of a node; ProblemError says why there is none, without the node's name."""
    op = _OPS.get(node.op_type)
    if op is None or node.domain not in _STANDARD:
        operator = f"{node.domain}.{node.op_type}".lstrip(".")
        raise ProblemError(f"{operator} is another operator than Conv and ConvTranspose")
    if len(node.input) < 2 or not node.output:
        raise ProblemError(f"it has {len(node.input)} inputs and {len(node.output)} outputs")
    x, weight, *rest = node.input
    first, second, *taps = _known("kernel", scope.shapes.get(weight))
    if len(taps) not in (1, 2):
        raise ProblemError(f"it has {len(taps)} spatial dimensions")
    dtype = scope.dtypes.get(x) or scope.dtypes[weight]
    if dtype not in _DTYPES:
        names = {number: name for name, number in scope.onnx.TensorProto.DataType.items()}
        raise ProblemError(f"it computes in {names.get(dtype, f'type {dtype}').lower()}")
    given = _Attributes.of(node, taps)
    groups = given.group
    # The kernel says it too, and knows it where an input's channels are open.
    channels = first if op == "conv_transpose2d" else second * groups
    shape = scope.shapes.get(x)
    if shape and len(shape) > 1:
        shape = (shape[0], shape[1] or channels, *shape[2:])
    n, c, *sizes = _known("input", shape)
    if len(sizes) != len(taps) or given.wrong(taps):
        kernel = (first, second, *taps)
        raise ProblemError(f"an input {shape}, a kernel {kernel}, {given} do not fit")
    before, after, extra = _borders(op, sizes, taps, given)
    filters = second * groups if op == "conv_transpose2d" else first
    output, folded = _normalised(node.output[0], scope)
    return ConvProblem.from_call(
        op,
        (n, c, *_two(sizes, 1)),
        (first, second, *_two(taps, 1)),
        dtype=_DTYPES[dtype],
        bias_shape=(filters,) if any(rest) or folded else None,
        stride=_two(given.strides, 1),
        padding=tuple(zip(_two(before, 0), _two(after, 0), strict=True)),
        dilation=_two(given.dilations, 1),
        output_padding=_two(extra, 0),
        groups=groups,
        activation=_activation(output, scope),
    )


def _two(values: Sequence[int], missing: int) -> list[int]:
    """For both dimensions: a 1-D convolution is one of height 1."""
    return [missing] * (2 - len(values)) + list(values)


def _known(what: str, shape: Shape | None) -> tuple[int, ...]:
    if shape is None or None in shape:
        raise _UnknownShape(f"the {what}'s shape is unknown")
    if len(shape) < 3:
        raise ProblemError(f"the {what}'s shape is {shape}, without a spatial dimension")
    return tuple(size for size in shape if size is not None)


def _borders(
    op: Op, sizes: list[int], taps: list[int], given: _Attributes
) -> tuple[list[int], list[int], list[int]]:
    """Padding before and behind each spatial dimension, and the output padding.

    As the operators' documentation has it (onnx.ai/onnx/operators): SAME makes an output of
    size / stride, rounded up, for Conv and of size * stride for ConvTranspose, whose output_shape
    may also be given. An odd total puts its extra pixel behind for SAME_UPPER, else before.
    """
    rank, transposed = len(sizes), op == "conv_transpose2d"
    steps = list(zip(sizes, given.strides, strict=True))
    spans = [d * (t - 1) + 1 for d, t in zip(given.dilations, taps, strict=True)]
    extra = given.output_padding
    outputs = given.output_shape if transposed else []
    if not outputs and given.auto_pad in (b"SAME_UPPER", b"SAME_LOWER"):
        outputs = [size * stride if transposed else -(-size // stride) for size, stride in steps]
    if not outputs:
        pads = [0] * 2 * rank if given.auto_pad == b"VALID" else given.pads
        return pads[:rank], pads[rank:], extra
    totals = []
    for i, (size, stride) in enumerate(steps):
        if transposed:
            totals.append((size - 1) * stride + spans[i] + extra[i] - outputs[i])
        else:
            totals.append((outputs[i] - 1) * stride + spans[i] - size)
    if transposed:  # what is missing becomes output padding: padding is never negative here
        extra = [e + max(0, -total) for e, total in zip(extra, totals, strict=True)]
    totals = [max(0, total) for total in totals]
    small, large = [t // 2 for t in totals], [t - t // 2 for t in totals]
    return (small, large, extra) if given.auto_pad == b"SAME_UPPER" else (large, small, extra)


def _normalised(y: str, scope: _Scope) -> tuple[str, bool]:
    """The value behind a batch normalisation that is alone in taking ``y``, and whether one is."""
    match scope.users[y]:
        case [user] if user is not None and user.op_type == "BatchNormalization":
            if user.domain in _STANDARD and not any(user.output[1:]):  # those are of training
                return user.output[0], True
    return y, False


def _activation(y: str, scope: _Scope) -> Activation | None:
    """The activation that is alone in taking ``y``, where there is one of its kind."""
    users = scope.users[y]
    if None in users or any(user.domain not in _STANDARD for user in users):
        return None
    if sorted(user.op_type for user in users) == ["Mul", "Sigmoid"]:
        product, gate = sorted(users, key=lambda user: str(user.op_type))
        alone = scope.users[gate.output[0]] == [product]
        return Activation.of("silu") if alone and gate.output[0] in product.input else None
    if len(users) != 1:
        return None
    (user,) = users
    given = {attribute.name: attribute for attribute in user.attribute}
    match user.op_type:
        case "Relu" | "Sigmoid" | "Tanh":
            return Activation.of(user.op_type.lower())
        case "LeakyRelu":
            return Activation.of(("leaky_relu", given["alpha"].f if "alpha" in given else 0.01))
        case "Gelu" if "approximate" not in given or given["approximate"].s == b"none":
            return Activation.of("gelu")
        case "Swish" if "alpha" not in given or given["alpha"].f == 1:
            return Activation.of("silu")
        case "Clip":
            low, high = (
                scope.number(name)
                if name  # an input since opset 11, an attribute before
                else (given[attribute].f if attribute in given else missing)
                for attribute, missing, name in zip(
                    ("min", "max"), (-math.inf, math.inf), (*user.input[1:], "", ""), strict=False
                )
            )
            if low is not None and high is not None and low <= high:
                return Activation.of(("clip", low, high))
    return None
