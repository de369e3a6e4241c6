"""Arrays of cupy, of PyTorch, and of whatever has DLPack or __cuda_array_interface__.

They are used where they lie. Work goes to the stream that is current in the input's own library,
so that it neither waits for a host nor, among arrays of one library, needs an event; results and
copies come from that library's own memory. Tensors are on cupy's stream. (While one stream is
captured into a graph it can wait for no other: cupy's current one is to be the same then.)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...backends.base import Buffers, Guest
from ...dtypes import ALLOWED, dtype_name, numpy_dtype
from ...errors import DtypeError, MixedDevicesError, kind_of
from ...foreign import in_cuda_memory
from ...problem import DTYPES
from .buffer import ALIGNMENT, CudaBuffer

if TYPE_CHECKING:
    from .backend import CudaBackend

_UNREADABLE = (AttributeError, BufferError, RuntimeError, TypeError, ValueError)
"""What libraries raise for an array without the memory that they were asked for."""


View = tuple[int, tuple[int, ...], tuple[int, ...], int, Any, int]
"""An array's memory as it lies: pointer, shape, strides, the stride from an element to its
neighbour (strides count bytes or elements), dtype, and the GPU's number."""


class Library(Protocol):
    """What is asked of an array's own library."""

    def view(self, array: Any) -> View: ...
    def name(self, dtype: Any) -> str:
        """The dtype's name in problems; empty for those that have none."""

    def copy(self, array: Any) -> Any:
        """In C order."""

    def negated(self, array: Any) -> bool:
        """Whether memory holds the values with the other sign."""

    def permute(self, array: Any, axes: tuple[int, ...]) -> Any: ...
    def empty(self, shape: tuple[int, ...], dtype: str) -> Any: ...
    def assign(self, target: Any, array: Any) -> None: ...
    def stream(self) -> int:
        """The current one."""


class Cupy:
    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend

    def view(self, array: Any) -> View:
        data, dtype = array.data, array.dtype
        return data.ptr, array.shape, array.strides, dtype.itemsize, dtype, data.device_id

    def name(self, dtype: Any) -> str:
        return dtype_name(dtype)

    def copy(self, array: Any) -> Any:
        return array.copy()

    def negated(self, array: Any) -> bool:
        return False

    def permute(self, array: Any, axes: tuple[int, ...]) -> Any:
        return array.transpose(*axes)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self._backend.api.ndarray(shape, numpy_dtype(dtype))

    def assign(self, target: Any, array: Any) -> None:
        target[...] = array

    def stream(self) -> int:
        return int(self._backend.api.cuda.get_current_stream(self._backend.ordinal).ptr)


class Torch:
    def __init__(self, torch: Any, ordinal: int) -> None:
        self.module = torch
        self._ordinal = ordinal
        self._device = torch.device("cuda", ordinal)
        self._dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
        self._names = {dtype: name for name, dtype in self._dtypes.items()}

    def view(self, array: Any) -> View:
        shape, ordinal = tuple(array.shape), array.device.index
        return array.data_ptr(), shape, array.stride(), 1, array.dtype, ordinal

    def name(self, dtype: Any) -> str:
        return self._names.get(dtype, "")

    def copy(self, array: Any) -> Any:
        return array.clone(memory_format=self.module.contiguous_format)

    def negated(self, array: Any) -> bool:
        return bool(array.is_neg())  # as z.conj().imag is, until it is copied

    def permute(self, array: Any, axes: tuple[int, ...]) -> Any:
        return array.permute(axes)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.module.empty(shape, dtype=self._dtypes[dtype], device=self._device)

    def assign(self, target: Any, array: Any) -> None:
        target.copy_(array)

    def stream(self) -> int:
        return int(self.module.cuda.current_stream(self._ordinal).cuda_stream)


