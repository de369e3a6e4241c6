"""What the algorithms of CUDA devices share."""

from __future__ import annotations

from ....algorithms import Algorithm
from ....plan import Region
from ....problem import ConvProblem
from ..source import source_hash


class CudaAlgorithm(Algorithm):
    """``shaders`` names files of the plugin's own ``kernels/``."""

    weight_last = True

    def source(self) -> str:
        return source_hash(self.shaders)


def output_bindings(
    problem: ConvProblem, bias: Region, target: Region
) -> tuple[tuple[str, Region], ...]:
    """The last arguments of every kernel that writes outputs. All have one for a residual; those
    that are not specialised to add it do not read it."""
    residual = Region("residual") if problem.residual else bias
    return (("bias", bias), ("residual", residual), ("y", target))
