"""``wgpuconv bench``: every algorithm's time on a suite of problems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from .. import bench
from ..suites import gather, suite_names, varied
from .options import DeviceOption, JsonOption, TuneOption, open_device
from .output import (
    Work,
    check_folder,
    complain,
    emit_json,
    micro,
    note,
    out,
    show,
    significant,
    size,
    table,
)

EXAMPLES = (
    "wgpuconv bench mobilenet_v2 --limit 2 --out mobilenet.json",
    "wgpuconv bench 'conv2d f32 n1 c8 h16 w16 k8 r3 s3 stride1 pad1'",
)


def command(
    problems: Annotated[
        list[str],
        typer.Argument(
            help=f"Suites ({', '.join(suite_names())}), files of that form, "
            "texts of problems in quotes.",
            show_default=False,
        ),
    ],
    algorithms: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Only these, with commas between.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Instead of the suite's.")] = None,
    dtype: Annotated[str | None, typer.Option(help="f32 or f16, instead of the suite's.")] = None,
    layout: Annotated[str | None, typer.Option(help="nchw or nhwc.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many.")] = None,
    out_file: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write all samples and the machine as JSON."),
    ] = None,
    device: DeviceOption = None,
    tune: TuneOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time every algorithm on a device, each with its best configuration.

    Each result is checked against float64 on samples. Times are device time, in microseconds;
    'error' is relative to the largest output.
    """
    entries = gather(problems)[:limit]
    entries = [varied(entry, batch=batch, dtype=dtype, layout=layout) for entry in entries]
    on = open_device(device, tune)
    names = tuple(name.strip() for name in algorithms.split(",")) if algorithms else ()
    check_folder(out_file)
    results: list[bench.Result] = []
    try:
        with Work(len(entries)) as work:
            on.tuner.progress = work.stage
            for result in bench.run(entries, on, algorithms=names, tell=work.tell):
                results.append(result)
                if not as_json:
                    with work.aside():
                        _print(result)
                work.advance()
    finally:  # what was measured is kept, however it ends
        found = bench.report(results, on)
        if out_file is not None:
            out_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if as_json:
        emit_json(found)
    else:
        _summary(results, on.name)
        if out_file is not None:
            note(f"All samples are in {out_file}.")
    if any(result.failed for result in results):
        complain("a problem or an algorithm failed; the reason stands with it")
        raise typer.Exit(1)


def _print(result: bench.Result) -> None:
    out.print(heading(result))
    if result.failure is not None:
        out.print(Text(result.failure, style="red"))
    else:
        show(results_table(result))
    out.print()


def heading(result: bench.Result) -> Text:
    """The layer's name, and the problem's text on a line of its own."""
    entry = result.entry
    text = Text()
    if entry.name:
        text.append(entry.name, style="bold")
        text.append(f"  x{entry.count}\n" if entry.count > 1 else "\n", style="dim")
    return text.append(str(entry.problem), style="cyan")


def results_table(result: bench.Result) -> Table:
    """All algorithms on one problem; the tuner's choice has a star."""
    flop = 2 * result.entry.problem.multiply_adds
    best = result.fastest.seconds if result.fastest is not None else None
    unit, name = (1e12, "TFLOP/s") if best and flop / best >= 1e11 else (1e9, "GFLOP/s")
    numbers = ("us", name, "vs best", "error", "scratch")
    failed = any(m.failure for m in result.measurements)
    shown = table("", "algorithm", *numbers, *([""] if failed else []), right=numbers)
    for m in result.measurements:
        timed = ("-", "-", "-")
        if m.seconds and best:
            timed = (
                micro(m.seconds),
                significant(flop / m.seconds / unit),
                f"{m.seconds / best:.2f}",
            )
        shown.add_row(
            Text("*" if m.label == result.choice else "", style="green"),
            Text(m.algorithm, style="bold" if m is result.fastest else ""),
            *timed,
            "-" if m.error is None else f"{m.error:.0e}",
            size(m.scratch),
            *([Text(m.failure or "", style="red")] if failed else []),
        )
    return shown


def refusals_table(result: bench.Result) -> Table:
    """The algorithms that do not apply, and why."""
    shown = Table.grid(padding=(0, 1))
    for name, why in result.refusals.items():
        shown.add_row("  ", Text(name, style="dim"), Text(why, style="dim"))
    return shown


def _summary(results: list[bench.Result], device: str) -> None:
    times = [r.fastest.seconds for r in results if r.fastest is not None]
    geomean = bench.geometric_mean(seconds for seconds in times if seconds is not None)
    out.print(f"{device}, geometric mean of the fastest: {micro(geomean)} us")
    ratios = [result.ratio for result in results if result.ratio is not None]
    if ratios:
        out.print(
            f"The tuner's choice (*) is the fastest in {ratios.count(1.0)} of {len(ratios)}, and "
            f"takes {bench.geometric_mean(ratios):.2f} of its time in geometric mean."
        )
