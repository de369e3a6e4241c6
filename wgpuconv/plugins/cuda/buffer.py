"""Memory on a CUDA device."""

from __future__ import annotations

from typing import Any

ALIGNMENT = 16
"""Bytes to which the beginning of a buffer is aligned: what one load may take."""


class CudaBuffer:
    """Memory on one CUDA device."""

    def __init__(self, memory: Any, pointer: int, size: int) -> None:
        self.memory = memory
        """What keeps the memory alive."""
        self.pointer = pointer
        self.size = size

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size,),
            "typestr": "|u1",
            "data": (self.pointer, False),
            "version": 3,
        }

    def overlaps(self, other: CudaBuffer) -> bool:
        return (
            self.pointer < other.pointer + other.size and other.pointer < self.pointer + self.size
        )
