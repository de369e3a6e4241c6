"""The algorithms of CUDA devices."""

from __future__ import annotations

from ....algorithms import Algorithm
from .depthwise import Depthwise
from .direct import Direct
from .direct_mma import DirectMma
from .halo_mma import HaloMma
from .halo_wgmma import HaloWgmma
from .implicit_gemm import ImplicitGemm
from .implicit_gemm_mma import ImplicitGemmMma
from .implicit_gemm_wgmma import ImplicitGemmWgmma

ALGORITHMS: tuple[Algorithm, ...] = (
    Direct(),
    Depthwise(),
    ImplicitGemm(),
    ImplicitGemmMma(),
    ImplicitGemmWgmma(),
    DirectMma(),
    HaloMma(),
    HaloWgmma(),
)

__all__ = ["ALGORITHMS"]
