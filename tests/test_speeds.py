"""A device's speeds: when they are measured, where they are kept, and who plans with them.

Most of it runs against a machine of numpy that says how long the probes take.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_tuner import PROBLEM, Compiled, Fake, Identity, Machine
from typer.testing import CliRunner

from wgpuconv import ConvProblem, Device, export_bundle, import_bundle
from wgpuconv.cli.app import app
from wgpuconv.errors import DeviceLostError, TuningWarning
from wgpuconv.facts import Facts
from wgpuconv.plan import Config
from wgpuconv.tuning import roofline
from wgpuconv.tuning import speeds as speeds_module
from wgpuconv.tuning.speeds import cores_of, device_key, with_speeds
from wgpuconv.tuning.store import FILE_NAME, Speeds, Store

BANDWIDTH, RATE, CORES = 4e12, 60e12, 128
FEW_CORES = Facts(cores=2)  # for which the probes' arrays are small
DATE = "2026-01-01T00:00:00+00:00"
TINY = ConvProblem.parse("conv2d f32 n1 c3 h9 w11 k8 r3 s3 pad1")


class ByCores(Fake):
    """Has one configuration, named by the cores of the facts."""

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        return [{"number": facts.cores}, {"number": 0}]

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        return 1.0 if config["number"] else 2.0


class Gpu(Machine):
    """Runs the probes in the time that its speeds give."""

    runs_wgsl = True

    def __init__(self, bandwidth: float = BANDWIDTH, rate: float = RATE, **others: Any) -> None:
        super().__init__((ByCores("a", []),), **{"facts": FEW_CORES, **others})
        self.bandwidth, self.rate = bandwidth, rate
        self.probed: list[str] = []
        self.trimmed = 0

    def run(self, compiled: Compiled, buffers: Mapping[str, Any]) -> None:
        plan = compiled.plan
        if plan.algorithm == "probe_fma":
            sums = buffers["out"].view(np.float32)
            sums[:] = roofline._sums(sums.size, int(dict(plan.passes[0].params)["turns"]))
        elif plan.algorithm == "probe_copy":
            nbytes = int(dict(plan.passes[0].params)["count"]) * 16
            buffers["out"][:nbytes] = buffers["input"][:nbytes]
        else:
            super().run(compiled, buffers)

    def time(
        self, trials: Sequence[tuple[Compiled, Mapping[str, Any]]], *, repeats: Sequence[int]
    ) -> list[float]:
        plan = trials[0][0].plan
        if not plan.algorithm.startswith("probe_"):
            return super().time(trials, repeats=repeats)
        self.probed.append(plan.algorithm)
        self.run(*trials[-1])
        return [self._probe(compiled, buffers) for compiled, buffers in trials]

    def _probe(self, compiled: Compiled, buffers: Mapping[str, Any]) -> float:
        values = dict(compiled.plan.passes[0].params)
        if "count" in values:
            return 2 * 16 * values["count"] / self.bandwidth
        steps = roofline.CHAINS * roofline.STEPS * values["turns"]
        return 2 * steps * (buffers["out"].size // 4) / self.rate

    def trim(self) -> None:
        self.trimmed += 1


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "COPIED", {False: 1 << 16, True: 1 << 16})
    monkeypatch.setattr(roofline, "SPIN_UP", 0.0)
    monkeypatch.setattr(roofline, "SAMPLE", {False: 1e-6, True: 1e-6})


def opened(
    machine: Any,
    store: Store | Path | None = None,
    mode: str = "auto",
    progress: Callable[[str, int, int], None] | None = None,
) -> Device:
    device = Device.__new__(Device)
    device._setup(machine, mode, store or Store(None), progress)
    device.tuner._clock = machine.clock
    return device


# ---- when ----


def test_speeds_are_measured_before_the_first_problem_is_surveyed() -> None:
    machine = Gpu()
    guessed = machine.facts
    device = opened(machine)
    assert device.facts == guessed
    choice = device.choose(PROBLEM)
    assert choice.source == "tuned"
    assert choice.candidate.config == {"number": CORES}
    facts = device.facts
    assert facts == replace(guessed, bandwidth=facts.bandwidth, flops=facts.flops, cores=CORES)
    assert facts.bandwidth == pytest.approx(BANDWIDTH)
    assert facts.flops == pytest.approx(RATE)
    assert machine.held == 0
    assert machine.trimmed == 1


def test_they_are_measured_once(tmp_path: Path) -> None:
    store = tmp_path / "tuning.sqlite3"
    device = opened(Gpu(), store)
    device.choose(PROBLEM)
    probed = list(device.backend.probed)
    assert set(probed) == {"probe_fma", "probe_copy"}
    device.choose(PROBLEM.with_(n=1))
    assert device.backend.probed == probed
    # Another process, on a machine that is disturbed: the candidates stay the same.
    later = opened(Gpu(rate=30e12), store)
    choice = later.choose(PROBLEM)
    assert (choice.source, choice.candidate.config) == ("stored", {"number": CORES})
    later.choose(PROBLEM.with_(n=3))
    assert later.backend.probed == []
    assert later.facts == device.facts


@pytest.mark.parametrize(
    ("mode", "problem", "software", "wgsl", "measured"),
    [
        ("auto", PROBLEM, False, True, True),
        ("full", PROBLEM, False, True, True),
        ("full", TINY, False, True, True),
        ("auto", TINY, False, True, False),
        ("auto", PROBLEM.with_(n=0), False, True, False),
        ("stored", PROBLEM, False, True, False),
        ("off", PROBLEM, False, True, False),
        ("auto", PROBLEM, True, True, False),
        ("full", PROBLEM, True, True, False),
        ("full", PROBLEM, False, False, False),
    ],
)
def test_only_what_is_tuned_on_hardware_is_measured(
    mode: str, problem: ConvProblem, software: bool, wgsl: bool, measured: bool
) -> None:
    machine = Gpu(facts=replace(FEW_CORES, software=software))
    machine.runs_wgsl = wgsl
    device = opened(machine, mode=mode)
    device.choose(problem)
    assert bool(machine.probed) == measured
    assert bool(device.tuner.store.all_speeds()) == measured


def test_a_backend_that_says_nothing_of_wgsl_is_not_measured() -> None:
    machine = Machine((ByCores("a", []),))
    device = opened(machine)
    assert device.choose(PROBLEM).source == "tuned"
    assert device.facts is machine.facts


def test_what_is_known_already_needs_no_speeds() -> None:
    """An entry that came without them was chosen among the candidates of the guesses."""
    store = Store(None)
    known = Gpu()
    known.runs_wgsl = False
    opened(known, store).choose(PROBLEM)
    machine = Gpu()
    assert opened(machine, store).choose(PROBLEM).source == "stored"
    assert machine.probed == []


@pytest.mark.parametrize("mode", ["auto", "full", "stored", "off"])
def test_stored_speeds_are_used_in_every_mode(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite3"
    opened(Gpu(), path).choose(PROBLEM)
    machine = Gpu()
    device = opened(machine, path, mode)
    assert device.facts.cores == CORES
    assert device.choose(PROBLEM.with_(k=32)).candidate.config == {"number": CORES}
    assert machine.probed == []


def test_speeds_of_another_driver_or_by_other_probes_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store(None)
    opened(Gpu(), store).choose(PROBLEM)
    other = opened(Gpu(rate=30e12, identity=Identity(driver="2")), store, "off")
    assert other.facts is other.backend.facts
    other = opened(Gpu(rate=30e12, identity=Identity(driver="2")), store)
    other.choose(PROBLEM)
    assert other.facts.cores == CORES / 2
    monkeypatch.setattr(speeds_module, "source_hash", lambda files: "newer")
    assert opened(Gpu(), store, "off").tuner.speeds is None


def test_progress_has_a_stage_of_its_own() -> None:
    told: list[tuple[str, int, int]] = []
    opened(Gpu(), progress=lambda *step: told.append(step)).choose(PROBLEM)
    assert told[:4] == [("device", 0, 2), ("device", 1, 2), ("device", 2, 2), ("verify", 0, 2)]


# ---- what fails ----


@pytest.mark.parametrize("rate", [1e20, 1.0])
def test_implausible_speeds_are_left_out_with_a_warning(rate: float) -> None:
    machine = Gpu(rate=rate)
    device = opened(machine)
    with pytest.warns(TuningWarning, match=r"no multiply-add rate of a machine of numpy: .*guess"):
        choice = device.choose(PROBLEM)
    assert choice.candidate.config == {"number": machine.facts.cores}
    assert device.facts.flops == machine.facts.flops
    assert device.facts.bandwidth == pytest.approx(BANDWIDTH)
    assert device.tuner.store.all_speeds() == [], "the next process tries again"
    probed = len(machine.probed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device.choose(PROBLEM.with_(n=1))
    assert len(machine.probed) == probed, "this one does not"


def test_a_device_lost_meanwhile_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: Any, **__: Any) -> None:
        raise DeviceLostError("gone")

    machine = Gpu()
    monkeypatch.setattr(machine, "time", lose)
    with pytest.raises(DeviceLostError):
        opened(machine).choose(PROBLEM)


# ---- what follows ----


@pytest.mark.parametrize(
    ("peak", "cores"),
    [
        pytest.param(66.9e12, 132, id="NVIDIA H200"),
        pytest.param(82.6e12, 128, id="NVIDIA RTX 4090"),
        pytest.param(61.4e12, 96, id="AMD RX 7900 XTX"),
        pytest.param(30.7e12, 96, id="AMD RX 7900 XTX, unpaired"),
        pytest.param(19.7e12, 32, id="Intel Arc A770"),
        pytest.param(3.6e12, 10, id="Apple M2"),
        pytest.param(1e9, 1, id="a rate of less than a core"),
    ],
)
def test_cores_follow_from_the_rate_within_a_factor_of_two(peak: float, cores: int) -> None:
    assert cores / 2 <= cores_of(peak) <= cores * 2


def test_what_was_not_measured_stays_a_guess() -> None:
    facts = Facts()
    key = device_key(Identity())
    assert with_speeds(facts, None) is facts
    assert with_speeds(facts, Speeds(key, None, None, DATE)) == facts
    assert with_speeds(facts, Speeds(key, 1e9, None, DATE)) == replace(facts, bandwidth=1e9)


def test_a_bundle_brings_the_speeds(tmp_path: Path) -> None:
    first, bundle = opened(Gpu()), tmp_path / "bundle.json"
    first.choose(PROBLEM)
    export_bundle(bundle, first)
    second = opened(Gpu(), mode="stored")
    assert second.facts.cores != CORES
    assert import_bundle(bundle, second) == 1
    assert second.facts == first.facts
    assert second.choose(PROBLEM).source == "stored"
    assert second.backend.probed == []


# ---- what a user sees ----


def invoke(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_devices_and_explain_show_what_was_measured(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WGPUCONV_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("wgpuconv.device._shared", {})  # devices of another store
    key = device_key(device.backend.identity)
    row = next(r for r in json.loads(invoke("devices", "--json")) if r["default"])
    assert (row["bandwidth"], row["fma_rate"]) == (None, None)
    why = "not measured on a software driver" if row["kind"] == "CPU" else "not measured yet"
    assert f"speeds: {why}" in invoke("devices")
    assert "measured: " not in invoke("devices")
    text = " ".join(invoke("explain", str(TINY)).split())
    assert "B/s (guessed)" in text
    assert "FLOP/s (guessed)" in text

    Store(tmp_path / FILE_NAME).put_speeds(Speeds(key, BANDWIDTH, RATE, DATE))
    monkeypatch.setattr("wgpuconv.device._shared", {})
    row = next(r for r in json.loads(invoke("devices", "--json")) if r["default"])
    assert (row["bandwidth"], row["fma_rate"]) == (BANDWIDTH, RATE)
    assert "measured: 4.00 TB/s, 60.0 TFLOP/s" in invoke("devices")
    text = " ".join(invoke("explain", str(TINY)).split())
    assert f"guesses reckon with 4.00 TB/s (measured {DATE})" in text
    assert f"60.0 TFLOP/s (measured {DATE}) and {CORES} cores" in text
    basis = json.loads(invoke("explain", str(TINY), "--json"))["basis"]
    assert basis == {
        "bandwidth": BANDWIDTH,
        "flops": RATE,
        "cores": CORES,
        "measured": ["bandwidth", "flops"],
        "date": DATE,
    }


@pytest.mark.gpu
def test_a_gpu_is_measured_when_it_is_first_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    device = Device(tune="auto", store=":memory:")
    device.choose(PROBLEM.with_(c=64, k=64))
    (speeds,) = device.tuner.store.all_speeds()
    assert speeds.complete
    assert device.facts.bandwidth == speeds.bandwidth
