"""``wgpuconv bench``: everything that computes a convolution here, side by side.

The command without a subcommand measures; ``report`` and ``compare`` read what it wrote.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from ..bench import summary
from ..bench.ours import OurDevice
from ..bench.peer_process import peer_names
from ..bench.result import ProblemResult, Run, Side, geometric_mean
from ..bench.runner import MEASURES, USUAL_MEASURES
from ..bench.session import Session
from ..suites import Entry, varied
from . import bench_report
from .options import GRAMMAR, JsonOption, TuneOption, open_device
from .output import (
    Work,
    check_folder,
    complain,
    emit_json,
    examples,
    hint,
    micro,
    note,
    out,
    show,
    significant,
    stopped,
    table,
    warn,
)
from .output import size as size_text
from .problems import (
    BatchOption,
    LayoutOption,
    LimitOption,
    OnnxOption,
    ProblemsArgument,
    SizeOption,
    chosen,
)

EXAMPLES = (
    "wgpuconv bench mobilenet_v2 --limit 2 --peers none --out result.json",
    "wgpuconv bench 'conv2d f32 n1 c8 h16 w16 k8 r3 s3 stride1 pad1'",
    "wgpuconv bench report result.json -o report.html",
)
_RESULTS = """\
[bold]With results[/bold]: commands of their own, each with --help

report RESULT...            one page of HTML, and pictures
compare BEFORE AFTER        what became faster, what slower"""
_RUN = "run"


class _Group(TyperGroup):
    """Measures where the first word is no subcommand."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = bool(args) and args[0] in self.commands
        for before, word in pairwise(args):
            # An option's value may be called so, as in '--out report'.
            if word in self.commands and not named and (before[0] != "-" or before == "--json"):
                raise typer.BadParameter(f"write it first: wgpuconv bench {word} ...", ctx)
        return super().parse_args(ctx, args if named else [_RUN, *args])


class _Context(typer.Context):
    """Nobody needs to write the subcommand that measures, so the usage lines leave it out."""

    @property
    def command_path(self) -> str:
        return super().command_path.removesuffix(f" {_RUN}")


class _Run(TyperCommand):
    context_class = _Context


app = typer.Typer(
    cls=_Group,
    help="Compare what computes a convolution here, by time and by error.",
    rich_markup_mode="rich",
)