class CudaGuests:
    """What the CUDA backend makes of its callers' arrays (see ``Guests`` in backends/base.py)."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self._api = backend.api
        self._cupy = Cupy(backend)
        self._torch: Torch | None = None

    def takes(self, value: Any) -> bool:
        return isinstance(value, self._api.ndarray) or in_cuda_memory(value)

    def receive(self, name: str, value: Any, *, channels_last: bool | None) -> Guest:
        library, array, view, dtype = self._read(name, value)
        pointer, shape, strides, unit, *_ = view
        order = order_of(shape, strides, unit, channels_last)
        aligned = pointer % ALIGNMENT == 0  # kernels load 16 bytes at a time
        copied = order.strided or not aligned or library.negated(array)
        if copied:
            with self._backend.guard:
                if order.last:
                    array = library.permute(array, _axes(len(shape), last=True))
                array = library.copy(array)
                pointer = library.view(array)[0]
        buffer = CudaBuffer(array, pointer, order.elements * DTYPES[dtype])
        return Guest(buffer, order.shape, dtype, order.last, copied)

    def copy(self, name: str, value: Any) -> Guest:
        library, array, (_, shape, *_), dtype = self._read(name, value)
        with self._backend.guard:
            array = library.copy(array)
            pointer = library.view(array)[0]
            # Calls may use another stream.
            self._api.cuda.runtime.streamSynchronize(library.stream())
        buffer = CudaBuffer(array, pointer, math.prod(shape) * DTYPES[dtype])
        return Guest(buffer, shape, dtype, channels_last=False, copied=True)

    def make(
        self, shape: tuple[int, ...], dtype: str, like: Any, *, channels_last: bool
    ) -> tuple[Any, CudaBuffer]:
        library = self._library(like)
        with self._backend.guard:
            array = library.empty(shape, dtype)
            pointer = library.view(array)[0]
        buffer = CudaBuffer(array, pointer, math.prod(shape) * DTYPES[dtype])
        if channels_last:
            array = library.permute(array, _axes(len(shape), last=False))
        return array, buffer

    def run(self, compiled: Any, buffers: Buffers, arrays: Sequence[Any]) -> None:
        if len(set(map(type, arrays))) == 1:  # a shortcut for what is most common
            self._backend.run(compiled, buffers, stream=self._library(arrays[0]).stream())
            return
        streams = self._streams(map(self._library, arrays))
        with self._joined(streams):
            self._backend.run(compiled, buffers, stream=streams[0])

    def give(self, array: Any, like: Any) -> Any:
        if self._library(like) is not self._cupy or isinstance(like, self._api.ndarray):
            return array
        from_dlpack = getattr(sys.modules[_package(like)], "from_dlpack", None)
        return array if from_dlpack is None else from_dlpack(array)

    def assign(self, out: Any, array: Any) -> None:
        library, source = self._library(out), self._library(array)
        with self._backend.guard:
            if library is source and library is not self._cupy:
                library.assign(out, array)
                return
            if library.negated(out):
                raise DtypeError(
                    "out has the negative bit of PyTorch, which no other library knows; pass its "
                    ".resolve_neg()"
                )
            with self._joined(self._streams((self._cupy, library, source))):
                self._cupy.assign(self._as_cupy(out), self._as_cupy(array))

    @staticmethod
    def _streams(libraries: Iterable[Library]) -> list[int]:
        """The current ones, each once."""
        return list(dict.fromkeys([each.stream() for each in dict.fromkeys(libraries)]))

    @contextmanager
    def _joined(self, streams: list[int]) -> Iterator[None]:
        """Work on the first of these streams comes after what the others were given so far, and
        before what they are given later: these may also hand its arrays' memory out again."""
        first, *others = streams
        with self._backend.guard:
            for other in others:
                self._wait(first, other)
            yield
            for other in others:
                self._wait(other, first)

    def _wait(self, stream: int, other: int) -> None:
        """What a stream is given later runs after what another was given so far."""
        cuda = self._api.cuda
        event = cuda.Event(disable_timing=True)
        cuda.runtime.eventRecord(event.ptr, other)
        cuda.runtime.streamWaitEvent(stream, event.ptr)

    def _library(self, value: Any) -> Library:
        if isinstance(value, self._api.ndarray):
            return self._cupy
        return self._torch_of(value) or self._cupy

    def _torch_of(self, value: Any) -> Torch | None:
        """The library of a PyTorch tensor; None for what is none."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, getattr(torch, "Tensor", ())):
            return None
        if self._torch is None or self._torch.module is not torch:
            self._torch = Torch(torch, self._backend.ordinal)
        return self._torch

    def _read(self, name: str, value: Any) -> tuple[Library, Any, View, str]:
        """The array, as one of its own library or of cupy, and what it says of itself."""
        if isinstance(value, self._api.ndarray):
            library: Library = self._cupy
            array, view = value, self._cupy.view(value)
        else:
            if getattr(value, "requires_grad", False):
                raise DtypeError(
                    f"the {name} requires a gradient, which is not computed here; pass its "
                    ".detach()"
                )
            library = self._library(value)
            if library is self._cupy and hasattr(value, "__dlpack_device__"):
                # Before cupy is asked, which does not read across devices.
                self._check_device(name, value, int(value.__dlpack_device__()[1]))
            try:
                array = self._as_cupy(value) if library is self._cupy else value
                view = library.view(array)
            except _UNREADABLE as error:
                raise DtypeError(
                    f"the {name} ({kind_of(value)}) cannot be read: {error}"
                ) from error
        *_, found, ordinal = view
        self._check_device(name, value, ordinal)
        dtype = library.name(found)
        if not dtype:
            raise DtypeError(f"{name} must have dtype {ALLOWED}, got {found}; convert it")
        return library, array, view, dtype

    def _as_cupy(self, value: Any) -> Any:
        if isinstance(value, self._api.ndarray):
            return value
        if hasattr(value, "__dlpack_device__"):
            return self._api.from_dlpack(value)
        found = value.__cuda_array_interface__
        if found["typestr"][1:] != "V2" or "bfloat16" not in str(value.dtype):
            return self._api.asarray(value)
        # The interface has no type of that name, and some of its writers say so.
        bits = self._api.asarray(_Interface(value, found | {"typestr": "<u2"}))
        return bits.view(numpy_dtype("bf16"))

    def _check_device(self, name: str, value: Any, ordinal: int) -> None:
        if ordinal != self._backend.ordinal:
            raise MixedDevicesError(
                f"the {name} ({kind_of(value)}) lives on GPU {ordinal}, but the call runs on "
                f"'cuda:{self._backend.ordinal}'; copy it there, or pass device='cuda:{ordinal}'"
            )


class _Interface:
    """Another array's memory, as something else."""

    def __init__(self, array: Any, interface: dict[str, Any]) -> None:
        self.array = array
        self.__cuda_array_interface__ = interface


