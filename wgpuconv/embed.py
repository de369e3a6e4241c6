"""Plans for applications that own a device: recorded into the caller's own encoder or stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .device import Device, default_device
from .dtypes import as_dtype, dtype_name, numpy_dtype
from .errors import DtypeError, ProblemError, described
from .ops import Parameters, problem_of, refuse_overlap
from .plan import Plan
from .problem import ConvProblem, Op
from .tensor import Tensor, as_device, dtypes_of, mixed_devices


class EncodablePlan:
    """A convolution ready to be recorded; made by plan_conv2d or plan_conv_transpose2d.

    Its scratch memory belongs to the device and is shared with other calls: command buffers
    may be submitted in any order, but to the device's one queue. A :class:`Tensor` given to
    ``encode`` must live until then, since another one may get its buffer after it.
    """

    def __init__(self, device: Device, compiled: Any) -> None:
        self.device = device
        self._compiled = compiled

    def __repr__(self) -> str:
        return (
            f"EncodablePlan({str(self.problem)!r}, {self.plan.label}, device={self.device.name!r})"
        )

    @property
    def problem(self) -> ConvProblem:
        return self.plan.problem

    @property
    def plan(self) -> Plan:
        """The passes, as data."""
        return self._compiled.plan  # type: ignore[no-any-return]

    def encode(
        self,
        encoder: Any,
        *,
        input: Any,
        weight: Any,
        out: Any,
        bias: Any = None,
        residual: Any = None,
    ) -> None:
        """Records the convolution; submits nothing and waits for nothing.

        Args:
            encoder: the caller's ``GPUCommandEncoder``, or a ``GPUComputePassEncoder``; on a CUDA
                device a stream of cupy, or anything with its pointer as ``ptr``, on which the
                kernels are queued.
            input, weight, bias, residual, out: tensors of the problem's shapes (without the batch
                where that is 1) and dtype, or ``GPUBuffer`` objects with usage STORAGE that hold
                such arrays in C order from their beginning.
        """
        given = {"input": input, "weight": weight, "out": out}
        optional = {
            "bias": (bias, self.problem.bias),
            "residual": (residual, self.problem.residual),
        }
        for role, (value, wanted) in optional.items():
            if (value is not None) != wanted:
                state = "needs" if wanted else "was made without"
                raise ProblemError(f"the plan for {self.problem} {state} a {role}")
            if wanted:
                given[role] = value
        buffers = {}
        for role, value in given.items():
            if isinstance(value, Tensor):
                self._check(role, value)
            buffers[role] = value.buffer if isinstance(value, Tensor) else value
        written = buffers.pop("out")
        refuse_overlap(buffers, written)
        buffers["out"] = written
        if not self.problem.empty:
            self.device.backend.record(self._compiled, buffers, encoder)

    def _check(self, role: str, value: Tensor) -> None:
        if value.device is not self.device:
            raise mixed_devices(role, value.device, "the plan", self.device)
        problem = self.problem
        images = {"input": problem.input_shape, "out": problem.out_shape}
        images["residual"] = problem.out_shape
        shape = images.get(role) or {"weight": problem.weight_shape, "bias": (problem.k,)}[role]
        unbatched = role in images and problem.n == 1 and value.shape == shape[1:]
        if not (value.shape == shape or unbatched) or dtype_name(value.dtype) != problem.dtype:
            raise ProblemError(
                f"{role} must have shape {shape} and dtype {numpy_dtype(problem.dtype)} for the "
                f"plan of {problem}, got {value.shape} and {value.dtype}"
            )


def plan_conv2d(
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    bias: bool = False,
    residual: bool = False,
    dtype: Any = "f32",
    activation: Any = None,
    layout: str = "NCHW",
    precision: str = "default",
    algorithm: str = "auto",
    device: Device | str | None = None,
    workspace_limit: int | None = None,
) -> EncodablePlan:
    """A conv2d of these shapes, to be recorded many times.

    ``bias`` and ``residual`` say whether ``encode`` is given one (see conv2d).
    ``dtype`` is float32, float16 or (on a CUDA device) bfloat16, as a numpy dtype or by name
    ('f32', 'f16', 'bf16').
    """
    parameters = Parameters(stride, padding, dilation, 0, groups, layout, activation, precision)
    return _plan(
        "conv2d",
        input_shape,
        weight_shape,
        parameters,
        {"bias": bias, "residual": residual},
        dtype,
        algorithm,
        device,
        workspace_limit,
    )


def plan_conv_transpose2d(
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
    *,
    bias: bool = False,
    residual: bool = False,
    dtype: Any = "f32",
    activation: Any = None,
    layout: str = "NCHW",
    precision: str = "default",
    algorithm: str = "auto",
    device: Device | str | None = None,
    workspace_limit: int | None = None,
) -> EncodablePlan:
    """A conv_transpose2d of these shapes, to be recorded many times."""
    parameters = Parameters(
        stride, padding, dilation, output_padding, groups, layout, activation, precision
    )
    return _plan(
        "conv_transpose2d",
        input_shape,
        weight_shape,
        parameters,
        {"bias": bias, "residual": residual},
        dtype,
        algorithm,
        device,
        workspace_limit,
    )


def _plan(
    op: Op,
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    parameters: Parameters,
    added: dict[str, bool],
    dtype: Any,
    algorithm: str,
    device: Device | str | None,
    workspace_limit: int | None,
) -> EncodablePlan:
    for name, shape in (("input_shape", input_shape), ("weight_shape", weight_shape)):
        if hasattr(shape, "dtype"):
            raise DtypeError(f"{name} must be a shape, got an array; pass its .shape")
    for name, there in added.items():
        if not isinstance(there, bool):
            raise DtypeError(
                f"{name} says whether there is one, True or False, got {described(there)}; the "
                "array goes to encode"
            )
    on = as_device(device)
    name = _dtype_name(dtype, on)
    problem = problem_of(op, input_shape, weight_shape, None, name, parameters)
    problem = problem.with_(**added)
    on = on or default_device()
    compiled = on.compiled(problem, algorithm=algorithm, workspace_limit=workspace_limit)
    return EncodablePlan(on, compiled)


def _dtype_name(dtype: Any, on: Device | None) -> str:
    """A dtype's name in problems, which numpy's dtypes and their names stand for as well."""
    try:
        name = dtype_name(as_dtype(dtype))
    except TypeError:
        name = ""
    if not name:
        raise DtypeError(f"dtype must be {dtypes_of(on)}, got {dtype!r}")
    return name