@app.command(
    _RUN,
    cls=_Run,
    hidden=True,
    epilog=examples(*EXAMPLES, before=f"{_RESULTS}\n\n{GRAMMAR}"),
)
def command(
    problems: ProblemsArgument = None,
    onnx: OnnxOption = None,
    algorithms: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Only these of ours, with commas between; auto is what the tuner takes.",
        ),
    ] = None,
    devices: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            "-d",
            metavar="SPEC",
            help="As 'wgpuconv devices' lists it, or a part of its name; may be given repeatedly.",
        ),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"Other libraries: {', '.join(peer_names())}; or all, or none. "
            "Without it, those that are installed.",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The peer or device that ratios refer to; torch-cuda if present."
        ),
    ] = None,
    batch: BatchOption = None,
    size: SizeOption = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="f32|f16|bf16|tf32",
            help="Or several, with commas between; instead of the suite's.",
        ),
    ] = None,
    layout: LayoutOption = None,
    limit: LimitOption = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Samples of each side; 7, or 3 on a software driver."
        ),
    ] = None,
    measure: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT",
            help=f"{', '.join(MEASURES)}; all but the last where none is named.",
        ),
    ] = None,
    out_file: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write all samples and the machine as JSON."),
    ] = None,
    tune: TuneOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time all that computes a convolution here: our algorithms and other libraries.

    Outputs are checked against float64 on samples, then all sides of a problem
    are timed in turns. A star marks the tuner's choice. In microseconds: 'us' is
    device time, 'call' a call from Python, 'numpy' from array to array. 'error'
    is relative to the largest output, 'roof' the share of the most that the
    device could do by a direct method in f32.
    """
    found = chosen(
        problems,
        onnx,
        batch=batch,
        size=size,
        dtype=None,
        layout=layout,
        limit=limit,
        quiet=as_json,
    )
    entries = [varied(entry, dtype=each) for each in _words(dtype) or (None,) for entry in found]
    measures = _words(measure) or USUAL_MEASURES
    asked = peer_names() if peers in (None, "all") else [] if peers == "none" else _words(peers)
    check_folder(out_file)
    specs: Sequence[str | None] = devices or [None]
    ours = [
        OurDevice(open_device(spec, tune, quiet=as_json), spec=spec, algorithms=_words(algorithms))
        for spec in specs
    ]
    with Work(len(entries)) as work:

        def ready(step: str) -> None:
            work.tell(entries[0].label, step)

        session = Session(
            ours, asked, baseline=baseline, rounds=rounds, measures=measures, tell=ready
        )
        interrupted = False
        with session:
            try:
                _measure(session, entries, work, quiet=as_json, absent=peers is not None)
            except KeyboardInterrupt:
                interrupted = True
            finally:  # what was measured is kept, however it ends
                run = session.run()
                if out_file is not None and run.results:
                    run.save(out_file)
    if interrupted:
        stopped(_interruption(len(run.results), len(entries), out_file))
        raise typer.Exit(INTERRUPTED)
    if as_json:
        emit_json(run.to_json())
    else:
        _summary(run)
        if out_file is not None:
            note(f"All samples are in {out_file}.")
    if any(result.failed for result in run.results):
        complain("a problem or an algorithm failed; the reason stands with it")
        raise typer.Exit(1)


app.command("report", epilog=examples(*bench_report.REPORT_EXAMPLES))(bench_report.report_command)
app.command("compare", epilog=examples(*bench_report.COMPARE_EXAMPLES))(
    bench_report.compare_command
)


INTERRUPTED = 130
"""The exit status that shells give to what Ctrl-C ended."""


def _interruption(done: int, total: int, file: Path | None) -> str:
    if not done:
        before = "interrupted before the first problem was complete"
        if file is None:
            return before
        return f"{before}; {file} is as it was" if file.exists() else f"{before}; no file was made"
    return f"interrupted: {done} of {total} problems are {f'in {file}' if file else 'complete'}"


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, (w.strip() for w in (text or "").split(",")))))


def _measure(
    session: Session, entries: Sequence[Entry], work: Work, *, quiet: bool, absent: bool
) -> None:
    for peer in session.peers:
        if peer.absent is not None and absent:
            hint(f"{peer.name} does not take part: {peer.absent}")
    session.measure_rooflines(lambda step: work.tell(entries[0].label, step))
    for text in session.warnings:
        warn(text)
    for each in session.devices:
        each.device.tuner.progress = work.stage
    for result in session.measure(entries, work.tell):
        if not quiet:
            with work.aside():
                _print(result, session.run(), session.measures)
        work.advance()


def _print(result: ProblemResult, run: Run, measures: Sequence[str]) -> None:
    out.print(heading(result))
    if result.failure is not None:
        out.print(Text(result.failure, style="red"))
    else:
        show(results_table(result, run, measures))
        verdict = _verdict(result, run)
        if verdict:
            note(verdict)
    whole = {device.name for device in run.devices} | {peer.name for peer in run.peers}
    for name, reason in result.refusals.items():
        if name in whole or ":" in name or result.failure is not None:
            note(f"{name}: {reason}")
    out.print()


def heading(result: ProblemResult) -> Text:
    """The layer's name, and the problem's text on a line of its own."""
    text = Text()
    if result.name:
        text.append(result.name, style="bold")
        text.append(f"  x{result.count}\n" if result.count > 1 else "\n", style="dim")
    return text.append(result.problem, style="cyan")


def results_table(
    result: ProblemResult,
    run: Run,
    measures: Sequence[str] = ("kernel",),
    width: int | None = None,
) -> Table:
    """All sides on one problem; the tuner's choice has a star. ``width`` is the terminal's.

    What columns there are follows from who takes part and from the measures that are taken, so
    that the tables of a run are alike.
    """
    first = summary.leaders(result)[:1]
    reference = first[0] if first else None
    against = "/ best"
    if run.baseline:
        reference, against = summary.baseline_of(run, result), f"/ {run.baseline}"
    sides = result.sides
    ratios = [summary.ratio(side, reference) for side in sides]
    columns = {
        "us": [micro(side.seconds) for side in sides],
        "GFLOP/s": [
            "-" if side.seconds is None else significant(result.flop / side.seconds / 1e9)
            for side in sides
        ],
        against: ["-" if ratio is None else significant(ratio) for ratio in ratios],
        "error": ["-" if side.error is None else f"{side.error:.0e}" for side in sides],
        "scratch": ["-" if side.workspace is None else size_text(side.workspace) for side in sides],
    }
    if any(device.bandwidth or device.fma_rate for device in run.devices):
        columns["roof"] = [_percent(_share(side, result, run)) for side in sides]
    if "call" in measures:
        columns["call"] = [micro(side.call) for side in sides]
    if "end-to-end" in measures:
        columns["numpy"] = [micro(side.end_to_end) for side in sides]
    if "first" in measures:
        columns["first s"] = [
            "-" if side.first_call is None else significant(side.first_call) for side in sides
        ]
    several = len(run.devices) + sum(peer.absent is None for peer in run.peers) > 1
    columns = _fitting(columns, (width or out.width) - (LONG if several else SHORT))
    dtype = summary.dtype_of(result)
    shown = table("", "side", *columns, right=tuple(columns))
    for row, side in enumerate(sides):
        other = side.prepared or not (side.same_work and summary.lossless(side, dtype))
        style = "bold" if side in first else "dim" if other else ""
        title = Text(_title(side, dtype, several), style=style)
        if side.failure:
            title.append(f"\n{side.failure}", style="red")
        shown.add_row(
            Text("*" if side is result.chosen(side.on) else "", style="green"),
            title,
            *(cells[row] for cells in columns.values()),
        )
    return shown


LONG, SHORT = 30, 15
"""Characters that a side's name has on its line, with and without its device or peer."""
_ROOM = {"us": 7, "scratch": 8, "call": 7, "numpy": 7}
"""Characters that cells may need, 9.99 million us or 1023 KiB, however short their column's title
is."""
SPARED = ("scratch", "roof", "numpy", "call", "error")
"""Columns that fall away, in this order, where a terminal is too narrow; files have them all."""


