"""What a device can do at most: how fast it copies memory, and how fast it multiplies and adds.

Both are measured through the same API as the convolutions, by kernels that do nothing else
(``shaders/probe_copy.wgsl``, ``shaders/probe_fma.wgsl``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import (
    DeviceError,
    DeviceLostError,
    ForkedProcessError,
    OutOfDeviceMemoryError,
)
from ..facts import Facts
from ..plan import Pass, Plan, Region, Shader, grid_1d
from ..problem import ConvProblem

COPIED = {False: 256 << 20, True: 16 << 20}
"""Bytes of each array of the copy, on a GPU and on a software driver: the two hold several times
what most caches do, for the rate not to be theirs."""
WORKGROUP = 256
CHAINS, STEPS = 32, 8
"""As in probe_fma.wgsl: independent chains an invocation, and steps of each in one turn."""
FACTOR, TERM = 0.5, 0.25
"""Of each step. Chains so tend to 0.5, far from what is too large or too small."""
SPIN_UP = 0.3
"""Seconds of multiply-adds that bring up a GPU's clock."""
SAMPLE = {False: 5e-3, True: 20e-3}
"""Seconds that a sample of the multiply-adds lasts at least."""
SAMPLES = {False: 5, True: 15}
"""Other programs take their share of a CPU."""
COPIES = {False: 4, True: 1}
"""Copies in one sample."""
LINEAR = 0.7
"""Twice the work must take between 2 * 0.7 and 2 / 0.7 times as long, else something else than
the work was timed."""
BANDWIDTHS, FMA_RATES = (1e8, 1e14), (1e8, 1e16)
"""Rates a second between which devices are, software drivers and those to come included."""

ATTEMPTS = 3
"""Times that an implausible measurement is taken: another program may have disturbed it."""


@dataclass(frozen=True)
class Roofline:
    """What was measured; None, and a note, where it was not or is implausible."""

    bandwidth: float | None
    """Bytes a second of a copy, read plus written."""
    fma_rate: float | None
    """f32 operations a second, a multiply-add counting as two."""
    notes: tuple[str, ...] = ()


class Implausible(Exception):
    """A time or a result that cannot be; the text says which."""


def measure(machine: Any, tell: Callable[[int, int], None] = lambda done, total: None) -> Roofline:
    """Keeps a GPU busy for a spin-up and a few samples. ``machine`` is a backend that runs WGSL;
    ``tell`` hears how many of how many rates are measured. Raises DeviceLostError and
    ForkedProcessError."""
    found: dict[str, float | None] = {}
    notes: list[str] = []
    # The multiply-adds come first, since they bring up the clock.
    probes: dict[str, Callable[[Any], float]] = {
        "multiply-add rate": fma_rate,
        "copy bandwidth": copy_bandwidth,
    }
    for done, (what, probe) in enumerate(probes.items()):
        tell(done, len(probes))
        found[what] = None
        for attempt in range(ATTEMPTS):
            try:
                found[what] = probe(machine)
                break
            except Implausible as error:
                if attempt == ATTEMPTS - 1:
                    notes.append(f"no {what} of {machine.identity.adapter}: {error}")
            except (DeviceLostError, ForkedProcessError):
                raise
            except (DeviceError, OutOfDeviceMemoryError) as error:
                notes.append(f"no {what} of {machine.identity.adapter}: {error}")
                break
    tell(len(probes), len(probes))
    return Roofline(found["copy bandwidth"], found["multiply-add rate"], tuple(notes))


