"""What a convolution costs from Python: a call on tensors, from numpy to numpy, the first call."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..device import Device
from ..errors import BenchError
from ..ops import conv2d, conv_transpose2d
from ..problem import ConvProblem
from ..tensor import tensor
from ..tuning.verify import random_data

Array = np.ndarray[Any, Any]

SECONDS = 0.1
"""What a row of calls, or of trips from numpy to numpy, takes about."""
MOST = 1000
ROWS = 3
"""Rows of calls, or trips at least, of which the median counts."""
FIRST_CALL_LIMIT = 300


def caller(
    problem: ConvProblem, algorithm: str, device: Device
) -> Callable[[Mapping[str, Any]], Any]:
    """A function that convolves arrays or tensors, by role, as a user would call."""
    top, bottom, left, right = problem.padding
    arguments: dict[str, Any] = {
        "stride": problem.stride,
        "padding": ((top, bottom), (left, right)),
        "dilation": problem.dilation,
        "groups": problem.groups,
        "layout": problem.layout,
        "activation": problem.activation,
        "precision": problem.precision,
        "algorithm": algorithm,
        "device": device,
    }
    function: Callable[..., Any] = conv2d
    if problem.transposed:
        function = conv_transpose2d
        arguments["output_padding"] = problem.output_padding
    return lambda data: function(
        data["input"],
        data["weight"],
        data.get("bias"),
        residual=data.get("residual"),
        **arguments,
    )


def call_seconds(
    device: Device, problem: ConvProblem, data: Mapping[str, Array], algorithm: str
) -> float:
    """Of one call on tensors that are on the device, in a row of calls with one wait at its end."""
    convolve = caller(problem, algorithm, device)
    tensors = {role: tensor(array, device) for role, array in data.items()}
    mark, word = device.backend.allocate(4), np.empty(1, np.uint32)

    def row(calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            convolve(tensors)
        device.backend.read(mark, word)  # what was submitted before is done before
        return (time.perf_counter() - begin) / calls

    try:
        row(1)
        calls = min(max(int(SECONDS / row(2)), 1), MOST)
        return statistics.median(row(calls) for _ in range(ROWS))
    finally:
        device.backend.free(mark)


def end_to_end_seconds(
    device: Device, problem: ConvProblem, data: Mapping[str, Array], algorithm: str
) -> float:
    """From numpy arrays to a numpy array."""
    convolve = caller(problem, algorithm, device)

    def trip() -> float:
        begin = time.perf_counter()
        convolve(data)
        return time.perf_counter() - begin

    trip()
    first = trip()
    trips = min(max(int(SECONDS / first), ROWS), MOST)
    return statistics.median([first, *(trip() for _ in range(trips - 1))])


def first_call_seconds(spec: str, problem: ConvProblem, algorithm: str, tune: str) -> float:
    """From numpy to numpy in a new process with empty caches, of ours and of the driver: opening
    the device, tuning and compiling. (Not in it: starting Python, importing wgpuconv.)"""
    with tempfile.TemporaryDirectory(prefix="wgpuconv-first-") as folder:
        root = str(Path(__file__).parents[2])
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "from wgpuconv.bench.calls import print_first_call as main; main()",
                *(spec, str(problem), algorithm, tune),
            ],
            capture_output=True,
            text=True,
            timeout=FIRST_CALL_LIMIT,
            check=False,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(
                    filter(None, [root, os.environ.get("PYTHONPATH", "")])
                ),
                "WGPUCONV_CACHE_DIR": folder,
                "MESA_SHADER_CACHE_DISABLE": "true",
                "__GL_SHADER_DISK_CACHE": "0",
            },
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise BenchError(f"the first call failed in its own process: {last}")
    return float(done.stdout)


def print_first_call() -> None:
    """The process of ``first_call_seconds``."""
    spec, text, algorithm, tune = sys.argv[1:]
    problem = ConvProblem.parse(text)
    data = random_data(problem)
    begin = time.perf_counter()
    caller(problem, algorithm, Device(spec or None, tune=tune))(data)
    print(time.perf_counter() - begin)
