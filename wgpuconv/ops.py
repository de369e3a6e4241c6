"""conv2d and conv_transpose2d: arrays or tensors in, the same kind out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import foreign
from .device import Device, plugins
from .dtypes import dtype_name, numpy_dtype, numpy_name
from .errors import DtypeError, ProblemError, described
from .plan import READ
from .problem import ConvProblem, Op, as_layout
from .tensor import Tensor, as_device, checked_dtype, common_device, tensor

Array = np.ndarray | Tensor


class Parameters(NamedTuple):
    """What a call says beside its arrays: see conv2d."""

    stride: Any
    padding: Any
    dilation: Any
    output_padding: Any
    groups: Any
    layout: str
    activation: Any
    precision: str


def conv2d(
    input: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    residual: Array | None = None,
    activation: Any = None,
    layout: str = "NCHW",
    precision: str = "default",
    algorithm: str = "auto",
    device: Device | str | None = None,
    out: Array | None = None,
    workspace_limit: int | None = None,
) -> Any:
    """2-D convolution (cross-correlation), as ``torch.nn.functional.conv2d``.

    Args:
        input: (N, C, H, W) or (C, H, W); with ``layout="NHWC"`` (N, H, W, C) or (H, W, C).
            A numpy array of any strides, or a :class:`Tensor`; float32 or float16. A CUDA device
            also takes bfloat16 (of ml_dtypes), and arrays of cupy, of PyTorch, or of any library
            with DLPack or ``__cuda_array_interface__``, on that GPU: used without a copy where
            they begin at a multiple of 16 bytes and are contiguous, or have the strides of NHWC
            (PyTorch's ``channels_last``), which the result then has. It is computed on the
            current stream of the input's library, and streams of the other arrays' libraries
            wait for it, and it for them.
        weight: (K, C/groups, R, S) in either layout, of the input's dtype.
        bias: (K,), or None.
        stride, dilation: pixels, one number or (vertical, horizontal).
        padding: zeros around the input: pixels, (vertical, horizontal),
            ((top, bottom), (left, right)), 'valid', or 'same' (stride 1 only).
        groups: divides C and K; ``groups=C`` is a depthwise convolution.
        residual: added to the result before the activation, in the kernel's last step: of the
            result's shape, layout and dtype. The input itself may be given, but not ``out``'s
            tensor.
        activation: None, 'relu', 'relu6', ('leaky_relu', slope), ('clip', low, high),
            'sigmoid', 'tanh', 'gelu' (exact) or 'silu', applied in the kernel's last step.
        precision: 'default' multiplies float32 as it is; 'tf32' allows a CUDA device to round
            inputs and weights to TF32 first, an error of at most 2^-11 each.
        algorithm: 'auto', or a name that ``wgpuconv algorithms`` lists.
        device: where numpy arrays are computed; tensors stay on theirs.
        out: written in place and returned: an array or tensor of the result's shape and dtype.
        workspace_limit: most bytes that one call may take for columns, partial sums and parts
            of large tensors (packed weights come on top).

    Returns:
        The kind that ``input`` is: a numpy array, a Tensor, or an array of cupy, of PyTorch, or
        of another library whose package has a function ``from_dlpack`` (of cupy, where it has
        none). Work on all but numpy's may still be running. Sums are accumulated in float32,
        whatever the dtype.

    Raises:
        ProblemError (a ValueError): shapes or parameters that make no convolution.
        DtypeError (a TypeError): other dtypes or argument types.
        AlgorithmError, DeviceError, OutOfDeviceMemoryError: see wgpuconv.errors.
    """
    return _convolve(
        "conv2d",
        (input, weight, bias, residual, out),
        Parameters(stride, padding, dilation, 0, groups, layout, activation, precision),
        (algorithm, workspace_limit),
        device,
    )


def conv_transpose2d(
    input: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
    *,
    residual: Array | None = None,
    activation: Any = None,
    layout: str = "NCHW",
    precision: str = "default",
    algorithm: str = "auto",
    device: Device | str | None = None,
    out: Array | None = None,
    workspace_limit: int | None = None,
) -> Any:
    """2-D transposed convolution, as ``torch.nn.functional.conv_transpose2d``.

    Args:
        weight: (C, K/groups, R, S).
        padding: pixels cropped from the output: a number, (vertical, horizontal) or
            ((top, bottom), (left, right)).
        output_padding: pixels added to the output's lower and right side, less than the
            stride or the dilation.

    The other arguments, the result and the errors are those of :func:`conv2d`.
    """
    return _convolve(
        "conv_transpose2d",
        (input, weight, bias, residual, out),
        Parameters(
            stride, padding, dilation, output_padding, groups, layout, activation, precision
        ),
        (algorithm, workspace_limit),
        device,
    )


def problem_of(
    op: Op,
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    bias_shape: Sequence[int] | None,
    dtype: str,
    parameters: Parameters,
    residual_shape: Sequence[int] | None = None,
) -> ConvProblem:
    """The validated problem of a call, batched or not."""
    unbatched = hasattr(input_shape, "__len__") and len(input_shape) == 3
    shape = (1, *input_shape) if unbatched else input_shape
    problem = ConvProblem.from_call(
        op,
        shape,
        weight_shape,
        dtype=dtype,
        bias_shape=bias_shape,
        residual=residual_shape is not None,
        unbatched=unbatched,
        **parameters._asdict(),
    )
    out_shape = problem.out_shape[1:] if unbatched else problem.out_shape
    if residual_shape is not None and tuple(residual_shape) != out_shape:
        raise ProblemError(
            f"residual must have the result's shape {out_shape}, got {tuple(residual_shape)}"
        )
    return problem


def _convolve(
    op: Op,
    arrays: tuple[Any, Any, Any, Any, Any],
    parameters: Parameters,
    choice: tuple[str, int | None],
    device: Device | str | None,
) -> Any:
    x, weight, bias, residual, out = arrays
    on = as_device(device)
    given = {"input": x, "weight": weight, "bias": bias, "residual": residual, "out": out}
    host = foreign.host_of(on, given)
    if host is not None:

        def plan(
            shapes: dict[str, tuple[int, ...]], dtype: str, last: bool, weight_last: bool
        ) -> tuple[Any, None]:
            four = [shapes.get(role) for role in READ]
            orders = {"channels_last": last, "weight_last": weight_last}
            return _compiled(host, op, four, dtype, parameters, choice, **orders), None

        return foreign.convolve(host, given, as_layout(parameters.layout), plan)
    dtype = common_dtype(on, input=x, weight=weight, bias=bias, residual=residual)
    on = common_device(on, input=x, weight=weight, bias=bias, residual=residual, out=out)
    added = (getattr(bias, "shape", None), getattr(residual, "shape", None))
    shapes = (x.shape, weight.shape, *added)
    compiled = _compiled(on, op, shapes, dtype_name(dtype), parameters, choice)
    return run(compiled, on, x, weight, bias, residual, out)


def _compiled(
    on: Device,
    op: Op,
    shapes: Sequence[Any],
    dtype: str,
    parameters: Parameters,
    choice: tuple[str, int | None],
    *,
    channels_last: bool = False,
    weight_last: bool = False,
) -> Any:
    """The plan of a call, found by its raw arguments: shapes are those of the input, the weight,
    the bias and the residual. With ``channels_last`` images in NCHW have the strides of NHWC, with
    ``weight_last`` the weight has."""
    key = (op, *shapes, dtype, channels_last, weight_last)
    compiled = on.call_cache.get(key, parameters + choice)
    if compiled is None:
        algorithm, limit = choice
        x, weight, bias, residual = shapes
        problem = problem_of(op, x, weight, bias, dtype, parameters, residual)
        if channels_last:
            problem = problem.with_(layout="NHWC")
        if weight_last:
            problem = problem.with_(weight_last=True)
        compiled = on.compiled(problem, algorithm=algorithm, workspace_limit=limit)
        on.call_cache.put(key, parameters + choice, compiled)
    return compiled


def run(
    compiled: Any,
    on: Device,
    x: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    out: Any,
    prepared: Any = None,
) -> Any:
    """Runs a compiled plan on arrays that fit its problem; see conv2d for what comes back."""
    problem = compiled.plan.problem
    shape = problem.out_shape if len(x.shape) == 4 else problem.out_shape[1:]
    dtype = numpy_dtype(problem.dtype)
    if out is not None:
        _check_out(out, shape, dtype, x)
    result = out if isinstance(out, Tensor) else Tensor._made(shape, dtype, on)
    array = None  # the result on the host, where it is wanted there
    if isinstance(out, np.ndarray) and out.flags.c_contiguous:
        array = out
    elif isinstance(out, np.ndarray) or (out is None and isinstance(x, np.ndarray)):
        array = np.empty(shape, dtype)
    if not problem.empty:
        # Arrays uploaded here must live until the submit: their buffers are free after it.
        tensors = {"input": _on(on, x), "weight": _on(on, weight)}
        if bias is not None:
            tensors["bias"] = _on(on, bias)
        if residual is not None:
            tensors["residual"] = tensors["input"] if residual is x else _on(on, residual)
        buffers = {role: value.buffer for role, value in tensors.items()}
        if out is result:
            refuse_overlap(buffers, result.buffer)
        buffers["out"] = result.buffer
        if prepared is not None:
            buffers["prepared"] = prepared
        on.backend.run(compiled, buffers, array)
    if isinstance(out, np.ndarray) and array is not out:
        out[...] = array
    if out is not None:
        return out
    return result if array is None else array


def _on(device: Device, value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else tensor(value, device)


def refuse_overlap(buffers: dict[str, Any], out: Any) -> None:
    """A dispatch must not read and write one buffer."""
    for role, buffer in buffers.items():
        if buffer is out:
            raise ProblemError(f"out must not be the buffer of the {role}; give another one")


def _check_out(out: Any, shape: tuple[int, ...], dtype: Any, x: Any) -> None:
    if not isinstance(out, (np.ndarray, Tensor)):
        raise DtypeError(f"out must be a numpy array or a Tensor, got {type(out).__name__}")
    if isinstance(x, Tensor) and not isinstance(out, Tensor):
        raise DtypeError("out must be a Tensor as the input is, got a numpy array")
    if out.shape != shape or out.dtype != dtype:
        raise ProblemError(
            f"out must have shape {shape} and dtype {dtype}, got {out.shape} and {out.dtype}"
        )
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ProblemError("out must be writeable, got a read-only array")


def common_dtype(on: Device | None, **arrays: Any) -> Any:
    """The one dtype of all arguments; all but a bias and a residual must be there. Errors name
    what the device takes, where it is known."""
    first, dtype = "", None
    for name, value in arrays.items():
        if value is None and name in ("bias", "residual"):
            continue
        if not isinstance(value, (np.ndarray, Tensor)):
            raise DtypeError(
                f"{name} must be a numpy array or a wgpuconv.Tensor of values, got "
                f"{described(value)}{_how_to_convert(value)}"
            )
        if dtype is None:
            first, dtype = name, checked_dtype(value.dtype, name, on)
        elif value.dtype != dtype:
            raise DtypeError(
                f"{name} must have the {first}'s dtype {dtype}, got {value.dtype}; "
                f"convert one with .astype({numpy_name(dtype)})"
            )
    return dtype


def _how_to_convert(value: Any) -> str:
    """What makes an array that is taken of a value, as the end of a message; empty for what has
    no array in it."""
    if foreign.is_array(value):
        on_gpu = foreign.in_cuda_memory(value)
        host = ".detach().cpu().numpy()" if on_gpu else ".detach().numpy()"
        how = host if hasattr(value, "detach") else "numpy.asarray"
        if on_gpu and plugins():
            how += f", or name a device that takes it as it is ({', '.join(plugins())})"
        return f"; convert it with {how}"
    if isinstance(value, (list, tuple)):
        return "; pass numpy.asarray(value, numpy.float32)"
    if foreign.is_array(getattr(value, "weight", None)):  # a layer, of torch.nn for one
        return "; pass its .weight"
    return ""
