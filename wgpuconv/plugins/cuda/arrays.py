"""Arrays of cupy, of PyTorch, and of whatever has DLPack or __cuda_array_interface__.

They are used where they lie. Work goes to the stream that is current in the array's own library,
so that it neither waits for a host nor needs an event.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from ...backends.base import Guest
from ...dtypes import numpy_dtype
from ...errors import DtypeError, MixedDevicesError, ProblemError
from ...tensor import checked_dtype
from .buffer import ALIGNMENT, CudaBuffer

_CUDA = (2, 13)
"""kDLCUDA and kDLCUDAManaged: the kinds of device of DLPack whose memory kernels can read."""


class CudaGuests:
    """What the CUDA backend makes of its callers' arrays (see ``Guests`` in backends/base.py)."""

    def __init__(self, api: Any, ordinal: int) -> None:
        self._api = api
        self._ordinal = ordinal

    def takes(self, value: Any) -> bool:
        if isinstance(value, self._api.ndarray):
            return True
        if hasattr(value, "__dlpack_device__"):
            return int(value.__dlpack_device__()[0]) in _CUDA
        # Of the class: the attribute itself may raise.
        return hasattr(type(value), "__cuda_array_interface__")

    def following(self, value: Any) -> AbstractContextManager[Any]:
        if _package(value) != "torch":
            return nullcontext()  # cupy's current stream it is
        pointer = int(sys.modules["torch"].cuda.current_stream(self._ordinal).cuda_stream)
        cuda = self._api.cuda
        stack = ExitStack()
        stack.enter_context(cuda.Device(self._ordinal))  # a stream is current on a device
        stack.enter_context(cuda.Stream.from_external(_Stream(pointer)))
        return stack

    def receive(self, name: str, value: Any, *, image: bool) -> Guest:
        array = self._view(name, value)
        dtype = checked_dtype(array.dtype, name)
        memory, last = array, False
        if not array.flags.c_contiguous:
            moved = _channels_last(array) if image and array.ndim in (3, 4) else None
            if moved is not None and moved.flags.c_contiguous:
                memory, last = moved, True
            else:
                memory = self._api.ascontiguousarray(array)
        if memory.data.ptr % ALIGNMENT:
            memory = memory.copy()  # kernels load 16 bytes at a time
        buffer = CudaBuffer(memory, int(memory.data.ptr), int(memory.nbytes))
        copied = memory.data.ptr != array.data.ptr
        return Guest(buffer, tuple(memory.shape), dtype, channels_last=last, copied=copied)

    def copy(self, name: str, value: Any) -> Guest:
        array = self._view(name, value)
        dtype = checked_dtype(array.dtype, name)
        memory = array.copy()  # in C order
        self._api.cuda.get_current_stream(self._ordinal).synchronize()  # calls may use another one
        buffer = CudaBuffer(memory, int(memory.data.ptr), int(memory.nbytes))
        return Guest(buffer, tuple(memory.shape), dtype, channels_last=False, copied=True)

    def give(
        self,
        buffer: CudaBuffer,
        shape: tuple[int, ...],
        dtype: Any,
        like: Any,
        *,
        channels_last: bool,
    ) -> Any:
        array = self._array(buffer, shape, dtype, channels_last)
        if isinstance(like, self._api.ndarray):
            return array
        from_dlpack = getattr(sys.modules[_package(like)], "from_dlpack", None)
        return array if from_dlpack is None else from_dlpack(array)

    def assign(
        self,
        out: Any,
        buffer: CudaBuffer,
        shape: tuple[int, ...],
        dtype: Any,
        *,
        channels_last: bool,
    ) -> None:
        target, result = self._view("out", out), self._array(buffer, shape, dtype, channels_last)
        if (target.shape, target.dtype) != (result.shape, result.dtype):
            raise ProblemError(
                f"out must have shape {result.shape} and dtype {result.dtype}, got {target.shape} "
                f"and {target.dtype}"
            )
        target[...] = result

    def _array(
        self, buffer: CudaBuffer, shape: tuple[int, ...], dtype: Any, channels_last: bool
    ) -> Any:
        array = self._api.ndarray(shape, dtype, memptr=buffer.memory)
        if not channels_last:
            return array
        first = array.ndim - 3
        return array.transpose(*range(first), first + 2, first, first + 1)

    def _view(self, name: str, value: Any) -> Any:
        """The array as one of cupy's, over the same memory."""
        if isinstance(value, self._api.ndarray):
            self._check_device(name, value, value.device.id)
            return value
        if getattr(value, "requires_grad", False):
            raise DtypeError(
                f"the {name} requires a gradient, which is not computed here; pass its .detach()"
            )
        try:
            if hasattr(value, "__dlpack_device__"):
                self._check_device(name, value, value.__dlpack_device__()[1])
                return self._api.from_dlpack(value)
            array = self._of_interface(value)
        except (AttributeError, BufferError, RuntimeError, TypeError) as error:
            raise DtypeError(f"the {name} ({_kind(value)}) cannot be read: {error}") from error
        self._check_device(name, value, array.device.id)
        return array

    def _of_interface(self, value: Any) -> Any:
        found = value.__cuda_array_interface__
        if found["typestr"][1:] != "V2" or "bfloat16" not in str(value.dtype):
            return self._api.asarray(value)
        # The interface has no type of that name, and some of its writers say so.
        return self._api.asarray(_Interface(value, found | {"typestr": "<u2"})).view(
            numpy_dtype("bf16")
        )

    def _check_device(self, name: str, value: Any, ordinal: int) -> None:
        if int(ordinal) != self._ordinal:
            raise MixedDevicesError(
                f"the {name} ({_kind(value)}) lives on GPU {ordinal}, but the call runs on "
                f"'cuda:{self._ordinal}'; copy it there, or pass device='cuda:{ordinal}'"
            )


class _Interface:
    """Another array's memory, as something else."""

    def __init__(self, array: Any, interface: dict[str, Any]) -> None:
        self.array = array
        self.__cuda_array_interface__ = interface


class _Stream:
    """Another library's stream, as cupy takes it."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._pointer)  # the protocol's version


def _channels_last(array: Any) -> Any:
    """(..., H, W, C) of an array (..., C, H, W)."""
    first = array.ndim - 3
    return array.transpose(*range(first), first + 1, first + 2, first)


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _kind(value: Any) -> str:
    return f"{_package(value)}.{type(value).__qualname__}"
