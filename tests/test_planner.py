"""Planning: who applies, who refuses and why. None of this needs a GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from wgpuconv.algorithms import ALGORITHMS, find
from wgpuconv.errors import AlgorithmRefusedError, UnknownAlgorithmError
from wgpuconv.facts import WEBGPU_DEFAULTS, Facts, Limits
from wgpuconv.planner import lower, only, survey
from wgpuconv.problem import ConvProblem

FACTS = Facts(f16=True)
TEXTS = [
    "conv2d f32 n2 c8 h9 w7 k8 r3 s3 stride2 pad1",
    "conv2d f32 n2 c8 h9 w7 k8 r3 s3 stride1 pad1 groups8",
    "conv2d f16 n1 c16 h8 w8 k32 r1 s1 stride1 pad0 nhwc bias act:relu",
    "conv_transpose2d f32 n1 c8 h5 w5 k4 r3 s3 stride2 pad1 outpad1",
    "conv2d f32 n0 c8 h9 w7 k8 r3 s3 stride2 pad1",
]


@pytest.mark.parametrize("text", TEXTS)
def test_survey(text: str) -> None:
    problem = ConvProblem.parse(text)
    found = survey(problem, FACTS)
    assert found.problem is problem
    names = {c.algorithm for c in found.candidates}
    assert names | set(found.refusals) == {a.name for a in ALGORITHMS}
    assert not names & set(found.refusals)
    assert "direct" in names  # there is always one that can
    costs = [c.cost for c in found.candidates]
    assert costs == sorted(costs)
    assert min(costs) > 0
    assert len({c.label for c in found.candidates}) == len(found.candidates)
    for reason in found.refusals.values():
        assert reason == reason.strip() != ""


@pytest.mark.parametrize("text", TEXTS)
def test_every_candidate_lowers(text: str) -> None:
    problem = ConvProblem.parse(text)
    for candidate in survey(problem, FACTS).candidates:
        plan = lower(problem, candidate, FACTS)
        assert plan.problem == problem
        assert (plan.algorithm, plan.config) == (candidate.algorithm, candidate.config)
        assert plan.passes
        assert plan.scratch <= FACTS.workspace_limit + plan.prepared
        for step in (*plan.prepare, *plan.passes):
            assert max(step.grid) <= FACTS.limits.max_workgroups
            assert step.shader.file in find(candidate.algorithm).shaders


def test_plans_are_the_same_each_time() -> None:
    problem = ConvProblem.parse(TEXTS[0])
    first, again = survey(problem, FACTS), survey(problem, FACTS)
    assert first == again
    for a, b in zip(first.candidates, again.candidates, strict=True):
        assert lower(problem, a, FACTS) == lower(problem, b, FACTS)


def test_a_forced_algorithm() -> None:
    found = survey(ConvProblem.parse(TEXTS[0]), FACTS)
    assert {c.algorithm for c in only(found, "direct").candidates} == {"direct"}
    with pytest.raises(AlgorithmRefusedError) as caught:
        only(found, "depthwise")
    assert found.refusals["depthwise"] in str(caught.value)
    assert "those that apply: " in str(caught.value)
    assert str(found.problem) in str(caught.value)
    with pytest.raises(AlgorithmRefusedError, match="computes conv_transpose2d, not conv2d"):
        only(found, "col2im")
    with pytest.raises(UnknownAlgorithmError, match="known are direct, "):
        find("fft")


def test_small_devices() -> None:
    """Configurations keep to the limits, down to those that WebGPU guarantees and below."""
    tiny = replace(FACTS, limits=Limits(max_invocations=64, max_workgroup_storage=4096))
    problem = ConvProblem.parse(TEXTS[0])
    candidates = survey(problem, tiny).candidates
    assert {c.algorithm for c in candidates} >= {"direct"}
    big = replace(FACTS, limits=Limits(max_invocations=1024, max_workgroup_storage=1 << 16))
    assert len(survey(problem, big).candidates) >= len(candidates)


def test_workspace_limit() -> None:
    problem = ConvProblem.parse("conv2d f32 n8 c16 h40 w40 k8 r3 s3 stride1 pad1")
    found = only(survey(problem, FACTS), "im2col_gemm").candidates[0]
    wide, narrow = (
        lower(problem, found, FACTS),
        lower(problem, found, FACTS, workspace_limit=1 << 20),
    )
    assert narrow.scratch <= 1 << 20 < wide.scratch
    assert len(narrow.passes) > len(wide.passes)
    with pytest.raises(AlgorithmRefusedError, match="workspace"):
        lower(problem, found, FACTS, workspace_limit=16)


def test_planning_imports_no_gpu() -> None:
    code = "import sys, wgpuconv.planner; print([n for n in sys.modules if n.startswith('wgpu.')])"
    # wgpuconv/__init__ brings the backend, but neither loads a GPU library before one is used.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_direct_tiled_leaves_single_channels_to_depthwise() -> None:
    """Three of its four filters would be empty."""
    facts = Facts(limits=WEBGPU_DEFAULTS)
    one = survey(ConvProblem.parse("conv2d n1 c8 h9 w9 k8 r3 s3 groups8"), facts)
    assert one.refusals["direct_tiled"].startswith("computes four filters at a time, got 1")
    four = survey(ConvProblem.parse("conv2d n1 c8 h9 w9 k32 r3 s3 groups8"), facts)
    assert "direct_tiled" in {c.algorithm for c in four.candidates}