class Stream:
    """Another library's stream, as cupy takes it."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._pointer)  # the protocol's version


class Order(NamedTuple):
    """How an array lies in memory."""

    strided: bool
    """Whether it is contiguous in no order that fits."""
    last: bool
    """Whether it is an image (..., C, H, W) with the strides of (..., H, W, C)."""
    shape: tuple[int, ...]
    """In the order of the memory, or of a copy in C order."""
    elements: int


@lru_cache(maxsize=4096)
def order_of(
    shape: tuple[int, ...], strides: tuple[int, ...], unit: int, channels_last: bool | None
) -> Order:
    """``channels_last`` says whether an image may (None) or must have the strides of NHWC."""
    elements, image = math.prod(shape), len(shape) in (3, 4)
    if not (image and channels_last) and _contiguous(shape, strides, unit):
        return Order(False, False, shape, elements)
    if image and channels_last is not False:
        axes = _axes(len(shape), last=True)
        moved = tuple(shape[a] for a in axes)
        fits = _contiguous(moved, tuple(strides[a] for a in axes), unit)
        if fits or channels_last:
            return Order(not fits, True, moved, elements)
    return Order(True, False, shape, elements)


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...], unit: int) -> bool:
    expected = unit
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return 0 in shape
        expected *= size
    return True


def _axes(ndim: int, *, last: bool) -> tuple[int, ...]:
    """The permutation that brings the channels of (..., C, H, W) last, or back."""
    first = ndim - 3
    rest = (first + 1, first + 2, first) if last else (first + 2, first, first + 1)
    return (*range(first), *rest)


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]
