"""Tensor: an array on a device."""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from .device import Device, default_device, shared_device
from .dtypes import ALLOWED, as_dtype, dtype_name
from .errors import DeviceError, DtypeError, MixedDevicesError, ProblemError, described
from .plan import align

HOW_TO_CONVERT = "convert it with .astype(numpy.float32)"


class Tensor:
    """A C-contiguous array of float32, float16 or bfloat16 in one buffer of a device.

    Made by :func:`tensor`, :meth:`Tensor.empty`, :meth:`Tensor.from_buffer`, and returned by
    operations on tensors. Its work may still be running; :meth:`numpy` waits for it.
    """

    def __init__(
        self, device: Device, buffer: Any, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.device = device
        self.buffer = buffer
        """The device's own buffer object (a ``GPUBuffer`` for wgpu).

        Keep the tensor while you use its buffer: another tensor gets that when this one is gone.
        Never destroy it; a submit with a destroyed buffer ends the process."""
        self.shape = shape
        self.dtype = dtype

    @classmethod
    def empty(
        cls, shape: Sequence[int], dtype: Any = np.float32, device: Device | None = None
    ) -> Tensor:
        """A tensor with undefined contents."""
        return cls._made(_checked_shape(shape), checked_dtype(dtype, device=device), device)

    @classmethod
    def _made(cls, shape: tuple[int, ...], dtype: np.dtype[Any], device: Device | None) -> Tensor:
        device = device or default_device()
        buffer = device.backend.allocate(math.prod(shape) * dtype.itemsize)
        made = cls(device, buffer, shape, dtype)
        if getattr(device.backend, "keeps_buffers", True):
            # Work submitted later runs later, so the buffer may be reused at once. Not in __del__:
            # in a cycle of garbage the buffer's own end may come first.
            weakref.finalize(made, device.backend.free, buffer).atexit = False
        return made

    @classmethod
    def from_buffer(cls, buffer: Any, shape: Sequence[int], dtype: Any, device: Device) -> Tensor:
        """A view of a caller's own buffer (usage STORAGE, and COPY_SRC to read it back).

        The tensor begins where the buffer does. It must neither be mapped nor destroyed while
        it is used.
        """
        shape, dtype = _checked_shape(shape), checked_dtype(dtype, device=device)
        device.backend.check_usable(buffer)
        needed = align(math.prod(shape) * dtype.itemsize, 4)  # bindings and copies count words
        if buffer.size < needed:
            raise ProblemError(
                f"the buffer has {buffer.size} bytes, shape {shape} of {dtype} needs {needed}"
            )
        return cls(device, buffer, shape, dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def numpy(self) -> np.ndarray:
        """A copy on the host; waits for the work that makes it."""
        array = np.empty(self.shape, self.dtype)
        self.device.backend.read(self.buffer, array)
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """What ``numpy.asarray(t)`` gives: the same as :meth:`numpy`."""
        if copy is False:
            raise ValueError("a Tensor lives on a device; its values cannot be had without a copy")
        return self.numpy().astype(dtype or self.dtype, copy=False)

    def __reduce__(self) -> NoReturn:
        # A shallow copy would not keep its buffer: that goes back with the original.
        raise DeviceError(
            "a Tensor can be neither copied nor pickled; in another process, open a Device and "
            "make it there; here wgpuconv.tensor(t.numpy(), t.device) makes another"
        )

    def __repr__(self) -> str:
        return f"Tensor(shape={self.shape}, dtype={self.dtype}, device={self.device.name!r})"


def tensor(array: Any, device: Device | str | None = None) -> Tensor:
    """Copies a float32, float16 or bfloat16 (of ml_dtypes) array to a device."""
    value, array = array, np.asarray(array, order="C")
    if array.dtype.kind in "OSU" and not isinstance(value, (np.ndarray, list, tuple)):
        raise DtypeError(f"tensor takes an array of numbers, got {described(value)}")
    on = as_device(device)
    made = Tensor._made(array.shape, checked_dtype(array.dtype, device=on), on)
    made.device.backend.write(made.buffer, array)
    return made


def as_device(device: Device | str | None) -> Device | None:
    """A device object for a spec; the object itself and None pass through."""
    if device is None or isinstance(device, Device):
        return device
    if isinstance(device, str):
        return shared_device(device)
    raise DtypeError(f"device must be a Device, its spec or None, got {type(device).__name__}")


def common_device(wanted: Device | None, **arrays: Any) -> Device:
    """The one device of all tensors and of the call, or the default one."""
    found = wanted
    for name, value in arrays.items():
        if isinstance(value, Tensor):
            if found is not None and value.device is not found:
                raise mixed_devices(name, value.device, "the call", found)
            found = value.device
    return found or default_device()


def mixed_devices(name: str, its: Device, user: str, wanted: Device) -> MixedDevicesError:
    """The error for a tensor on another device than its user's."""
    if repr(its) == repr(wanted):
        return MixedDevicesError(
            f"{name} and {user} use two Device objects of the same name ({its.name}); each "
            "Device() is its own: make one and pass it everywhere, or leave device= out"
        )
    return MixedDevicesError(
        f"{name} lives on {its!r}, but {user} is for another Device, {wanted!r}; copy it there "
        "with wgpuconv.tensor(t.numpy(), device)"
    )


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    try:
        checked = tuple(operator.index(v) for v in shape)
    except TypeError:
        raise DtypeError(f"a shape must be a sequence of integers, got {shape!r}") from None
    if any(v < 0 for v in checked):
        raise ProblemError(f"a shape must have no negative sizes, got {checked}")
    return checked


def dtypes_of(device: Device | None) -> str:
    """The dtypes that a device convolves, for messages; all of them where none is known yet."""
    if device is None:
        return ALLOWED
    facts = device.facts
    names = {"float32": True, "float16": facts.f16, "bfloat16": facts.bf16}
    *first, last = [name for name, there in names.items() if there]
    return f"{', '.join(first)} or {last}" if first else last


def checked_dtype(
    dtype: Any, name: str = "the array", device: Device | None = None
) -> np.dtype[Any]:
    try:
        found = as_dtype(dtype)
    except TypeError:
        raise DtypeError(f"{name} must have dtype {dtypes_of(device)}, got {dtype!r}") from None
    if not dtype_name(found):
        raise DtypeError(
            f"{name} must have dtype {dtypes_of(device)}, got {found}"
            f"{' in foreign byte order' if dtype_name(found.newbyteorder()) else ''}; "
            f"{HOW_TO_CONVERT}"
        )
    return found