def _fitting(columns: dict[str, list[str]], room: int) -> dict[str, list[str]]:
    """The columns that fit into so many characters, whatever their cells hold."""
    kept = dict(columns)
    for spared in SPARED:
        if 3 + sum(2 + max(len(name), _ROOM.get(name, 0)) for name in kept) > room:
            kept.pop(spared, None)
    return kept


def _title(side: Side, dtype: str, several: bool) -> str:
    """A side's name; its precision where that is not the problem's and does not stand there."""
    text = side.name if several else side.what
    lossy = side.precision != dtype and side.precision not in side.what
    return f"{text}, {side.precision}" if lossy else text


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _share(side: Side, result: ProblemResult, run: Run) -> float | None:
    """Of the most that the side's device could do by a direct method in f32; above 1 for what
    multiplies less (Winograd) or at a higher rate (f16). None where the device was not probed."""
    peers = {peer.name: peer.device for peer in run.peers}
    for device in run.devices:
        name = peers.get(side.on, "")
        if side.on == device.name or (name and device.adapter.startswith(name)):
            most = summary.attainable(device, result)
            if most and side.seconds:
                return result.flop / side.seconds / most
    return None


def _verdict(result: ProblemResult, run: Run) -> str:
    """Which is the fastest without loss of precision, of all and of ours; no winner where the
    samples do not tell."""
    first = summary.leaders(result)
    if len(result.sides) < 2 or not first:
        return ""
    text = f"Fastest: {_names(first)}"
    ours = tuple(side for side in result.sides if side.ours)
    best = summary.leaders(replace(result, sides=ours))
    if best and not first[0].ours:
        ratio = summary.ratio(best[0], first[0])
        text += f"; of ours {_names(best)}, {significant(ratio or 0)} times as long"
    return f"{text}."


def _names(sides: Sequence[Side]) -> str:
    """One, or all that the samples do not tell apart."""
    names = [side.name for side in sides]
    return names[0] if len(names) == 1 else f"a tie of {', '.join(names)}"


def refusals_table(result: ProblemResult) -> Table:
    """The sides that do not apply, and why; of one device alone without its name."""
    device = next(iter(result.choice)) if len(result.choice) == 1 else ""
    shown = Table.grid(padding=(0, 1))
    for name, why in result.refusals.items():
        algorithm = name.removeprefix(f"{device} ")
        shown.add_row("  ", Text(algorithm, style="dim"), Text(why, style="dim"))
    return shown


def _summary(run: Run) -> None:
    """Of each device and peer in each precision, over all problems."""
    groups = summary.groups(run)
    if not groups:
        return
    named = all(result.name for result in run.results)
    against = [f"/ {run.baseline}", "worst", *(["at"] if named else []), "won"]
    against = against if run.baseline else []
    numbers = ("geomean us", *(title for title in against if title != "at"), "total us")
    shown = table("of all", "problems", "geomean us", *against, "total us", right=numbers)
    for group in groups:
        sides = [side for r in run.results if (side := group.best(r)) is not None]
        total = summary.total(group, run)
        cells = [str(len(sides)), micro(geometric_mean(s.seconds or math.nan for s in sides))]
        if run.baseline:
            found = summary.standing(group, run)
            own = group.on == run.baseline and group.precision == group.dtype
            cells += (
                [
                    significant(found.mean),
                    significant(found.worst),
                    *([found.worst_at] if named else []),
                    f"{found.wins} of {found.problems}",
                ]
                if found.problems and not own
                else ["-"] * len(against)
            )
        of = f" on {group.dtype}" if group.precision != group.dtype else ""
        shown.add_row(Text(f"{group.name}{of}"), *cells, micro(total))
    show(shown)
    for sentence in _choices(run):
        show(Text(sentence))
    if any(result.count > 1 for result in run.results):
        note("The total counts each layer as often as the network has it.")
    if run.peers and all(peer.absent for peer in run.peers):
        note("No other library took part; --peers all says what to install.")
    note("us: device time of one run. --help explains the rest; a wider terminal shows it all.")


def _choices(run: Run) -> Iterator[str]:
    """How well each tuner chooses."""
    for device in run.devices:
        ratios = []
        for result in run.results:
            best = summary.fastest([side for side in result.sides if side.on == device.name])
            ratio = summary.ratio(side, best) if (side := result.chosen(device.name)) else None
            if ratio is not None:
                ratios.append(ratio)
        if len(ratios) > 1:
            yield (
                f"{device.name}: the tuner's choice (*) is the fastest of its algorithms in "
                f"{ratios.count(1.0)} of {len(ratios)} and takes {geometric_mean(ratios):.2f} of "
                "its time in geometric mean."
            )
