"""What the algorithms of CUDA devices share."""

from __future__ import annotations

from ....algorithms import Algorithm
from ..source import source_hash


class CudaAlgorithm(Algorithm):
    """``shaders`` names files of the plugin's own ``kernels/``."""

    def source(self) -> str:
        return source_hash(self.shaders)
