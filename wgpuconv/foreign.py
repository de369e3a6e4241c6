"""Arrays of other libraries, where a device takes them as they are.

Which ones it takes, and what their strides and streams mean, only its backend knows (see
``Guests`` in backends/base.py); here they become tensors for the length of a call, and the result
becomes an array of the input's kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .backends.base import Guest, Guests
from .device import Device, default_device
from .errors import DtypeError, MixedDevicesError
from .tensor import Tensor

_OURS = (np.ndarray, Tensor, type(None))

Call = Callable[[dict[str, Any], str], Any]
"""Computes from tensors by the name of their argument, in a layout."""


def host_of(device: Device | None, arrays: dict[str, Any]) -> Device | None:
    """The device that takes the other libraries' arrays among these; None where there are none,
    or it takes none of them.

    Raises MixedDevicesError where it takes some, and others are not in its memory.
    """
    for value in arrays.values():
        if not isinstance(value, _OURS):
            break
    else:
        return None
    theirs = {
        name: value
        for name, value in arrays.items()
        if not isinstance(value, _OURS) and hasattr(value, "shape") and hasattr(value, "dtype")
    }
    if not theirs:
        return None
    on = device or next((v.device for v in arrays.values() if isinstance(v, Tensor)), None)
    on = on or default_device()
    guests = getattr(on.backend, "guests", None)
    taken = [name for name, value in theirs.items() if guests and guests.takes(value)]
    if not taken:
        return None
    for name, value in arrays.items():
        if name not in taken and not isinstance(value, (Tensor, type(None))):
            raise MixedDevicesError(
                f"the {name} ({_kind(value)}) is not in the memory of {on.name}, where the "
                f"{taken[0]} ({_kind(arrays[taken[0]])}) is; move one of them to the other's side"
            )
    return on


def with_tensors(on: Device, arrays: dict[str, Any], layout: str, call: Call) -> Any:
    """The result of ``call`` with tensors over the memory of these arrays (of ``host_of``).

    An input in NCHW whose strides are those of NHWC is one of NHWC for the call, and the residual
    and the result have such strides too. (Not where the residual is a tensor, which has none.)
    """
    guests: Guests = on.backend.guests
    x, residual, out = (arrays[name] for name in ("input", "residual", "out"))
    if out is not None and isinstance(x, Tensor) != isinstance(out, Tensor):
        raise DtypeError(f"out must be a {_kind(x)} as the input is, got a {_kind(out)}")
    with guests.following(next(v for v in arrays.values() if not isinstance(v, _OURS))):
        lent: dict[str, Guest] = {}
        last = False
        if not isinstance(x, _OURS):
            either = layout == "NCHW" and not isinstance(residual, Tensor)
            lent["input"] = guests.receive("input", x, channels_last=None if either else False)
            last = lent["input"].channels_last
        for name, value in arrays.items():
            if name not in ("input", "out") and not isinstance(value, _OURS):
                like_input = last and name == "residual"
                lent[name] = guests.receive(name, value, channels_last=like_input)
        tensors = arrays | {name: _tensor(on, guest) for name, guest in lent.items()}
        target = None
        if not isinstance(out, _OURS):
            order = None if layout == "NCHW" else False
            target = guests.receive("out", out, channels_last=order)
            fits = not target.copied and target.channels_last == last
            tensors["out"] = _tensor(on, target) if fits else None
        result = call(tensors, "NHWC" if last else layout)
        if isinstance(x, Tensor):
            return result
        if target is None:
            return guests.give(result.buffer, result.shape, result.dtype, x, channels_last=last)
        if result is not tensors["out"]:
            guests.assign(out, result.buffer, result.shape, result.dtype, channels_last=last)
        return out


def copied(on: Device, name: str, value: Any) -> Tensor:
    """A tensor that later changes of an array (of ``host_of``) do not reach."""
    guests: Guests = on.backend.guests
    with guests.following(value):
        return _tensor(on, guests.copy(name, value))


def _tensor(on: Device, guest: Guest) -> Tensor:
    return Tensor(on, guest.buffer, guest.shape, guest.dtype)


def _kind(value: Any) -> str:
    return f"{type(value).__module__.partition('.')[0]}.{type(value).__qualname__}"
