"""PyTorch as a peer: what its devices share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from wgpuconv import ConvProblem
from wgpuconv.bench.peer import Array, Peer, Refusal, Variant, wall_for

Tensors = dict[str, Any]
Run = Callable[[], Any]


@dataclass
class Loaded:
    """A variant that is ready to run."""

    problem: ConvProblem
    variant: Variant
    tensors: Tensors
    run: Run
    """One call, as a user writes it."""


class TorchPeer(Peer):
    """``torch.nn.functional.conv2d`` and ``conv_transpose2d``, and the activation behind it.

    A problem in NHWC has its tensors channels_last, which is the same memory. The variant in the
    other layout is for the user who keeps all tensors so: the change is not timed, except end to
    end, where it is part of the way from an array in the problem's layout and back.
    """

    device: str
    measures = False
    """Whether the library times its algorithms at the first call."""
    pip = "torch"

    def __init__(self) -> None:
        self._loaded: dict[str, Loaded] = {}

    @abstractmethod
    def precisions(self, problem: ConvProblem) -> list[str]:
        """Of the arithmetic, that of the problem's dtype first."""

    def wait(self) -> None:
        """Until the device has done all that was asked."""

    def set_precision(self, precision: str) -> None:
        """Before a call in f32: whether it may compute in TF32."""

    def variants(self, problem: ConvProblem) -> list[Variant]:
        top, bottom, left, right = problem.padding
        if (top, left) != (bottom, right):
            raise Refusal(
                "PyTorch pads opposite sides alike, "
                f"got top {top}, bottom {bottom}, left {left}, right {right}"
            )
        found = []
        for precision in self.precisions(problem):
            tf32 = ["tf32"] if precision == "tf32" else []
            for layout in ("nchw", "channels_last"):
                for bias in (True, False) if problem.bias else (False,):
                    without = ["no bias"] if problem.bias and not bias else []
                    what = ", ".join([layout, *tf32, *without])
                    options = {"layout": layout, "bias": bias}
                    found.append(
                        Variant(
                            what,
                            precision,
                            same_work=not without,
                            measures=self.measures,
                            options=options,
                        )
                    )
        return found

    def load(self, problem: ConvProblem, variant: Variant, data: Mapping[str, Array]) -> None:
        self._loaded.pop(variant.what, None)
        self.set_precision(variant.precision)
        tensors = self._tensors(problem, variant, data)
        operation = _operation(problem)
        self._loaded[variant.what] = self.prepare(
            Loaded(problem, variant, tensors, lambda: operation(**tensors))
        )

    def prepare(self, loaded: Loaded) -> Loaded:
        """Chooses and compiles what is chosen and compiled once."""
        loaded.run()
        return loaded

    def output(self, variant: Variant) -> Array:
        loaded = self.find(variant)
        return self.numpy(loaded.problem, loaded.run())

    def call(self, variant: Variant) -> float | None:
        return wall_for(self.find(variant).run, self.wait)

    def end_to_end(self, variant: Variant, data: Mapping[str, Array]) -> float | None:
        problem = self.find(variant).problem
        operation = _operation(problem)
        return wall_for(
            lambda: self.numpy(problem, operation(**self._tensors(problem, variant, data)))
        )

    def unload(self) -> None:
        self._loaded.clear()

    def find(self, variant: Variant) -> Loaded:
        """What was loaded, with the precision set for calls of it."""
        loaded = self._loaded[variant.what]
        self.set_precision(variant.precision)
        return loaded

    def numpy(self, problem: ConvProblem, result: Any) -> Array:
        """A tensor in the problem's layout, on the host."""
        if problem.layout == "NHWC":
            result = result.permute(0, 2, 3, 1)
        result = result.contiguous().cpu()
        array: Array = (result.float() if problem.dtype == "bf16" else result).numpy()
        return array

    def _tensors(
        self, problem: ConvProblem, variant: Variant, data: Mapping[str, Array]
    ) -> Tensors:
        import torch

        formats = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}
        memory_format = formats[variant.options["layout"]]
        roles = [role for role in data if role != "bias" or variant.options["bias"]]
        tensors = {role: _tensor(data[role]).to(self.device) for role in roles}
        images = [role for role in roles if role in ("input", "residual")]
        if problem.layout == "NHWC":
            tensors |= {role: tensors[role].permute(0, 3, 1, 2) for role in images}
        for role in (*images, "weight"):
            tensors[role] = tensors[role].contiguous(memory_format=memory_format)
        return tensors


def _tensor(array: Array) -> Any:
    import torch

    if array.dtype.name == "bfloat16":  # which torch does not know by numpy's name
        return torch.from_numpy(array.view("i2")).view(torch.bfloat16)
    return torch.from_numpy(array)


def _operation(problem: ConvProblem) -> Callable[..., Any]:
    """The problem as a function of its tensors."""
    import torch
    from torch.nn import functional

    p = problem
    call = functional.conv_transpose2d if p.transposed else functional.conv2d
    more: dict[str, Any] = {"output_padding": p.output_padding} if p.transposed else {}
    more |= {
        "stride": p.stride,
        "padding": (p.padding[0], p.padding[2]),
        "dilation": p.dilation,
        "groups": p.groups,
    }
    a, b = p.activation.a, p.activation.b
    # In place where PyTorch has it so, as networks for inference do.
    activations: dict[str, Callable[[Any], Any]] = {
        "identity": lambda y: y,
        "relu": torch.relu_,
        "leaky_relu": lambda y: functional.leaky_relu_(y, a),
        "clip": lambda y: y.clamp_(a, b),
        "sigmoid": torch.sigmoid_,
        "tanh": torch.tanh_,
        "gelu": functional.gelu,
        "silu": lambda y: functional.silu(y, inplace=True),
    }
    activation = activations[p.activation.name]

    def operation(input: Any, weight: Any, bias: Any = None, residual: Any = None) -> Any:
        y = call(input, weight, bias, **more)
        return activation(y if residual is None else y.add_(residual))

    return operation
