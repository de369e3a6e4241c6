"""Conv2d and ConvTranspose2d: weights that stay on the device, prepared once."""

from __future__ import annotations

from collections import OrderedDict
from numbers import Integral
from typing import Any

from . import foreign
from .device import Device
from .dtypes import dtype_name
from .errors import DtypeError
from .ops import Parameters, common_dtype, problem_of, run
from .problem import ConvProblem, Op, as_layout
from .tensor import Tensor, as_device, common_device, tensor

PREPARED = 8
"""Input shapes for which prepared weights are kept at a time."""
LARGE = 1 << 14
"""Height and width of an input that any sensible kernel fits into."""
_USUAL = {
    **Parameters(1, 0, 1, 0, 1, "NCHW", None, "default")._asdict(),
    "algorithm": "auto",
    "workspace_limit": None,
}
"""The defaults of both modules."""


class _Module:
    _op: Op

    def __init__(
        self,
        weight: Any,
        bias: Any,
        parameters: Parameters,
        algorithm: str,
        device: Device | str | None,
        workspace_limit: int | None,
    ) -> None:
        if isinstance(weight, Integral):
            form = "(K, C/groups, R, S)" if self._op == "conv2d" else "(C, K/groups, R, S)"
            name = type(self).__name__
            raise DtypeError(
                f"a {name} takes the weight array {form}, not numbers of channels as "
                f"torch.nn.{name} does"
            )
        given = {"weight": weight, "bias": bias}
        on = as_device(device)
        host = foreign.host_of(on, given)
        if host is not None:
            on = host
            weight, bias = (
                value
                if value is None or isinstance(value, Tensor)
                else foreign.copied(host, name, value)
                for name, value in given.items()
            )
        self._dtype = common_dtype(on, weight=weight, bias=bias)
        self.device = common_device(on, weight=weight, bias=bias)
        self.weight = weight if isinstance(weight, Tensor) else tensor(weight, self.device)
        self.bias = bias if bias is None or isinstance(bias, Tensor) else tensor(bias, self.device)
        self._parameters = parameters._replace(layout=as_layout(parameters.layout))
        self._algorithm = algorithm
        self._limit = workspace_limit
        self._check_parameters()
        self._ready: OrderedDict[tuple[Any, ...], tuple[Any, Tensor | None]] = OrderedDict()

    def __repr__(self) -> str:
        """The weight by its shape, and what was asked for beyond the defaults."""
        words = [f"weight {self.weight.shape} {self.weight.dtype}"]
        if self.bias is not None:
            words.append(f"bias {self.bias.shape}")
        given = {**self._parameters._asdict(), "algorithm": self._algorithm,
                 "workspace_limit": self._limit}  # fmt: skip
        # As they are written, since an array has no single answer to whether it is equal.
        words += [f"{name}={v!r}" for name, v in given.items() if repr(v) != repr(_USUAL[name])]
        return f"{type(self).__name__}({', '.join(words)}, device={self.device.name!r})"

    def _check_parameters(self) -> None:
        """Raises at once what would be wrong with every input, by trying a large one."""
        groups, layout = self._parameters.groups, self._parameters.layout
        shape = self.weight.shape
        channels = 1
        if len(shape) == 4:  # else the weight is what is wrong
            per_group = isinstance(groups, Integral) and self._op == "conv2d"
            channels = shape[1] * int(groups) if per_group else shape[0]
        last = layout == "NHWC"
        image = (LARGE, LARGE, max(channels, 1)) if last else (max(channels, 1), LARGE, LARGE)
        self._problem((0, *image))  # an empty batch has room for any channels

    def _problem(
        self, shape: tuple[int, ...], residual_shape: tuple[int, ...] | None = None
    ) -> ConvProblem:
        bias_shape = None if self.bias is None else self.bias.shape
        return problem_of(
            self._op,
            shape,
            self.weight.shape,
            bias_shape,
            dtype_name(self._dtype),
            self._parameters,
            residual_shape,
        )

    def __call__(self, input: Any, *, residual: Any = None, out: Any = None) -> Any:
        """Convolves an array, adding a residual, as conv2d takes them; the same kind comes back."""
        theirs = {"input": input, "residual": residual, "out": out}
        if foreign.host_of(self.device, theirs) is not None:
            return foreign.convolve(
                self.device,
                theirs | {"weight": self.weight, "bias": self.bias},
                self._parameters.layout,
                lambda shapes, _, last, __: self._plan(
                    shapes["input"], shapes.get("residual"), last
                ),
            )
        common_dtype(self.device, weight=self.weight, input=input, residual=residual)
        common_device(self.device, **theirs)
        shape = None if residual is None else residual.shape
        compiled, prepared = self._plan(input.shape, shape, False)
        return run(compiled, self.device, input, self.weight, self.bias, residual, out, prepared)

    def _plan(
        self, shape: tuple[int, ...], residual_shape: tuple[int, ...] | None, channels_last: bool
    ) -> tuple[Any, Any]:
        """The compiled plan for inputs of a shape, and the buffer of its prepared weights. With
        ``channels_last`` images in NCHW have the strides of NHWC."""
        key = (shape, residual_shape, channels_last)
        found = self._ready.get(key)
        if found is None:
            found = self._prepare(*key)
            self._ready[key] = found
            while len(self._ready) > PREPARED:
                self._ready.popitem(last=False)
        compiled, prepared = found
        return compiled, None if prepared is None else prepared.buffer

    def _prepare(
        self, shape: tuple[int, ...], residual_shape: tuple[int, ...] | None, channels_last: bool
    ) -> tuple[Any, Tensor | None]:
        problem = self._problem(shape, residual_shape)
        if channels_last:
            problem = problem.with_(layout="NHWC")
        compiled = self.device.compiled(
            problem, algorithm=self._algorithm, workspace_limit=self._limit
        )
        prepared = None
        if compiled.plan.prepared and not problem.empty:
            prepared = Tensor.empty((-(-compiled.plan.prepared // 4),), "float32", self.device)
            self.device.backend.prepare(
                compiled, {"weight": self.weight.buffer, "prepared": prepared.buffer}
            )
        return compiled, prepared


class Conv2d(_Module):
    """A conv2d with weights held on the device, in the form its kernel reads.

    The arguments are those of :func:`wgpuconv.conv2d`. Later changes of the arrays given here
    have no effect; a :class:`Tensor` given as weight must not be written to later.
    """

    _op: Op = "conv2d"

    def __init__(
        self,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        *,
        activation: Any = None,
        layout: str = "NCHW",
        precision: str = "default",
        algorithm: str = "auto",
        device: Device | str | None = None,
        workspace_limit: int | None = None,
    ) -> None:
        parameters = Parameters(stride, padding, dilation, 0, groups, layout, activation, precision)
        super().__init__(weight, bias, parameters, algorithm, device, workspace_limit)


class ConvTranspose2d(_Module):
    """A conv_transpose2d with weights held on the device; see :class:`Conv2d`."""

    _op: Op = "conv_transpose2d"

    def __init__(
        self,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
        *,
        activation: Any = None,
        layout: str = "NCHW",
        precision: str = "default",
        algorithm: str = "auto",
        device: Device | str | None = None,
        workspace_limit: int | None = None,
    ) -> None:
        parameters = Parameters(
            stride, padding, dilation, output_padding, groups, layout, activation, precision
        )
        super().__init__(weight, bias, parameters, algorithm, device, workspace_limit)
