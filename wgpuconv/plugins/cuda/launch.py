"""Launches kernels through the driver's ``cuLaunchKernelEx``, which cupy has no call for.

Unlike the older one, it can let a kernel start while the one before it still runs (programmatic
dependent launch): see ``wait_for_previous`` in ``kernels/ptx.cuh``.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from .facts import HOPPER
from .tensor_maps import MAP_ALIGNMENT, MAP_BYTES, TensorMap

Grid = tuple[int, int, int]


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_uint64),  # an enumeration, then bytes up to the value's alignment
        ("value", ctypes.c_int),
        ("rest", ctypes.c_byte * 60),
    )


class Config(ctypes.Structure):
    """What the driver is told of a launch, beside the kernel and its arguments."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


_EARLY = _Attribute(6, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
EARLY_DRIVER = 12030
"""The first version of CUDA whose graphs take such launches."""


def starts_early(capability: tuple[int, int], driver_version: int) -> bool:
    """Whether kernels of that device may start while the one before still runs."""
    return capability >= HOPPER and driver_version >= EARLY_DRIVER


def config(grid: Grid, threads: int, shared_bytes: int, *, early: bool) -> Config:
    """Of a launch, but for the stream."""
    attributes = ctypes.addressof(_EARLY) if early else None
    return Config(grid, (threads, 1, 1), shared_bytes, None, attributes, int(early))


_DTYPES = {"f16": 6, "f32": 7, "bf16": 9, "tf32": 11}  # CUtensorMapDataType
_INTERLEAVE_NONE = 0
_SWIZZLES = {32: 1, 64: 2, 128: 3}  # by the bytes of a row
_PROMOTE_256B = 3  # what the second-level cache fetches at once
_FILL_ZEROS = 0


class EncodedMap:
    """A tensor map as a kernel takes it, for one place of its array at a time."""

    def __init__(self, driver: Driver, described: TensorMap) -> None:
        m, axes = described, len(described.sizes)
        self._memory = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
        self.address = -(-ctypes.addressof(self._memory) // MAP_ALIGNMENT) * MAP_ALIGNMENT
        self._driver = driver
        self._pointer: int | None = None
        self._encode = driver.encode_im2col if m.lower else driver.encode_tiled
        steps = (ctypes.c_uint32 * axes)(*(m.steps or (1,) * axes))
        if m.lower:
            corners = ((ctypes.c_int * len(corner))(*corner) for corner in (m.lower, m.upper))
            copied: tuple[Any, ...] = (*corners, *m.box, steps)
        else:
            copied = ((ctypes.c_uint32 * axes)(*m.box), steps)
        self._before = (self.address, _DTYPES[m.dtype], axes)
        self._behind = (
            (ctypes.c_uint64 * axes)(*m.sizes),
            (ctypes.c_uint64 * (axes - 1))(*m.strides),
            *copied,
            _INTERLEAVE_NONE,
            _SWIZZLES[m.row_bytes],
            _PROMOTE_256B,
            _FILL_ZEROS,
        )

    def point_to(self, pointer: int) -> None:
        """Of the array's first element, a multiple of 16."""
        if pointer != self._pointer:
            self._pointer = None  # what a failed call leaves behind is no map
            status = self._encode(*self._before, pointer, *self._behind)
            if status:
                raise self._driver.error(status)
            self._pointer = pointer


class Driver:
    """The library of the driver, from CUDA 12.0 on, which cupy has loaded before."""

    def __init__(self) -> None:
        from cupy_backends.cuda.api import driver

        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        self.error: type[Exception] = driver.CUDADriverError
        self._launch = library.cuLaunchKernelEx
        self._launch.argtypes = (ctypes.c_void_p,) * 4
        address, number = ctypes.c_void_p, ctypes.c_uint32
        array, options = (address, number, number, address, address, address), (number,) * 4
        self.encode_tiled = library.cuTensorMapEncodeTiled
        self.encode_tiled.argtypes = (*array, address, address, *options)
        corners = (address, address, number, number)
        self.encode_im2col = library.cuTensorMapEncodeIm2col
        self.encode_im2col.argtypes = (*array, *corners, address, *options)

    def launch(self, config: int, function: int, values: int) -> None:
        """All are addresses; ``values`` that of the addresses of the kernel's arguments."""
        status = self._launch(config, function, values, None)
        if status:
            raise self.error(status)
