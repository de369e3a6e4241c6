"""Peers: other libraries, each timed in a process of its own.

A peer is a script in ``bench/peers`` with a subclass of :class:`Peer` and a call of ``serve``.
The runner starts it and takes turns with it: one JSON object a line, over the process's standard
input and output; arrays lie as .npy files in a folder that both know. So a peer that crashes,
or whose library is not installed, costs one line in a table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ..problem import ConvProblem

Array = np.ndarray[Any, Any]


class Refusal(Exception):
    """The peer cannot compute this problem; the text says why, with values."""


@dataclass(frozen=True)
class Variant:
    """One way in which a peer can compute a problem."""

    what: str
    """``nchw``, ``channels_last, no bias``"""
    precision: str
    """f32, tf32, f16 or bf16"""
    prepared: bool = False
    """Whether weights are transformed outside of the time."""
    same_work: bool = True
    """Whether it does all that the problem says: False for one that leaves the bias out."""
    options: dict[str, Any] = field(default_factory=dict)
    """The peer's own, as JSON holds them."""


class Peer(ABC):
    """One other library on one device."""

    name: ClassVar[str]

    @abstractmethod
    def describe(self) -> tuple[dict[str, str], str]:
        """Versions by name, and the device. Imports the library; raises ImportError or Refusal
        where it is absent or has no device, with a text that names the pip command."""

    @abstractmethod
    def variants(self, problem: ConvProblem) -> list[Variant]:
        """The ways to compute the problem. Raises Refusal where there is none."""

    @abstractmethod
    def load(self, problem: ConvProblem, variant: Variant, data: Mapping[str, Array]) -> None:
        """Makes ready to run: data by role (input, weight, bias) in the problem's layout and
        dtype. What the library does once (choosing, compiling, uploading) is done here. Drops
        what was loaded before under the same variant."""

    @abstractmethod
    def output(self, variant: Variant) -> Array:
        """Runs once; the result in the problem's layout (float32 for bf16). Where
        ``same_work`` is False, without what is left out."""

    @abstractmethod
    def time(self, variant: Variant, repeats: int) -> float:
        """Seconds of one run, as the mean of that many back to back."""

    @abstractmethod
    def unload(self) -> None:
        """Frees everything that was loaded."""

    def call(self, variant: Variant) -> float | None:
        """Seconds of one call from Python on tensors on the device; None where that has no
        meaning for this peer."""
        return None

    def end_to_end(self, variant: Variant, data: Mapping[str, Array]) -> float | None:
        """Seconds from numpy arrays to a numpy array; None where that has no meaning."""
        return None

    def workspace(self, variant: Variant) -> int | None:
        """Bytes of memory beside the arguments and the result; None where it is not known."""
        return None
