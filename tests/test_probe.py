"""The known-answer probe: right drivers pass, a wrong answer warns once and says what to do."""

from __future__ import annotations

import warnings

import pytest

from wgpuconv import Device
from wgpuconv.backends import probe


def test_the_answer_is_what_the_loop_computes() -> None:
    value = probe.SEED
    for _ in range(probe.ITERATIONS):
        value = (value * 1664525 + 1013904223) % 2**32
    assert value == probe.ANSWER
    assert probe.ITERATIONS > 65_535


def test_this_driver_runs_long_loops() -> None:
    assert probe.runs_long_loops(Device().backend.gpu_device)


def test_a_loop_that_ends_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_device = Device().backend.gpu_device
    monkeypatch.setattr(probe, "ITERATIONS", 65_535)
    assert not probe.runs_long_loops(gpu_device)


def test_a_miscompiling_driver_warns_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "runs_long_loops", lambda gpu_device: False)
    monkeypatch.setattr(probe, "_known", {})
    with pytest.warns(RuntimeWarning, match=r"install Mesa 25 or newer"):
        first = probe.warn_if_miscompiling(None, "llvmpipe", "Mesa 22")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert probe.warn_if_miscompiling(None, "llvmpipe", "Mesa 22") == first


def test_a_software_device_is_probed_when_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Device().facts.software:
        pytest.skip("needs a software driver")
    monkeypatch.setattr(probe, "ANSWER", probe.ANSWER + 1)
    monkeypatch.setattr(probe, "_known", {})
    with pytest.warns(RuntimeWarning, match="leaves loops"):
        Device()
