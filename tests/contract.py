"""What every algorithm must keep, as functions that run on any device.

``verify`` runs one configuration of one algorithm on one problem and holds the result against
the reference. The contract tests call it; so does the process that runs on the second driver.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

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

    Which tiles are offered depends on the sizes, but each tile must be right on each problem. Of
    each bilinear transform there is one, the quickest to compile: its product is a GEMM like any.
    """
    wide = problem.with_(n=64 * problem.n, k=64 * problem.k)
    found: dict[str, tuple[int, Config]] = {}
    bilinear: dict[reference.Pair, tuple[int, Config]] = {}
    for like in (problem, wide):
        for config in algorithm.configs(like, PLANNED):
            plan = lowered(algorithm, problem, config)
            texts = [len(_text(step.shader)) for step in (*plan.prepare, *plan.passes)]
            if plan.bilinear is None:
                found[str(config)] = (max(texts), config)
            elif sum(texts) < bilinear.get(plan.bilinear, (math.inf, config))[0]:
                bilinear[plan.bilinear] = (sum(texts), config)
    limit = max(QUICK_TEXT, 1.05 * min((size for size, _ in found.values()), default=0))
    quick = [config for size, config in found.values() if size <= limit]
    return quick + [config for _, config in bilinear.values()]


class Runner:
    """Runs a plan with every buffer poisoned first, scratch memory included."""

    def __init__(self, device: Device, plan: Plan) -> None:
        self.backend = device.backend
        self.plan = plan
        self.compiled = self.backend.compile(plan)

    def __call__(
        self,
        x: np.ndarray,
        w: np.ndarray,
        b: np.ndarray | None,
        residual: np.ndarray | None = None,
        *,
        poison: int = NAN,
    ) -> np.ndarray:
        plan, backend = self.plan, self.backend
        out = np.empty(plan.problem.out_shape, x.dtype)
        given = {"input": x, "weight": np.moveaxis(w, 1, -1) if plan.problem.weight_last else w}
        given |= {} if b is None else {"bias": b}
        given |= {} if residual is None else {"residual": residual}
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


class Case(NamedTuple):
    """Arguments of a problem, and what the reference makes of them."""

    problem: ConvProblem
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]
    want: np.ndarray
    allowed: np.ndarray

    def judge(self, got: np.ndarray, label: str) -> None:
        reference.compare(self.problem, got, self.want, self.allowed, label)


@lru_cache(maxsize=64)
def _case(problem: ConvProblem, exact: bool, bilinear: reference.Pair | None) -> Case:
    """Kept, since hundreds of configurations are held against the same."""
    arrays = *reference.arrays(problem, exact=exact), reference.residual(problem, exact=exact)
    found = reference.expected(problem, *arrays, exact=exact, bilinear=bilinear)
    return Case(problem, arrays, *found)


def verify(
    device: Device,
    algorithm: Algorithm,
    problem: ConvProblem,
    config: Config,
    *,
    facts: Facts | None = None,
    workspace_limit: int | None = None,
) -> Plan:
    """Runs three times and checks: exact sums, real numbers, and the same bits again.

    A bilinear algorithm's sums are not exact on integers; they stay within its bound, which one
    lost tap exceeds there (see test_reference.py).
    """
    plan = lowered(algorithm, problem, config, facts or device.facts, workspace_limit)
    run = Runner(device, plan)
    integers = _case(problem, True, plan.bilinear)
    integers.judge(run(*integers.arrays), plan.label)
    reals = _case(problem, False, plan.bilinear)
    first = run(*reals.arrays, poison=FINITE)
    reals.judge(first, plan.label)
    again = run(*reals.arrays)
    assert first.tobytes() == again.tobytes(), f"{plan.label} {problem}: two runs differ"
    return plan
