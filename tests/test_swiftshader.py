"""The contract on a second software driver, written by other people: SwiftShader.

It has the limits of a small GPU (256 invocations a workgroup, 10 storage buffers, offsets in
steps of 256 bytes, no f16). A process cannot change its Vulkan driver, so this file is also the
program of one that starts with the other driver: it prints what it found as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SECONDS = 180


def main() -> None:
    from contract import PLANNED, problems, quick_configs, verify

    from wgpuconv import Device
    from wgpuconv.algorithms import ALGORITHMS

    device = Device()
    results: dict[str, str] = {}
    begin = time.monotonic()
    for number, plain in enumerate(problems()):
        problem = plain.with_(layout=("NCHW", "NHWC")[number % 2])
        for algorithm in ALGORITHMS:
            if algorithm.refusal(problem, PLANNED) is not None:
                continue
            label = f"{algorithm.name} {problem}"
            if time.monotonic() - begin > SECONDS:
                results[label] = f"not reached within {SECONDS} s"
                continue
            try:
                verify(device, algorithm, problem, quick_configs(algorithm, problem)[0])
                results[label] = "ok"
            except Exception as error:
                results[label] = f"{type(error).__name__}: {error}"
    limits = device.facts.limits
    print(
        json.dumps(
            {
                "adapter": device.name,
                "f16": device.facts.f16,
                "invocations": limits.max_invocations,
                "alignment": limits.storage_alignment,
                "results": results,
            }
        )
    )


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    icd = os.environ["WGPUCONV_SWIFTSHADER_ICD"]
    here = Path(__file__)
    path = os.pathsep.join([str(here.parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, here],
        env={**os.environ, "VK_DRIVER_FILES": icd, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=SECONDS + 50,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.swiftshader
@pytest.mark.xdist_group("swiftshader")
def test_it_is_the_small_gpu_that_it_stands_in_for(report: dict[str, Any]) -> None:
    assert "SwiftShader" in report["adapter"]
    assert not report["f16"]
    assert report["invocations"] == 256
    assert report["alignment"] == 256


@pytest.mark.swiftshader
@pytest.mark.xdist_group("swiftshader")
def test_every_algorithm_is_right_there(report: dict[str, Any]) -> None:
    results = report["results"]
    assert len({label.split()[0] for label in results}) >= 6
    wrong = {label: result for label, result in results.items() if result != "ok"}
    assert not wrong, json.dumps(wrong, indent=1)


if __name__ == "__main__":
    main()
