"""Arrays of other libraries, where a device takes them as they are.

Which ones it takes, and what their strides and streams mean, only its backend knows (see
``Guests`` in backends/base.py); here their memory is put into a plan, and the result becomes an
array of the input's kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .backends.base import Guest, Guests
from .device import Device, default_device, plugins
from .dtypes import dtype_name, numpy_dtype
from .errors import DtypeError, MixedDevicesError, NoAdapterError, ProblemError, described, kind_of
from .plan import READ
from .tensor import Tensor, common_device

DLPACK_CUDA = (2, 13)
"""kDLCUDA and kDLCUDAManaged: the kinds of device of DLPack whose memory CUDA kernels can read."""
_OURS = (np.ndarray, Tensor, type(None))

Planner = Callable[[dict[str, tuple[int, ...]], str, bool, bool], tuple[Any, Any]]
"""From shapes by role, a dtype, whether images in NCHW have the strides of NHWC, which is the
plan's layout then, and whether the weight has them: a compiled plan, and where its weights are
prepared already, their buffer."""


def host_of(device: Device | None, arrays: dict[str, Any]) -> Device | None:
    """The device that takes the other libraries' arrays among these; None where there are none,
    or it takes none of them.

    Raises MixedDevicesError where it takes some, and others are not in its memory.
    """
    theirs = {name: value for name, value in arrays.items() if not isinstance(value, _OURS)}
    if not theirs:
        return None
    on = device
    if on is None:
        found = [name for name, value in theirs.items() if is_array(value)]
        if not found:
            return None  # no arrays, for which a device need not be opened
        on = next((v.device for v in arrays.values() if isinstance(v, Tensor)), None)
        on = on or _default(found[0], theirs[found[0]])
    guests = getattr(on.backend, "guests", None)
    taken = [name for name, value in theirs.items() if guests.takes(value)] if guests else []
    if not taken:
        return None
    for name, value in arrays.items():
        if name not in taken and value is not None and not isinstance(value, Tensor):
            if not is_array(value):
                raise DtypeError(
                    f"the {name} must be an array, as the {taken[0]} "
                    f"({kind_of(arrays[taken[0]])}) is, got {described(value)}"
                )
            raise MixedDevicesError(
                f"the {name} ({kind_of(value)}) is not in the memory of {on.name}, where the "
                f"{taken[0]} ({kind_of(arrays[taken[0]])}) is; move one of them to the other's side"
            )
    return on


def is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def in_cuda_memory(value: Any) -> bool:
    """Whether an array says that it lies in a CUDA device's memory."""
    if hasattr(value, "is_cuda"):  # PyTorch's, whose class has the other attributes anyway
        return bool(value.is_cuda)
    if hasattr(value, "__dlpack_device__"):
        return int(value.__dlpack_device__()[0]) in DLPACK_CUDA
    # Of the class: the attribute itself may raise.
    return hasattr(type(value), "__cuda_array_interface__")


def _default(name: str, value: Any) -> Device:
    """The default device. Where there is none, the error says which others might take a value."""
    try:
        return default_device()
    except NoAdapterError as error:
        if not plugins():
            raise
        raise NoAdapterError(
            f"the {name} is a {kind_of(value)}: name a device that takes it, as in "
            f"device={plugins()[0]}, since there is no default one ({error})"
        ) from error


def convolve(on: Device, arrays: dict[str, Any], layout: str, plan: Planner) -> Any:
    """The result on arrays (input, weight, bias, residual, out), some of which are ``host_of``'s.

    An input in NCHW whose strides are those of NHWC is one of NHWC for the plan, and the residual
    and the result have such strides too. (Not where the residual is a tensor, which has none.)
    A weight may have them as well, and is read so.
    """
    guests: Guests = on.backend.guests
    x, residual, out = (arrays[role] for role in ("input", "residual", "out"))
    if out is not None and isinstance(x, Tensor) != isinstance(out, Tensor):
        raise DtypeError(f"out must be a {kind_of(x)} as the input is, got a {kind_of(out)}")
    either = None if layout == "NCHW" else False
    order = False if isinstance(residual, Tensor) else either
    first = _guest(on, "input", x, channels_last=order)
    last = first.channels_last
    lent = {"input": first}
    orders = {"weight": None, "bias": False, "residual": last}
    for role in READ[1:]:
        if arrays[role] is not None or role == "weight":
            lent[role] = _guest(on, role, arrays[role], channels_last=orders[role])
    for role, guest in lent.items():
        if guest.dtype != first.dtype:
            wanted, found = numpy_dtype(first.dtype), numpy_dtype(guest.dtype)
            raise DtypeError(f"{role} must have the input's dtype {wanted}, got {found}")
    # In the caller's order, which errors speak of.
    shapes = {
        role: _logical(guest.shape) if guest.channels_last else guest.shape
        for role, guest in lent.items()
    }
    compiled, prepared = plan(shapes, first.dtype, last, lent["weight"].channels_last)
    problem = compiled.plan.problem
    shape = problem.out_shape if len(first.shape) == 4 else problem.out_shape[1:]
    result, buffer = _result(on, out, shape, first, x, channels_last=either)
    if not problem.empty:
        buffers = {role: guest.buffer for role, guest in lent.items()}
        buffers["out"] = buffer
        if prepared is not None:
            buffers["prepared"] = prepared
        guests.run(compiled, buffers, [v for v in arrays.values() if v is not None])
    if out is not None and result is not out:
        guests.assign(out, result)
        return out
    return result if isinstance(x, Tensor) or out is not None else guests.give(result, x)


def _guest(on: Device, role: str, value: Any, *, channels_last: bool | None) -> Guest:
    if isinstance(value, Tensor):
        common_device(on, **{role: value})
        return Guest(value.buffer, value.shape, dtype_name(value.dtype), False, False)
    if value is None:
        raise DtypeError(f"{role} must be an array, got None")
    guests: Guests = on.backend.guests
    return guests.receive(role, value, channels_last=channels_last)


def _result(
    on: Device,
    out: Any,
    shape: tuple[int, ...],
    first: Guest,
    x: Any,
    *,
    channels_last: bool | None,
) -> tuple[Any, Any]:
    """Where the result goes, and its memory: ``out`` itself where its memory lies as is wanted."""
    last = first.channels_last
    if out is not None:
        logical = _logical(shape) if last else shape
        target = _guest(on, "out", out, channels_last=channels_last)
        if tuple(out.shape) != logical or target.dtype != first.dtype:
            raise ProblemError(
                f"out must have shape {logical} and dtype {numpy_dtype(first.dtype)}, got "
                f"{tuple(out.shape)} and {numpy_dtype(target.dtype)}"
            )
        if not target.copied and target.channels_last == last:
            return out, target.buffer
    if isinstance(x, Tensor):
        made = Tensor.empty(shape, numpy_dtype(first.dtype), on)
        return made, made.buffer
    made, buffer = on.backend.guests.make(shape, first.dtype, x, channels_last=last)
    return made, buffer


def _logical(shape: tuple[int, ...]) -> tuple[int, ...]:
    """In NCHW what is in NHWC."""
    *images, h, w, c = shape
    return (*images, c, h, w)


def copied(on: Device, name: str, value: Any) -> Tensor:
    """A tensor that later changes of an array (of ``host_of``) do not reach."""
    guests: Guests = on.backend.guests
    guest = guests.copy(name, value)
    return Tensor(on, guest.buffer, guest.shape, numpy_dtype(guest.dtype))
