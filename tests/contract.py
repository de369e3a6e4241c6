"""What every algorithm must keep, as functions that run on any device.

``verify`` runs one configuration of one algorithm on one problem and holds the result against
the reference. The contract tests call it; so does the process that runs on the second driver.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import reference

from wgpuconv import Device
from wgpuconv.algorithms import Algorithm
from wgpuconv.facts import WEBGPU_DEFAULTS, Facts
from wgpuconv.plan import Config, Plan, Shader
from wgpuconv.problem import ConvProblem
from wgpuconv.shader import specialise

CASES = Path(__file__).parent / "cases"

PLANNED = Facts(limits=WEBGPU_DEFAULTS, f16=True, software=True)
"""What configurations are listed for, before any device is open: they run on every device, and
software drivers get the ones that compile in seconds."""

QUICK_TEXT = 10_000
"""Characters of WGSL that any driver compiles in well under a second."""

NAN, FINITE = 0xFF, 0x5A
"""Bytes with which memory is poisoned: NaN in both dtypes, and an ordinary number."""


def problems() -> list[ConvProblem]:
    """The fixed list, as f32 in NCHW."""
    lines = (CASES / "contract.txt").read_text(encoding="utf-8").splitlines()
    return [ConvProblem.parse(line) for line in lines if line and not line.startswith("#")]


@cache
def _text(shader: Shader) -> str:
    return specialise(shader)


def longest_kernel(plan: Plan) -> str:
    """The kernel that takes longest to compile: tests that share it belong together."""
    return max((_text(step.shader) for step in (*plan.prepare, *plan.passes)), key=len)


def lowered(
    algorithm: Algorithm,
    problem: ConvProblem,
    config: Config,
    facts: Facts = PLANNED,
    workspace_limit: int | None = None,
) -> Plan:
    limit = facts.workspace_limit if workspace_limit is None else workspace_limit
    return algorithm.lower(problem, config, facts, limit)


def quick_configs(algorithm: Algorithm, problem: ConvProblem) -> list[Config]:
    """The configurations that compile fast, those of larger problems of the kind included.

    Which tiles are offered depends on the sizes, but each tile must be right on each problem.
    """
    wide = problem.with_(n=64 * problem.n, k=64 * problem.k)
    found: dict[str, tuple[int, Config]] = {}
    for like in (problem, wide):
        for config in algorithm.configs(like, PLANNED):
            size = len(longest_kernel(lowered(algorithm, problem, config)))
            found[str(config)] = (size, config)
    limit = max(QUICK_TEXT, 1.05 * min(size for size, _ in found.values()))
    return [config for size, config in found.values() if size <= limit]


class Runner:
    """Runs a plan with every buffer poisoned first, scratch memory included."""

    def __init__(self, device: Device, plan: Plan) -> None:
        self.backend = device.backend
        self.plan = plan
        self.compiled = self.backend.compile(plan)

    def __call__(
        self, x: np.ndarray, w: np.ndarray, b: np.ndarray | None, poison: int = NAN
    ) -> np.ndarray:
        plan, backend = self.plan, self.backend
        out = np.empty(plan.problem.out_shape, x.dtype)
        given = {"input": x, "weight": w} | ({} if b is None else {"bias": b})
        scratch = {"workspace": plan.workspace, "prepared": plan.prepared, **dict(plan.staged)}
        buffers: dict[str, Any] = {}
        for role, array in given.items():
            buffers[role] = self._filled(array)
        for role, size in {"out": out.nbytes, **scratch}.items():
            if size:
                buffers[role] = self._filled(np.full(size, poison, np.uint8))
        if plan.prepare:
            backend.prepare(self.compiled, {role: buffers[role] for role in ("weight", "prepared")})
        backend.run(self.compiled, buffers)
        backend.read(buffers["out"], out)
        for buffer in buffers.values():
            backend.free(buffer)
        return out

    def _filled(self, array: np.ndarray) -> Any:
        buffer = self.backend.allocate(array.nbytes)
        self.backend.write(buffer, np.ascontiguousarray(array))
        return buffer


def verify(
    device: Device,
    algorithm: Algorithm,
    problem: ConvProblem,
    config: Config,
    *,
    facts: Facts | None = None,
    workspace_limit: int | None = None,
) -> Plan:
    """Runs three times and checks: exact sums, real numbers, and the same bits again."""
    plan = lowered(algorithm, problem, config, facts or device.facts, workspace_limit)
    run = Runner(device, plan)
    integers = reference.arrays(problem, exact=True)
    reference.check(problem, run(*integers), *integers, exact=True, label=plan.label)
    reals = reference.arrays(problem)
    first = run(*reals, poison=FINITE)
    reference.check(problem, first, *reals, label=plan.label)
    again = run(*reals)
    assert first.tobytes() == again.tobytes(), f"{plan.label} {problem}: two runs differ"
    return plan
