"""ONNX Runtime as a peer: the model of a convolution, and what its providers share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgpuconv import ConvProblem
from wgpuconv.bench.peer import Array, Peer, Variant, wall, wall_for

_ACTIVATIONS: dict[str, tuple[str, dict[str, str]]] = {
    # name: (operator, the parameter of the activation by the attribute that takes it)
    "relu": ("Relu", {}),
    "leaky_relu": ("LeakyRelu", {"alpha": "a"}),
    "sigmoid": ("Sigmoid", {}),
    "tanh": ("Tanh", {}),
    "gelu": ("Gelu", {}),
}


def conv_model(problem: ConvProblem, copies: int, constants: Mapping[str, Array]) -> bytes:
    """A model that computes the problem that many times over, from one input.

    Its inputs are ``input`` and, of each copy, ``weight0`` and ``bias0`` unless they are given as
    constants; its outputs are ``output0`` and so on. ONNX convolves NCHW only, so an NHWC problem
    has transpositions around each convolution.
    """
    from onnx import helper, numpy_helper

    dtype = _tensor_type(problem)
    shapes: dict[str, tuple[int, ...]] = {"weight": problem.weight_shape}
    if problem.bias:
        shapes["bias"] = (problem.k,)
    inputs = [helper.make_tensor_value_info("input", dtype, problem.input_shape)]
    outputs, nodes, tensors = [], [], []
    for i in range(copies):
        for role, shape in shapes.items():
            if role in constants:
                tensors.append(numpy_helper.from_array(constants[role], f"{role}{i}"))
            else:
                inputs.append(helper.make_tensor_value_info(f"{role}{i}", dtype, shape))
        outputs.append(helper.make_tensor_value_info(f"output{i}", dtype, problem.out_shape))
        nodes += _nodes(problem, i, [f"{role}{i}" for role in shapes])
    graph = helper.make_graph(nodes, "convolution", inputs, outputs, tensors)
    opset = helper.make_opsetid("", 20)  # the first with Gelu
    model = helper.make_model(graph, opset_imports=[opset], ir_version=9)
    serialized: bytes = model.SerializeToString()
    return serialized


def _tensor_type(problem: ConvProblem) -> int:
    from onnx import TensorProto

    return int({"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16}[problem.dtype])


def _nodes(p: ConvProblem, copy: int, arguments: list[str]) -> list[Any]:
    """The nodes of one copy, from ``input`` to its output."""
    from onnx import helper

    nodes: list[Any] = []

    def add(operator: str, *inputs: str, **attributes: Any) -> str:
        made = f"{operator}{copy}_{len(nodes)}"
        nodes.append(helper.make_node(operator, inputs, [made], **attributes))
        return made

    last = "input" if p.layout == "NCHW" else add("Transpose", "input", perm=(0, 3, 1, 2))
    own = {"output_padding": p.output_padding} if p.transposed else {}
    last = add(
        "ConvTranspose" if p.transposed else "Conv",
        *(last, *arguments),
        kernel_shape=(p.r, p.s),
        strides=p.stride,
        pads=(p.padding[0], p.padding[2], p.padding[1], p.padding[3]),
        dilations=p.dilation,
        group=p.groups,
        **own,
    )
    activation = p.activation
    if activation.name == "silu":
        last = add("Mul", last, add("Sigmoid", last))
    elif activation.name == "clip":
        low, high = (
            add("Constant", value=helper.make_tensor("", _tensor_type(p), [], [value]))
            for value in (activation.a, activation.b)
        )
        last = add("Clip", last, low, high)
    elif activation.name != "identity":
        operator, parameters = _ACTIVATIONS[activation.name]
        last = add(operator, last, **{at: getattr(activation, a) for at, a in parameters.items()})
    if p.layout == "NHWC":
        add("Transpose", last, perm=(0, 2, 3, 1))
    nodes[-1].output[0] = f"output{copy}"
    return nodes


@dataclass
class Bound:
    """A session of a model with tensors on the device bound to it."""

    binding: Any  # before the session, which must outlive it
    session: Any
    copies: int

    def run(self) -> None:
        self.session.run_with_iobinding(self.binding)


@dataclass
class Loaded:
    """A variant that is ready to run."""

    problem: ConvProblem
    data: Mapping[str, Array]
    one: Bound
    many: Bound
    """What is timed: a model of several copies, or the same as ``one``."""


class OnnxRuntimePeer(Peer):
    """One execution provider.

    Weights are inputs of the model, as all else is, or constants in it, which ONNX Runtime may
    transform when the session starts: those variants say ``prepared weights``.
    """

    provider: str

    def __init__(self) -> None:
        self._loaded: dict[str, Loaded] = {}

    @abstractmethod
    def upload(self, array: Array) -> Any:
        """An OrtValue on the device."""

    @abstractmethod
    def bind_output(self, binding: Any, name: str, problem: ConvProblem) -> None:
        """Has an output stay on the device."""

    def wait(self) -> None:
        """Until the device has done all that was asked."""

    def copies(self, problem: ConvProblem) -> int:
        """How many convolutions the model that is timed holds."""
        return 1

    def options(self, variant: Variant) -> dict[str, str]:
        """Of the session, by key."""
        return {}

    def load(self, problem: ConvProblem, variant: Variant, data: Mapping[str, Array]) -> None:
        self._loaded.pop(variant.what, None)
        copies = self.copies(problem)
        one = self._bound(problem, variant, data, 1)
        many = one if copies == 1 else self._bound(problem, variant, data, copies)
        for _ in range(3):
            many.run()
        self.wait()
        self._loaded[variant.what] = Loaded(problem, data, one, many)

    def output(self, variant: Variant) -> Array:
        """Of what is timed, after a run on NaNs, so that what was there before does not count."""
        loaded = self._loaded[variant.what]
        binding = loaded.many.binding
        given = self.upload(loaded.data["input"])
        binding.bind_ortvalue_input(
            "input", self.upload(np.full_like(loaded.data["input"], np.nan))
        )
        loaded.many.run()
        binding.bind_ortvalue_input("input", given)
        loaded.many.run()
        array: Array = binding.get_outputs()[-1].numpy()
        return array

    def time(self, variant: Variant, repeats: int) -> float:
        many = self._loaded[variant.what].many
        return wall(many.run, max(round(repeats / many.copies), 1), self.wait) / many.copies

    def call(self, variant: Variant) -> float | None:
        return wall_for(self._loaded[variant.what].one.run, self.wait)

    def end_to_end(self, variant: Variant, data: Mapping[str, Array]) -> float | None:
        problem = self._loaded[variant.what].problem
        constants = _constants(variant, data)
        session = self.session(conv_model(problem, 1, constants), {})
        feeds = {"input" if role == "input" else f"{role}0": data[role] for role in data}
        feeds = {name: feeds[name] for name in (each.name for each in session.get_inputs())}
        return wall_for(lambda: session.run(None, feeds))

    def unload(self) -> None:
        self._loaded.clear()

    def session(self, model: bytes, options: Mapping[str, str]) -> Any:
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3  # errors
        for key, value in options.items():
            settings.add_session_config_entry(key, value)
        # Copies are equal on purpose, and must not be found to be so.
        off = ["CommonSubexpressionElimination", "ConstantSharing"]
        return onnxruntime.InferenceSession(
            model,
            settings,
            providers=[self.provider],
            disabled_optimizers=off,
            enable_fallback=0,  # to the CPU, where the provider has no device
        )

    def _bound(
        self, problem: ConvProblem, variant: Variant, data: Mapping[str, Array], copies: int
    ) -> Bound:
        constants = _constants(variant, data)
        session = self.session(conv_model(problem, copies, constants), self.options(variant))
        binding = session.io_binding()
        for role in data.keys() - constants.keys():
            value = self.upload(data[role])
            names = ["input"] if role == "input" else [f"{role}{i}" for i in range(copies)]
            for name in names:
                binding.bind_ortvalue_input(name, value)
        for i in range(copies):
            self.bind_output(binding, f"output{i}", problem)
        return Bound(binding, session, copies)


def _constants(variant: Variant, data: Mapping[str, Array]) -> dict[str, Array]:
    """What the model holds itself."""
    return {role: data[role] for role in data if variant.prepared and role != "input"}
