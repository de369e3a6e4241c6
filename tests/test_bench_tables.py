"""What ``wgpuconv bench`` prints of a result, with one that an H200 could give."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench_sample import sample_run
from rich.console import Console
from rich.table import Table

from wgpuconv.bench import summary
from wgpuconv.bench.result import PeerFacts, Run
from wgpuconv.bench.runner import MEASURES, USUAL_MEASURES
from wgpuconv.cli import bench, output

RUN = sample_run()


def lines(table: Table) -> list[str]:
    console = Console(width=160, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(table)
    return [line.strip() for line in captured.get().splitlines()]


def row(run: Run, problem: str, side: str, number: int = 0) -> list[str]:
    """The cells of a side, from its name on."""
    result = [r for r in run.results if r.name == problem][number]
    (found,) = (
        line
        for line in lines(bench.results_table(result, run, MEASURES, width=160))
        if line.removeprefix("*").strip().startswith(f"{side}  ")
    )
    return found.removeprefix("*").strip().removeprefix(side).split()


def test_a_row_says_what_was_measured() -> None:
    us, rate, ratio, error, *rest = row(RUN, "c9", "wgpu implicit_gemm")
    assert float(us) == pytest.approx(78.8, rel=0.02)
    flop = 2 * 16 * 54 * 54 * 64 * 64 * 9
    assert float(rate.replace(",", "")) == pytest.approx(flop / 78.8e-6 / 1e9, rel=0.02)
    assert float(ratio) == pytest.approx(78.8 / 130, rel=0.02)
    assert error.endswith("e-07")
    assert rest[:2] == ["9.0", "KiB"]
    # Bound by arithmetic: 43.7 of 58.4 TFLOP/s.
    assert rest[2] == f"{float(rate.replace(',', '')) / 58.4e3:.0%}"


def test_a_narrow_terminal_gets_fewer_columns_and_whole_names() -> None:
    result = next(r for r in RUN.results if r.name == "c9")
    heads = {
        width: lines(bench.results_table(result, RUN, USUAL_MEASURES, width=width))[0].split()[1:]
        for width in (160, 80, 40)
    }
    assert {"us", "error", "scratch", "roof", "call", "numpy"} <= set(heads[160])
    assert "us" in heads[80]
    assert "error" in heads[80]
    assert not {"scratch", "roof"} & set(heads[80])
    assert not {"error", "call", "numpy"} & set(heads[40])
    assert "GFLOP/s" in heads[40]


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_the_tables_of_a_run_have_the_same_columns(width: int) -> None:
    large, plain = RUN.results[0], RUN.results[9]
    # Faster and slower than usual, of unknown memory and error, without calls and the baseline.
    odd = replace(
        plain,
        sides=tuple(
            replace(side, samples=samples, workspace=None, error=None, call=None, end_to_end=None)
            for side, samples in zip(plain.sides, [(1e-7,), (123.0,), ()], strict=False)
            if side.on != RUN.baseline
        ),
    )
    heads = {
        " ".join(lines(bench.results_table(each, RUN, USUAL_MEASURES, width))[0].split())
        for each in (large, plain, odd)
    }
    assert len(heads) == 1
    assert "/ torch-cuda" in heads.pop()


def test_what_is_not_measured_has_no_column() -> None:
    alone = replace(
        RUN, devices=tuple(replace(d, bandwidth=None, fma_rate=None) for d in RUN.devices)
    )
    head = lines(bench.results_table(RUN.results[0], alone, ("kernel",), 160))[0].split()
    assert head == ["side", "us", "GFLOP/s", "/", "torch-cuda", "error", "scratch"]


def test_a_peer_on_the_same_card_has_its_share_of_the_roof() -> None:
    c13 = row(RUN, "c13", "torch-cuda nchw")
    share = float(c13[-4].rstrip("%"))  # before call, numpy and first
    moved = 16 * (96 + 64) * 224 * 224 * 4 + 64 * 97 * 4
    assert share == pytest.approx(max(9.87e9 / 58.4e12, moved / 3.98e12) / 466e-6 * 100, abs=1.5)
    elsewhere = replace(RUN, peers=(PeerFacts("torch-cuda", {}, "NVIDIA A100"), *RUN.peers[1:]))
    assert row(elsewhere, "c13", "torch-cuda nchw")[-4] == "-"


def test_precision_is_said_once_and_stars_mark_each_choice() -> None:
    result = RUN.results[0]
    text = lines(bench.results_table(result, RUN))
    assert sum("torch-cuda channels_last, tf32" in line for line in text) == 1
    assert sorted(line.split()[1] for line in text if line.startswith("*")) == ["dawn", "wgpu"]
    assert any("needs a buffer of 1.0 GiB" in line for line in text)
    assert "/ torch-cuda" in text[0]


def test_without_a_baseline_the_best_is_the_reference() -> None:
    alone = replace(RUN, baseline=None)
    text = lines(bench.results_table(alone.results[0], alone))
    assert "/ best" in text[0]
    assert row(alone, "c9", "wgpu implicit_gemm")[2] == "1.00"


def test_the_verdict_names_the_fastest_and_ours() -> None:
    by_name = {result.name: result for result in RUN.results if " f32 " in result.problem}
    assert bench._verdict(by_name["c9"], RUN) == "Fastest: wgpu implicit_gemm."
    c5 = bench._verdict(by_name["c5"], RUN)
    assert c5.startswith("Fastest: torch-cuda nchw; of ours wgpu implicit_gemm, 1.0")
    twin = replace(by_name["c9"].chosen("wgpu"), on="dawn")  # type: ignore[type-var]
    tied = replace(by_name["c9"], sides=(*by_name["c9"].sides, twin))
    assert "a tie of wgpu implicit_gemm, dawn implicit_gemm" in bench._verdict(tied, RUN)


def test_a_tie_has_all_that_is_faster_than_its_slowest() -> None:
    result = next(r for r in RUN.results if r.name == "c9" and " f32 " in r.problem)
    side = replace(result.chosen("wgpu"), samples=(1.0, 1.0, 1.0))  # type: ignore[type-var]
    between = replace(side, on="b", samples=(1.1, 1.1, 1.1))  # steady, so told from the first
    wide = replace(side, on="c", samples=(1.0, 1.2, 1.2))
    apart = replace(side, on="d", samples=(1.3, 1.3, 1.3))
    tied = replace(result, sides=(side, between, wide, apart))
    assert summary.leaders(tied) == (side, between, wide)
    assert summary.leaders(replace(result, sides=(side, between))) == (side,)
    assert summary.leaders(replace(result, sides=())) == ()


def test_the_summary_has_a_line_for_each_device_and_peer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "out", Console(width=140, no_color=True, highlight=False))
    monkeypatch.setattr(bench, "out", output.out)
    bench._summary(RUN)
    text = capsys.readouterr().out
    rows = {line.partition("  ")[0]: line.split() for line in text.splitlines()}
    assert rows["wgpu f32"][2] == "14"
    assert rows["torch-cuda f32"][4:8] == ["-"] * 4  # not against itself
    mean, worst, at, won = rows["wgpu f32"][4:8]
    assert 0.4 < float(mean) < 0.8
    assert (at, won) == ("c5", "13")
    assert float(worst) > 1
    assert "torch-cuda tf32 on f32" in rows
    # In f32 and f16, 'direct' beats the choice on c7 alone.
    assert "wgpu: the tuner's choice (*) is the fastest of its algorithms in 26 of 28" in text
