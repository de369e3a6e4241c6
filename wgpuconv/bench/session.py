"""A whole run of the benchmark: who takes part, where, and the result as it grows."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from .. import __version__
from ..algorithms import find
from ..errors import BenchError
from ..suites import Entry
from ..tuning.timing import Rules
from . import runner
from .ours import AUTO, OurDevice
from .peer_process import PeerProcess, peer_names
from .result import DeviceFacts, PeerFacts, ProblemResult, Run
from .runner import MEASURES, Participant, Step
from .theirs import TheirLibrary

USUAL_BASELINE = "torch-cuda"
"""What ratios refer to where nothing is named, if it is there."""


class Session:
    """Devices and peers that are compared, and what was found of them. A context manager.

    Raises BenchError for two devices of one name, an unknown peer or measure, an unknown or a
    missing baseline, UnknownAlgorithmError for an algorithm that no device has.
    """

    def __init__(
        self,
        devices: Sequence[OurDevice],
        peers: Sequence[str] = (),
        *,
        baseline: str | None = None,
        rounds: int | None = None,
        measures: Sequence[str] = ("kernel",),
        tell: Callable[[str], None] = lambda step: None,
    ) -> None:
        self._stack = ExitStack()
        self.warnings: list[str] = []
        self.results: list[ProblemResult] = []
        self.measures = measures
        self._commit, self._machine = _commit(), machine()
        self._gpu: str | None = None
        names = [each.name for each in devices]
        for name in measures:
            if name not in MEASURES:
                raise BenchError(f"unknown measure {name!r}; there are {', '.join(MEASURES)}")
        for name in names:
            if names.count(name) > 1:
                raise BenchError(f"the device {name!r} is named twice")
        offered = {
            algorithm.name: algorithm for each in devices for algorithm in each.device.algorithms
        }
        for each in devices:
            for name in each.algorithms:
                if name != AUTO:
                    find(name, tuple(offered.values()))
        self.devices = tuple(devices)
        if baseline is not None and baseline not in names and baseline not in peer_names():
            known = ", ".join([*names, *peer_names()])
            raise BenchError(f"no baseline is named {baseline!r}; there are {known}")
        software = all(each.device.facts.software for each in devices)
        self.rules = runner.SOFTWARE if software else runner.HARDWARE
        if rounds is not None:
            self.rules = replace(self.rules, rounds=rounds)
        self._facts: list[DeviceFacts] = [each.facts() for each in devices]
        self.peers: list[PeerFacts] = []
        self._libraries: list[TheirLibrary] = []
        with ExitStack() as stack:
            processes = [stack.enter_context(PeerProcess(name)) for name in peers]
            tell("starting peers")
            # At the same time: most of it is importing large libraries.
            with ThreadPoolExecutor(max(len(processes), 1)) as pool:
                self.peers = list(pool.map(PeerProcess.describe, processes))
            for process, facts in zip(processes, self.peers, strict=True):
                if facts.absent is None:
                    self._libraries.append(TheirLibrary(process))
                else:
                    process.close()
            self.baseline = self._settled(baseline)
            self._stack = stack.pop_all()

    def _settled(self, baseline: str | None) -> str | None:
        present = [each.name for each in self.participants]
        if baseline is None:
            return USUAL_BASELINE if USUAL_BASELINE in present else None
        if baseline not in present:
            absent = {each.name: each.absent for each in self.peers}
            reason = absent.get(baseline) or "it was not asked to take part (--peers)"
            raise BenchError(f"the baseline {baseline} is missing: {reason}")
        return baseline

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def participants(self) -> list[Participant]:
        return [*self.devices, *self._libraries]

    def measure_rooflines(self, tell: Callable[[str], None] = lambda step: None) -> None:
        """Copy bandwidth and multiply-add rate of each device; what fails is a warning."""
        facts = []
        for each in self.devices:
            tell(f"roofline of {each.name}")
            found = each.roofline()
            self.warnings += found.notes if found is not None else ()
            facts.append(each.facts(found))
        self._facts = facts

    def measure(self, entries: Iterable[Entry], tell: Step) -> Iterator[ProblemResult]:
        """The results one by one, which are kept as well."""
        for result in runner.run(
            entries,
            self.participants,
            measures=self.measures,
            rules=self.rules,
            tell=tell,
            spun_up=self._see_clock,
        ):
            self.results.append(result)
            yield result

    def run(self) -> Run:
        """All that was found so far."""
        return Run(
            date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            wgpuconv=__version__,
            commit=self._commit,
            method=method(self.rules),
            machine=self._machine | {"nvidia_smi": self._gpu or None},
            devices=tuple(self._facts),
            peers=tuple(self.peers),
            baseline=self.baseline,
            results=tuple(self.results),
        )

    def _see_clock(self) -> None:
        """Once, right after the rounds of a problem: the clock that the samples were taken at."""
        if self._gpu is None:
            self._gpu = _nvidia_smi() or ""


def method(rules: Rules) -> str:
    """How the samples were taken, in words for the file."""
    spin = f"after a spin-up of {rules.spin_up:g} s or more" if rules.spin_up else "no spin-up"
    return (
        "device time of one run (timestamp queries; what a peer's adapter says), bias, "
        "activation, weight preparation and workspace passes included except where a side's name "
        f"says otherwise; all sides of a problem in turns, {spin}, {rules.rounds} rounds, their "
        f"order changing; sides more than {runner.SLOW:g} times slower than the fastest "
        f"{runner.FEW} rounds, apart; samples of "
        + (f"{rules.sample * 1e3:g} ms or more" if rules.sample else "one run")
        + "; the same data in each run (warm caches), random, zero mean; each output checked "
        "against float64 on samples first"
    )


def machine() -> dict[str, Any]:
    """What the figures depend on beside the devices."""
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "processor": _processor(),
        "processors": os.cpu_count(),
    }


def _processor() -> str:
    """Its name where the system tells it (Linux), else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # another system
        pass
    return platform.processor() or platform.machine()


def _nvidia_smi() -> str | None:
    return _output(
        "nvidia-smi",
        "--query-gpu=name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw",
        "--format=csv,noheader",
    )


def _commit() -> str | None:
    """Of the checkout that this package runs from; an installed package has none."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    return _output("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40")


def _output(*command: str) -> str | None:
    """What a command prints; None where it is absent or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