def copy_bandwidth(machine: Any) -> float:
    """Bytes a second, read plus written. Raises Implausible."""
    facts: Facts = machine.facts
    limits = facts.limits
    nbytes = min(COPIED[facts.software], limits.max_binding, limits.max_buffer) // 16 * 16
    with _Buffers(machine) as buffers:
        buffers.add("input", nbytes)
        buffers.add("out", nbytes)
        values = np.arange(nbytes // 4, dtype=np.uint32)
        machine.write(buffers["input"], values)
        whole = _copy(machine, nbytes)
        half = _copy(machine, nbytes // 32 * 16)
        seconds = _seconds(machine, [half, whole], buffers, repeats=COPIES[facts.software])
        copied = np.empty_like(values)
        machine.read(buffers["out"], copied)
    if not np.array_equal(copied, values):
        raise Implausible("the copy differs from what was copied")
    _check_linear(*seconds)
    return _plausible(2 * nbytes / seconds[1], BANDWIDTHS, "bytes")


def fma_rate(machine: Any) -> float:
    """f32 operations a second. Raises Implausible."""
    facts: Facts = machine.facts
    # So many that cores which have one more than others do not matter, however many there are.
    workgroups = facts.cores if facts.software else 256 * facts.cores
    count = workgroups * WORKGROUP
    with _Buffers(machine) as buffers:
        buffers.add("out", 4 * count)
        turns = 1
        while True:
            once, twice = (_multiply(machine, workgroups, n) for n in (turns, 2 * turns))
            # Twice, since a software driver compiles in the first run.
            seconds = machine.time([(once, buffers)] * 2, repeats=[1, 1])[1]
            if seconds >= SAMPLE[facts.software] or turns >= 1 << 20:
                break
            turns *= 2
        spin_up = 0.0 if facts.software else SPIN_UP
        seconds_of = _seconds(machine, [once, twice], buffers, repeats=1, spin_up=spin_up)
        sums = np.empty(count, np.float32)
        machine.run(twice, buffers)
        machine.read(buffers["out"], sums)
    expected = _sums(count, 2 * turns)
    # Each step halves what came before, so that all its roundings add up to less than two.
    if not np.allclose(sums, expected, rtol=4 * CHAINS * 2.0**-24, atol=0):
        raise Implausible(f"the sums are wrong: {sums[0]:.9g} for {expected[0]:.9g}")
    _check_linear(*seconds_of)
    rate = 2 * count * CHAINS * STEPS * 2 * turns / seconds_of[1]
    return _plausible(rate, FMA_RATES, "operations")


def _sums(count: int, turns: int) -> np.ndarray[Any, Any]:
    """What each invocation of the probe stores, by the formula for its chains."""
    start = np.arange(64)[:, None] + np.arange(CHAINS)
    limit = TERM / (1 - FACTOR)
    chains = limit + (start - limit) * FACTOR ** (turns * STEPS)
    return np.resize(chains.sum(axis=1), count)


def _plausible(rate: float, limits: tuple[float, float], what: str) -> float:
    if not limits[0] <= rate <= limits[1]:
        raise Implausible(f"{rate:.3g} {what} a second are outside of what devices can do")
    return rate


def _check_linear(half: float, whole: float) -> None:
    if not 2 * LINEAR < whole / half < 2 / LINEAR:
        raise Implausible(
            f"twice the work takes {whole / half:.2f} times as long ({half * 1e6:.0f} us and "
            f"{whole * 1e6:.0f} us)"
        )


def _seconds(
    machine: Any, compiled: list[Any], buffers: Any, *, repeats: int, spin_up: float = 0.0
) -> list[float]:
    """Best seconds of one run of each, interleaved."""
    trials, counts = [(each, buffers) for each in compiled], [repeats] * len(compiled)
    begin = time.perf_counter()
    while time.perf_counter() - begin < spin_up:
        machine.time(trials, repeats=counts)
    rounds = [machine.time(trials, repeats=counts) for _ in range(SAMPLES[machine.facts.software])]
    return [min(samples) for samples in zip(*rounds, strict=True)]


_NO_PROBLEM = ConvProblem("conv2d", "f32", 1, 1, 1, 1, 1, 1, 1)
"""A plan has one; the probes bind regions of their own sizes."""


def _copy(machine: Any, nbytes: int) -> Any:
    step = Pass(
        Shader.of("probe_copy"),
        (("count", nbytes // 16),),
        (("src", Region("input", 0, nbytes)), ("dst", Region("out", 0, nbytes))),
        grid_1d(-(-nbytes // 16 // WORKGROUP), machine.facts.limits),
    )
    return machine.compile(Plan(_NO_PROBLEM, "probe_copy", {}, (step,)))


def _multiply(machine: Any, workgroups: int, turns: int) -> Any:
    step = Pass(
        Shader.of("probe_fma"),
        (("turns", turns), ("factor", FACTOR), ("term", TERM)),
        (("sums", Region("out", 0, 4 * workgroups * WORKGROUP)),),
        (workgroups, 1, 1),
    )
    return machine.compile(Plan(_NO_PROBLEM, "probe_fma", {}, (step,)))


class _Buffers(dict[str, Any]):
    """Buffers by role, given back at the end."""

    def __init__(self, machine: Any) -> None:
        super().__init__()
        self._machine = machine

    def add(self, role: str, nbytes: int) -> None:
        self[role] = self._machine.allocate(nbytes)

    def __enter__(self) -> _Buffers:
        return self

    def __exit__(self, *_: object) -> None:
        for buffer in self.values():
            self._machine.free(buffer)
