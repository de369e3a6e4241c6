"""Comparing two results: what counts as a difference, what a CI fails on, what is said instead."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from bench_sample import sample_run
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from wgpuconv.bench.compare import DRIFT, compare
from wgpuconv.bench.result import ProblemResult, Run, Side, load
from wgpuconv.bench.summary import told_apart
from wgpuconv.cli.bench_report import compare_command
from wgpuconv.errors import BenchError

TEXT = "conv2d f32 n1 c8 h16 w16 k8 r3 s3 stride1 pad1"


def side(what: str, *samples: float, on: str = "wgpu", **more: Any) -> Side:
    return Side(on, what, more.pop("precision", "f32"), on in ("wgpu", "dawn"), samples, **more)


def run(*sides: Side, name: str = "a", choice: str = "", **more: Any) -> Run:
    """A run of one problem on the devices of the sample."""
    chosen = {"wgpu": choice} if choice else {}
    result = ProblemResult(name, TEXT, 1, 1000, 100, sides, choice=chosen)
    return replace(sample_run(dtypes=()), results=(result,), **more)


def invoke(*arguments: Any) -> Any:
    app = typer.Typer()
    app.command()(compare_command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    def save(name: str, found: Run) -> Path:
        found.save(tmp_path / name)
        return tmp_path / name

    return save


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((1.0, 1.01, 1.02), (1.2, 1.21, 1.22), "slower"),
        ((1.2, 1.21, 1.22), (1.0, 1.01, 1.02), "faster"),
        ((1.0, 1.1, 1.2), (1.05, 1.3, 1.4), "same"),  # 18 % more, but the ranges overlap
        ((1.0, 1.1, 1.2), (1.05, 1.3, 9.0), "same"),
        ((1.0, 1.0, 9.0), (1.1, 1.1, 1.1), "slower"),  # one disturbed sample hides nothing
        ((1.0, 1.0, 1.0), (1.015, 1.015, 1.015), "same"),  # two runs differ by as much
        ((1.0, 1.0, 1.0), (1.025, 1.025, 1.025), "slower"),
    ],
)
def test_a_difference_is_one_only_outside_the_noise(
    before: tuple[float, ...], after: tuple[float, ...], verdict: str
) -> None:
    (found,) = compare(run(side("direct", *before)), run(side("direct", *after))).sides
    assert found.verdict == verdict


@given(
    st.lists(st.floats(1e-6, 1), min_size=1, max_size=7),
    st.lists(st.floats(1e-6, 1), min_size=1, max_size=7),
)
def test_a_comparison_backwards_says_the_opposite(one: list[float], other: list[float]) -> None:
    a, b = side("direct", *one), side("direct", *other)
    (there,), (back,) = compare(run(a), run(b)).sides, compare(run(b), run(a)).sides
    assert there.ratio == pytest.approx(1 / back.ratio)
    opposite = {"slower": "faster", "faster": "slower", "same": "same"}
    if abs(abs(there.ratio - 1) - DRIFT) > 1e-3:  # where rounding does not decide
        assert back.verdict == opposite[there.verdict]
    assert told_apart(a, b) == told_apart(b, a)
    assert not told_apart(a, a)


def test_one_lucky_sample_makes_no_tie() -> None:
    assert told_apart(side("direct", 1.0, 1.2, 1.3), side("direct", 0.9, 4.0, 4.0))
    assert not told_apart(side("direct", 1.0, 1.2, 1.3), side("direct", 0.9, 2.0, 2.0))


def test_a_software_driver_is_a_warning() -> None:
    found = sample_run()
    software = replace(found, devices=tuple(replace(d, software=True) for d in found.devices))
    assert not any("software driver" in each for each in compare(found, found).warnings)
    assert any("software driver" in each for each in compare(found, software).warnings)


def test_a_run_does_not_differ_from_itself() -> None:
    found = compare(sample_run(), sample_run())
    assert {each.verdict for each in found.sides} == {"same"}
    assert found.mean == pytest.approx(1)
    assert found.over(1.0) == ()
    assert found.lost == found.only_before == found.only_after == found.warnings == ()


def test_a_slower_library_is_told_from_slower_peers() -> None:
    found = compare(sample_run(), sample_run(scale=1.1, seed=1))
    assert len(found.ours) == 28 * 2  # a device each, whatever algorithms it has
    assert {each.verdict for each in found.ours} == {"slower"}
    assert found.mean == pytest.approx(1.1, rel=0.01)
    assert {each.verdict for each in found.sides if not each.ours} == {"same"}
    assert len(found.over(1.05)) == 56
    assert found.over(1.2) == ()
    assert found.worst is not None
    assert found.over(1.05)[0] == found.worst


def test_ours_is_the_tuners_choice_where_it_was_timed() -> None:
    before = run(side("gemm", 1.0, label="gemm(a)"), side("direct", 2.0, label="direct(a)"))
    after = run(
        side("gemm", 1.0, label="gemm(a)"), side("direct", 2.0, label="direct(a)"),
        choice="direct(a)",
    )  # fmt: skip
    (found,) = compare(before, after).ours  # nothing is slower, but the tuner chose worse
    assert (found.what, found.ratio, found.verdict) == ("direct", 2.0, "slower")


def test_prepared_weights_and_less_work_stand_for_nothing() -> None:
    before = run(side("gemm", 1.0), side("gemm, prepared weights", 0.5, prepared=True))
    after = run(side("gemm", 1.0), side("gemm, prepared weights", 0.9, prepared=True))
    found = compare(before, after)
    assert [each.ratio for each in found.ours] == [1.0]
    assert [each.verdict for each in found.sides] == ["same", "slower"]


def test_each_precision_of_ours_stands_alone() -> None:
    before = run(side("mma", 1.0, precision="tf32"), side("gemm", 2.0))
    after = run(side("mma", 1.5, precision="tf32"), side("gemm", 2.0))
    found = {each.precision: each.verdict for each in compare(before, after).ours}
    assert found == {"tf32": "slower", "f32": "same"}


def test_what_one_result_lacks_is_listed() -> None:
    before = run(side("gemm", 1.0), side("direct", 2.0), side("nchw", 1.0, on="torch-cuda"))
    after = run(side("gemm", 1.0), side("nhwc", 1.0, on="torch-cuda"))
    more = replace(before.results[0], name="b")
    before = replace(before, results=(*before.results, more))
    found = compare(before, after)
    expected = {f"b ({TEXT})", "a: wgpu direct f32", "a: torch-cuda nchw f32"}
    assert set(found.only_before) == expected
    assert found.only_after == ("a: torch-cuda nhwc f32",)
    assert found.lost == ()


def test_a_device_that_fails_now_is_lost_and_one_that_is_absent_is_not() -> None:
    both = run(side("gemm", 1.0), side("gemm", 1.0, on="dawn"))
    failed = run(side("gemm", 1.0), side("gemm", on="dawn", failure="it hangs"))
    assert compare(both, failed).lost == ("a: dawn f32 has no time any more: it hangs",)
    absent = replace(failed, devices=failed.devices[:1])
    assert compare(both, absent).lost == ()


def test_what_else_differs_is_a_warning() -> None:
    before = sample_run()
    device = replace(before.devices[0], driver="999", versions={"wgpu": "0.33.0"})
    peer = replace(before.peers[0], versions={"torch": "3.0"})
    after = replace(
        before,
        devices=(device, before.devices[1]),
        peers=(peer, *before.peers[1:]),
        machine={**before.machine, "processor": "arm64", "python": "3.14"},
    )
    found = compare(before, after).warnings
    assert len(found) == 4
    for text in ("processor", "driver of wgpu differs: 580.159.04 before, 999 after"):
        assert any(text in warning for warning in found)
    assert any("versions of torch-cuda" in warning for warning in found)


def test_results_without_a_common_problem_or_side_are_refused() -> None:
    with pytest.raises(BenchError, match="share no problem: one has a, the other b"):
        compare(run(side("gemm", 1.0)), run(side("gemm", 1.0), name="b"))
    with pytest.raises(BenchError, match="no side was timed in both"):
        compare(run(side("gemm", 1.0)), run(side("direct", 1.0)))


# ---- the command ----


def test_the_command_says_what_became_slower_and_fails_on_request(saved: Any) -> None:
    a, b = saved("a.json", sample_run()), saved("b.json", sample_run(scale=1.1))
    done = invoke(a, b)
    assert done.exit_code == 0, done.output
    assert "geometric mean +10.0 %" in done.stdout
    assert "56 slower, 0 faster, 0 the same" in done.stdout
    done = invoke(a, b, "--fail-over", 1.05)
    assert done.exit_code == 1
    assert "error: 56 of 56 took more than 1.05 times as long" in done.stderr
    assert invoke(a, b, "--fail-over", 1.2).exit_code == 0
    assert invoke(b, a, "--fail-over", 1.0).exit_code == 0


def test_the_command_shows_all_sides_on_request(saved: Any) -> None:
    a, b = saved("a.json", sample_run()), saved("b.json", sample_run())
    assert "onnxruntime" not in invoke(a, b).stdout
    assert "onnxruntime" in invoke(a, b, "--all").stdout


def test_json_is_clean_and_has_the_same_status(saved: Any) -> None:
    a, b = saved("a.json", sample_run()), saved("b.json", sample_run(scale=1.1))
    done = invoke(a, b, "--fail-over", 1.05, "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert len(found["over"]) == len(found["ours"]) == 56
    assert found["geometric_mean"] == pytest.approx(1.1)
    assert found["worst"]["verdict"] == "slower"


def test_a_gate_without_anything_of_ours_is_not_green(saved: Any) -> None:
    peer = side("nchw", 1.0, on="torch-cuda")
    a, b = saved("a.json", run(side("gemm", 1.0), peer)), saved("b.json", run(peer, devices=()))
    assert invoke(a, b).exit_code == 0
    done = invoke(a, b, "--fail-over", 1.05)
    assert done.exit_code == 1
    assert "nothing of ours is in both results" in done.stderr


def test_a_gate_fails_where_a_device_has_nothing_any_more(saved: Any) -> None:
    a = saved("a.json", run(side("gemm", 1.0), side("gemm", 1.0, on="dawn")))
    b = saved("b.json", run(side("gemm", 1.0), side("gemm", on="dawn", failure="it hangs")))
    done = invoke(a, b, "--fail-over", 1.05)
    assert done.exit_code == 1
    assert "it hangs" in done.stderr


def test_a_limit_below_one_is_refused(saved: Any) -> None:
    a = saved("a.json", sample_run())
    assert invoke(a, a, "--fail-over", 0.9).exit_code == 2


# ---- files ----


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "there is no result file"),
        ("not json", "since it is no JSON; --out writes one"),
        ("[]", "its format is 'list', expected 'wgpuconv-bench/"),
        ('{"format": "wgpuconv-bench/1"}', "its format is 'wgpuconv-bench/1', expected"),
    ],
)
def test_what_is_no_result_is_refused_in_a_sentence(
    tmp_path: Path, text: str | None, expected: str
) -> None:
    path = tmp_path / "result.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(BenchError, match=re.escape(expected)) as raised:
        load(path)
    assert str(path) in str(raised.value)


def test_a_result_survives_its_file(saved: Any) -> None:
    assert load(saved("a.json", sample_run())) == sample_run()
