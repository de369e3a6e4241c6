"""The registry of algorithms that plans are made of.

An order has no meaning here; names are what the store, the API and the shell use.
"""

from __future__ import annotations

from ..errors import UnknownAlgorithmError
from .base import Algorithm
from .col2im import Col2im
from .depthwise import Depthwise
from .direct import Direct
from .direct_tiled import DirectTiled
from .gemm_1x1 import Gemm1x1
from .im2col_gemm import Im2colGemm
from .implicit_gemm import ImplicitGemm
from .sliced_k import SlicedK
from .winograd import Winograd
from .winograd_fused import WinogradFused

ALGORITHMS: tuple[Algorithm, ...] = (
    Direct(),
    DirectTiled(),
    Im2colGemm(),
    ImplicitGemm(),
    Gemm1x1(),
    Depthwise(),
    Col2im(),
    Winograd(),
    WinogradFused(),
    SlicedK(),
)


def find(name: str, algorithms: tuple[Algorithm, ...] = ALGORITHMS) -> Algorithm:
    """The algorithm of that name."""
    for algorithm in algorithms:
        if algorithm.name == name:
            return algorithm
    known = ", ".join(a.name for a in algorithms)
    raise UnknownAlgorithmError(f"unknown algorithm {name!r}; known are {known} (and 'auto')")


__all__ = ["ALGORITHMS", "Algorithm", "find"]
