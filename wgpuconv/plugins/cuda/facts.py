"""What planning may know about a CUDA device, beyond what all devices have."""

from __future__ import annotations

from dataclasses import dataclass

from ...facts import Facts

VOLTA = (7, 0)
TURING = (7, 5)
AMPERE = (8, 0)
HOPPER = (9, 0)


@dataclass(frozen=True)
class CudaFacts(Facts):
    capability: tuple[int, int] = (8, 0)
    """Compute capability."""
    matrix_flops: float = 300e12
    """f16 operations a second that mma.sync does with sums in f32 (a guess)."""


def cuda_facts(facts: Facts) -> CudaFacts:
    """The facts that the plugin's own backend has written."""
    assert isinstance(facts, CudaFacts), "algorithms of CUDA devices plan for CUDA devices"
    return facts
