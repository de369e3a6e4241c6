"""The cost model against what sweeps measured on an H200 (bench/cost_model.py)."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[1] / "bench"
SWEEPS = sorted((BENCH / "results").glob("*-h200-vulkan-sweep-[34578].json"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cost_model", BENCH / "cost_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their names
    spec.loader.exec_module(module)
    return module


def test_alone_it_picks_well_and_its_shortlist_has_one_of_the_best(script: ModuleType) -> None:
    judged = script.judge(SWEEPS)
    assert len(judged.picks["burn"]) == 14
    assert statistics.geometric_mean(judged.picks["burn"]) < 1.25
    every = [ratio for ratios in judged.picks.values() for ratio in ratios]
    assert len(every) > 100
    assert statistics.geometric_mean(every) < 1.25
    for ratios in judged.shortlists.values():
        assert statistics.geometric_mean(ratios) < 1.05


def test_predictions_are_near_what_was_measured(script: ModuleType) -> None:
    for name, ratios in script.judge(SWEEPS).predicted.items():
        near = [ratio for ratio in ratios if 1 / 1.5 <= ratio <= 1.5]
        assert len(near) >= 0.8 * len(ratios), name


def test_what_is_printed(script: ModuleType) -> None:
    lines = script.judge(SWEEPS[:1]).lines()
    assert lines[-1].startswith("winograd")
    assert any(line.startswith("all ") for line in lines)
