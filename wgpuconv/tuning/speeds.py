"""Measured speeds in place of guessed ones: the facts of a device, once it was tuned on.

WebGPU says nothing of how fast a device is. So its bandwidth and its multiply-add rate are
measured (see roofline.py) before the first problem is tuned, and kept in the store: candidates
follow from these facts, and a stored choice fits only where the same facts are known.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..errors import TuningWarning
from ..facts import Facts
from ..shader import source_hash
from . import roofline
from .store import DeviceKey, Speeds

PROBES = ("probe_fma", "probe_copy")
LANES, CLOCK = 128, 1.8e9
"""Of a core, and in Hz; see :func:`cores_of`."""


def device_key(identity: Any) -> DeviceKey:
    """What speeds of a device (of backends/base.py's identity) are stored by."""
    return DeviceKey(
        identity.backend,
        identity.adapter,
        identity.driver,
        identity.versions,
        source_hash(PROBES),
    )


def cores_of(fma_rate: float) -> int:
    """A guess of the cores that make up a rate, since no API shows them: 128 lanes at 1.8 GHz.

    By the peak rates that vendors give (TFLOP/s), against the cores there are:

    ===================== ===== ===== =====
    device                 rate cores guess
    ===================== ===== ===== =====
    NVIDIA H200            66.9   132   144
    NVIDIA RTX 4090        82.6   128   176
    AMD RX 7900 XTX        61.4    96   136
    Intel Arc A770         19.7    32    42
    Apple M2 (10 cores)     3.6    10     8
    ===================== ===== ===== =====

    (AMD's counts two multiply-adds a lane; where a compiler does not pair them, the guess is 68.)
    What is measured is less than the peak: 59.3 on an H200. Five binary digits are kept, so that
    noise changes nothing: candidates depend on it, and stored winners on candidates.
    """
    cores = max(1.0, fma_rate / (2 * LANES * CLOCK))
    step = 2.0 ** max(0, math.floor(math.log2(cores)) - 4)
    return round(round(cores / step) * step)


def with_speeds(facts: Facts, speeds: Speeds | None) -> Facts:
    """The facts with what was measured in place of what was guessed."""
    if speeds is None:
        return facts
    if speeds.bandwidth is not None:
        facts = replace(facts, bandwidth=speeds.bandwidth)
    if speeds.fma_rate is not None:
        facts = replace(facts, flops=speeds.fma_rate, cores=cores_of(speeds.fma_rate))
    return facts


def measure(machine: Any, tell: Callable[[int, int], None], date: str) -> Speeds:
    """Takes as long as the clock needs to rise, and two kernels to compile. What fails is a
    TuningWarning, and its guess remains."""
    found = roofline.measure(machine, tell)
    machine.trim()  # few tensors are as large as the arrays of the copy
    for note in found.notes:
        warnings.warn(f"{note}; planning goes on with a guess", TuningWarning, stacklevel=2)
    return Speeds(device_key(machine.identity), found.bandwidth, found.fma_rate, date)
