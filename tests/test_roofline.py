"""The roofline's probes measure what they say, and tell when something else was timed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from wgpuconv import Device
from wgpuconv.errors import DeviceError, DeviceLostError
from wgpuconv.shader import load
from wgpuconv.tuning import roofline
from wgpuconv.tuning.roofline import Implausible, copy_bandwidth, fma_rate, measure


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests share the machine: times may be off by a lot without being wrong."""
    monkeypatch.setattr(roofline, "LINEAR", 0.05)


@pytest.mark.usefixtures("busy")
def test_rates_are_those_of_a_machine(device: Device) -> None:
    found = measure(device.backend)
    assert found.notes == ()
    assert found.bandwidth is not None
    assert found.fma_rate is not None
    least = 1e8 if device.facts.software else 1e10
    assert least < found.bandwidth < 1e14
    assert least < found.fma_rate < 1e15


def test_the_module_knows_the_shader() -> None:
    text = load("probe_fma")
    assert f"const CHAINS: u32 = {roofline.CHAINS}u;" in text
    assert f"const STEPS: u32 = {roofline.STEPS}u;" in text
    for name in ("probe_copy", "probe_fma"):
        assert f"const WORKGROUP: u32 = {roofline.WORKGROUP}u;" in load(name)


def test_a_copy_that_does_not_copy_is_told(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = device.backend.read

    def wrong(buffer: Any, array: np.ndarray) -> None:
        plain(buffer, array)
        array.reshape(-1)[-1] += 1

    monkeypatch.setattr(device.backend, "read", wrong)
    with pytest.raises(Implausible, match="differs from what was copied"):
        copy_bandwidth(device.backend)
    with pytest.raises(Implausible, match="sums are wrong"):
        fma_rate(device.backend)


def test_a_time_that_does_not_grow_with_the_work_is_told(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def constant(trials: Any, *, repeats: Any) -> list[float]:
        return [0.1] * len(trials)

    monkeypatch.setattr(device.backend, "time", constant)
    found = measure(device.backend)
    assert (found.bandwidth, found.fma_rate) == (None, None)
    assert len(found.notes) == 2
    assert all("twice the work takes 1.00 times as long" in note or "differs" in note
               for note in found.notes)  # fmt: skip


def test_a_lost_device_is_no_note(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, raised in ((DeviceLostError("gone"), True), (DeviceError("refused"), False)):

        def fail(*_: Any, error: Exception = error, **__: Any) -> list[float]:
            raise error

        monkeypatch.setattr(device.backend, "time", fail)
        if raised:
            with pytest.raises(DeviceLostError):
                measure(device.backend)
        else:
            assert measure(device.backend).notes[0].endswith("refused")


def test_progress_counts_the_rates(device: Device) -> None:
    told: list[tuple[int, int]] = []
    measure(device.backend, lambda done, total: told.append((done, total)))
    assert told == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.usefixtures("busy")
def test_rates_outside_of_what_devices_can_do_are_no_rates(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roofline, "BANDWIDTHS", (1e30, 1e31))
    monkeypatch.setattr(roofline, "FMA_RATES", (1e30, 1e31))
    for probe in (copy_bandwidth, fma_rate):
        with pytest.raises(Implausible, match="a second are outside of what devices can do"):
            probe(device.backend)
