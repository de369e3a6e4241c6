"""What a plan, a module, a problem and an explanation show of themselves at a prompt."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from wgpuconv import Conv2d, ConvProblem, ConvTranspose2d, Device, explain, plan_conv2d
from wgpuconv.cli import app

TINY = "conv2d f32 n1 c4 h8 w8 k8 r3 s3 stride1 pad1"
WEIGHT = np.zeros((8, 4, 3, 3), np.float32)


def test_a_module_shows_its_weight_and_what_was_asked_for(device: Device) -> None:
    made = Conv2d(
        WEIGHT,
        np.zeros(8, np.float32),
        stride=2,
        padding=(np.array(1), 0),
        activation=("clip", 0, 6),
        layout="nhwc",
        device=device,
    )
    assert repr(made) == (
        "Conv2d(weight (8, 4, 3, 3) float32, bias (8,), stride=2, padding=(array(1), 0), "
        f"layout='NHWC', activation=('clip', 0, 6), device={device.name!r})"
    )
    assert repr(Conv2d(WEIGHT, device=device)) == (
        f"Conv2d(weight (8, 4, 3, 3) float32, device={device.name!r})"
    )
    transposed = ConvTranspose2d(
        WEIGHT, stride=2, output_padding=1, algorithm="direct", workspace_limit=0, device=device
    )
    assert repr(transposed) == (
        "ConvTranspose2d(weight (8, 4, 3, 3) float32, stride=2, output_padding=1, "
        f"algorithm='direct', workspace_limit=0, device={device.name!r})"
    )


def test_a_problem_shows_what_makes_it_again() -> None:
    problem = ConvProblem.parse(f"{TINY} nhwc bias act:clip,0,6")
    assert repr(problem) == f"ConvProblem.parse('{TINY} nhwc bias act:clip,0,6')"
    assert eval(repr(problem)) == problem


def test_a_plan_shows_its_problem_and_its_kernel_in_a_line(device: Device) -> None:
    plan = plan_conv2d((1, 4, 8, 8), WEIGHT.shape, padding=1, algorithm="direct", device=device)
    label = plan.plan.label
    assert label.startswith("direct(")
    assert repr(plan) == f"EncodablePlan('{TINY}', {label}, device={device.name!r})"
    assert repr(plan.plan) == (
        f"Plan('{TINY}', {label}, 0 passes to prepare the weight, 1 pass a run, "
        "0 bytes of scratch memory)"
    )


@pytest.mark.parametrize("width", ["80", "120"])
def test_an_explanation_prints_what_the_command_prints(
    width: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    found = explain(TINY, device, everything=True)
    done = CliRunner().invoke(app, ["explain", TINY, "--all"])
    assert done.exit_code == 0, done.output
    assert str(found) == done.stdout.rstrip()
    assert found.choice.algorithm in str(found)
    assert repr(found) == (
        f"Explanation('{TINY}', device='{found.device}', chosen {found.choice.label}, "
        f"{len(found.rows)} candidates; print() shows all)"
    )
