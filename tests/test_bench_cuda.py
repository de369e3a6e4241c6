"""WebGPU and CUDA in one run of the bench, with an emulated card for the latter."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_emulator import HOPPER, Emulator, compiler

from wgpuconv import Device
from wgpuconv.bench import runner, summary
from wgpuconv.bench.calls import caller
from wgpuconv.bench.ours import OurDevice
from wgpuconv.bench.peer import Variant
from wgpuconv.bench.report import page, view
from wgpuconv.bench.result import PeerFacts, ProblemResult, Run, Side, load
from wgpuconv.bench.session import Session
from wgpuconv.bench.theirs import TheirLibrary
from wgpuconv.cli.bench import _print
from wgpuconv.plugins.cuda.algorithms import ALGORITHMS
from wgpuconv.plugins.cuda.backend import CudaBackend
from wgpuconv.problem import ConvProblem
from wgpuconv.suites import parse_entry, varied
from wgpuconv.tuning import roofline
from wgpuconv.tuning.verify import random_data

pytestmark = pytest.mark.xdist_group("bench of two devices")

LAYER = parse_entry("layer: conv2d f32 n1 c4 h9 w8 k6 r3 s3 pad1 bias")
DTYPES = ("f32", "f16", "bf16", "tf32")
RATES = roofline.Roofline(bandwidth=4e10, fma_rate=3e10)
"""In the place of a measurement, which a busy CPU may not give."""


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Device:
    if compiler() is None or sys.platform != "linux":
        pytest.skip("needs g++ on Linux")
    device = Device.__new__(Device)
    device._setup(Emulator(tmp_path_factory.mktemp("cuda")), "off", ":memory:", None)
    return device


@pytest.fixture(scope="module")
def run(device: Device, card: Device) -> Run:
    if not device.facts.f16:
        pytest.skip("needs a device with f16")
    ours = [
        OurDevice(device, spec="wgpu", algorithms=["direct"]),
        OurDevice(card, spec="cuda", algorithms=["direct", "implicit_gemm_mma"]),
    ]
    with Session(ours, rounds=2, measures=("kernel", "call"), baseline="wgpu") as session:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(roofline, "measure", lambda machine: RATES)
            session.measure_rooflines()
        entries = [varied(LAYER, dtype=dtype) for dtype in DTYPES]
        assert len(list(session.measure(entries, lambda label, step: None))) == len(DTYPES)
        return session.run()


def test_sides_of_both_are_timed_in_each_dtype_they_have(run: Run) -> None:
    timed = [{side.name for side in result.sides if side.samples} for result in run.results]
    both, tensor_cores = {"wgpu direct", "cuda direct"}, "cuda implicit_gemm_mma"
    assert timed[0] == both
    assert timed[1] == both | {tensor_cores}
    assert timed[2] == timed[3] == {"cuda direct", tensor_cores}
    assert not any(result.failed for result in run.results)


def test_what_sides_compute_in(run: Run) -> None:
    """What multiplies in float32 anyway says so where the problem allows TF32."""
    for result, dtype in zip(run.results, DTYPES, strict=True):
        for side in result.sides:
            direct = side.what.startswith("direct")
            assert side.precision == ("f32" if direct and dtype == "tf32" else dtype)
    allowed = run.results[-1]
    assert {side.precision for side in allowed.sides} == {"f32", "tf32"}
    best = min((s for s in allowed.sides if not s.prepared), key=lambda side: side.seconds or 1)
    assert summary.best_of(allowed, "cuda", "tf32") == best
    direct = summary.best_of(allowed, "cuda", "f32")
    assert direct is not None
    assert direct.what == "direct"


def test_what_needs_tf32_says_that_it_computes_in_it() -> None:
    found = set()
    for text in ("n4 c64 h14 w14 k64 r3 s3 pad1", "n4 c64 h14 w14 k64 r3 s3 pad1 nhwc"):
        plain, allowed = (ConvProblem.parse(f"conv2d f32 {text} {word}") for word in ("", "tf32"))
        for algorithm in ALGORITHMS:
            refused = [algorithm.refusal(p, HOPPER) for p in (plain, allowed)]
            if refused[0] and not refused[1]:
                assert algorithm.arithmetic(allowed) == "tf32", algorithm.name
                found.add(algorithm.name)
            assert algorithm.arithmetic(plain) == "f32"
    assert "implicit_gemm_mma" in found


def test_what_a_device_lacks_is_its_refusal(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    *_, bf16, tf32 = run.results
    assert bf16.refusals["wgpu"].startswith("bfloat16 needs a CUDA device")
    assert tf32.refusals["wgpu"].startswith("precision 'tf32' needs a CUDA device")
    assert "multiplies f16" in run.results[0].refusals["cuda implicit_gemm_mma"]
    _print(bf16, run, ("kernel",))
    assert "wgpu: bfloat16 needs a CUDA device" in " ".join(capsys.readouterr().out.split())


def test_weights_in_channels_last(device: Device, card: Device) -> None:
    """Are ours to read; a peer gets them as a caller has them."""
    asked: list[ConvProblem] = []
    loaded: list[np.ndarray] = []
    process: Any = SimpleNamespace(
        name="theirs",
        variants=lambda problem: asked.append(problem) or [Variant("plain", "f16")],
        load=lambda problem, variant, data: loaded.append(data["weight"]),
        output=lambda variant, points: loaded[0][:0],
        unload=lambda: None,
    )
    entry = varied(LAYER, dtype="f16", layout="channels_last")
    ours = [OurDevice(device, spec="wgpu"), OurDevice(card, spec="cuda", algorithms=["direct"])]
    runs = runner.run([entry], [*ours, TheirLibrary(process)], measures=("kernel", "call"))
    (result,) = runs
    assert result.refusals["wgpu"].startswith("a weight with its channels last ('wlast') needs")
    (direct,) = (side for side in result.sides if side.ours)
    assert direct.samples
    assert direct.call is None
    assert asked == [entry.problem.with_(weight_last=False)]
    (weight,) = loaded
    assert weight.shape == entry.problem.weight_shape
    last = random_data(entry.problem)["weight"]
    assert np.array_equal(weight, np.moveaxis(last, -1, 1))


def test_facts_of_both(run: Run) -> None:
    wgpu, cuda = run.devices
    assert (wgpu.name, cuda.name) == ("wgpu", "cuda")
    assert wgpu.bandwidth == RATES.bandwidth
    assert wgpu.fma_rate == RATES.fma_rate
    assert cuda.bandwidth is None  # the emulator has no probes
    assert cuda.versions == {"cupy": "14.0", "capability": "9.0"}
    assert set(run.results[1].choice) == {"wgpu", "cuda"}


def test_the_report_shows_both(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path / "run.json")
    shown: Any = view([("run", load(tmp_path / "run.json"))])["runs"][0]
    groups = [(group["name"], group["dtype"]) for group in shown["groups"]]
    assert groups[:2] == [("wgpu f32", "f32"), ("cuda f32", "f32")]
    assert set(groups[2:]) == {
        *((f"{on} f16", "f16") for on in ("wgpu", "cuda")),
        *((f"cuda {dtype}", dtype) for dtype in ("bf16", "tf32")),
        ("cuda f32", "tf32"),  # what computes in float32 all the same
    }
    assert [device["name"] for device in shown["devices"]] == ["wgpu", "cuda"]
    ratios = {side["on"]: side["ratio"] for side in shown["problems"][0]["sides"]}
    assert ratios["wgpu"] == 1
    assert ratios["cuda"] not in (None, 1)
    assert all(side["ratio"] is None for side in shown["problems"][2]["sides"])
    text = page([("run", run)])
    assert json.dumps("cuda bf16") in text


def test_problems_that_allow_tf32_are_apart() -> None:
    """On them float32 is no loss, TF32 neither; on float32 problems TF32 is one."""
    sides = (
        Side("torch-cuda", "nchw, tf32", "tf32", False, (2e-5,)),
        Side("cuda", "implicit_gemm_mma", "tf32", True, (3e-5,)),
        Side("torch-cuda", "nchw", "f32", False, (4e-5,)),
    )
    text = "conv2d f32 n1 c4 h9 w8 k6 r3 s3"
    plain, allowed = (
        ProblemResult("", problem, 1, 1, 1, sides) for problem in (text, f"{text} tf32")
    )
    made = Run("", "", None, "", {}, (), (PeerFacts("torch-cuda"),), "torch-cuda", (plain, allowed))
    assert (summary.dtype_of(plain), summary.dtype_of(allowed)) == ("f32", "tf32")
    assert summary.leaders(plain) == (sides[2],)
    assert summary.leaders(allowed) == (sides[0],)
    assert summary.baseline_of(made, plain) == sides[2]
    assert summary.baseline_of(made, allowed) == sides[0]
    slow = replace(sides[0], samples=(5e-5,))
    changed = replace(allowed, sides=(slow, *sides[1:]))
    assert summary.baseline_of(made, changed) == sides[2]


def test_a_call_has_the_problems_precision(card: Device) -> None:
    problem = varied(LAYER, dtype="tf32").problem
    card.call_cache.clear()
    caller(problem, "implicit_gemm_mma", card)(random_data(problem))
    assert problem in {key[0] for key in card._open}


def test_probes_run_on_cuda(card: Device) -> None:
    """The plans of the roofline fit the plugin's kernels, which compute what is checked there."""
    assert CudaBackend.has_probes
    machine = card.backend
    values = np.arange(1000, dtype=np.uint32)
    buffers = {"input": machine.allocate(4000), "out": machine.allocate(4000)}
    machine.write(buffers["input"], values)
    machine.run(roofline._copy(machine, 4000), buffers)
    copied = np.empty_like(values)
    machine.read(buffers["out"], copied)
    assert np.array_equal(copied, values)
    sums = np.empty(2 * roofline.WORKGROUP, np.float32)
    buffers = {"out": machine.allocate(sums.nbytes)}
    machine.run(roofline._multiply(machine, 2, 3), buffers)
    machine.read(buffers["out"], sums)
    assert np.allclose(sums, roofline._sums(sums.size, 3), rtol=4 * roofline.CHAINS * 2.0**-24)
