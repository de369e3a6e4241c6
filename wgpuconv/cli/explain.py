"""``wgpuconv explain``: what was weighed for one problem, and why one candidate won."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ..errors import ProblemError
from ..explain import Basis, Explanation, Row
from ..plan import Config
from ..suites import IN_QUOTES, Entry, parse_entry, suite_names
from .options import AlgorithmOption, DeviceOption, JsonOption, TuneOption, open_device
from .output import Work, config_text, emit_json, micro, note, plain, show, size, speed, table

EXAMPLES = ("wgpuconv explain 'conv2d f32 n1 c64 h56 w56 k64 r3 s3 stride1 pad1'",)
_SOURCES = {
    "model": "by the cost model",
    "tuned": "measured now",
    "stored": "measured before",
    "similar": "measured before for a similar size",
}


def command(
    problem: Annotated[
        list[str], typer.Argument(metavar="PROBLEM", help="One problem's text, in quotes.")
    ],
    algorithm: AlgorithmOption = "auto",
    everything: Annotated[
        bool, typer.Option("--all", help="Every candidate, not the best of each algorithm.")
    ] = False,
    device: DeviceOption = None,
    tune: TuneOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show each algorithm's best candidates (--all: every one), what they cost, and the choice.

    Candidates that were measured come first, then those that the cost model only guessed.
    'us' is the measured time of one run, 'guess us' what the model says.
    """
    entry = _entry(problem)
    on = open_device(device, tune, quiet=as_json)
    with Work(1) as work:
        work.tell(entry.label)
        on.tuner.progress = work.stage
        found = on.explain(entry.problem, algorithm=algorithm, everything=everything)
    if as_json:
        emit_json(found.to_json())
        return
    for part in parts(found):
        show(part)
    if not everything:
        note("--all lists every candidate")


def _entry(words: Sequence[str]) -> Entry:
    if len(words) > 1:  # taken at all only so that this can be said
        raise ProblemError(f"explain takes one problem; {IN_QUOTES}")
    (text,) = words
    if text in suite_names() or os.path.isfile(text):
        raise ProblemError(
            f"explain takes one problem's text, got the suite {text!r}; tune and bench take suites"
        )
    return parse_entry(text)


def parts(found: Explanation) -> Iterator[Table | Text]:
    """What is shown of an explanation, from top to bottom."""
    yield Text(found.problem, style="cyan")
    yield Text(f"on {found.device}\n")
    yield choice_text(found).append("\n")
    yield candidates_table(found)
    if found.refusals:
        refused = table("does not apply", "because it")
        for name, why in found.refusals.items():
            refused.add_row(name, why)
        yield Text()
        yield refused
    yield Text()
    for remark in (basis_text(found.basis), *found.notes):
        yield Text(remark, style="dim")


def text(found: Explanation) -> str:
    """The same without colours, as wide as the terminal."""
    return plain(*parts(found))


def choice_text(found: Explanation) -> Text:
    """The choice and how it was found, in a sentence."""
    chosen = found.choice
    text = Text("chosen ", style="")
    text.append(chosen.algorithm, style="bold green")
    text.append(f", {_SOURCES.get(chosen.source, chosen.source)}")
    if chosen.seconds is not None:
        text.append(f": {micro(chosen.seconds)} us")
    if chosen.config:
        text.append(f"\n{config_text(chosen.config)}", style="dim")
    return text


def basis_text(known: Basis) -> str:
    """What the guesses come from, in a line."""
    measured = [f"measured {known.date}" if name in known.measured else "guessed"
                for name in ("bandwidth", "flops")]  # fmt: skip
    return (
        f"guesses reckon with {speed(known.bandwidth, 'B/s')} ({measured[0]}), "
        f"{speed(known.flops, 'FLOP/s')} ({measured[1]}) and {known.cores} cores"
    )


def candidates_table(found: Explanation) -> Table:
    shown = table(
        "", "algorithm", "configuration", "us", "guess us", "scratch", "passes",
        right=("us", "guess us", "scratch", "passes"),
    )  # fmt: skip
    for row in found.rows:
        chosen = row.label == found.choice.label
        configuration = Text(_distinct(row, found.rows))
        if row.failure:
            configuration.append(f"\n{row.failure}", style="red")
        shown.add_row(
            Text("*" if chosen else "", style="green"),
            Text(row.algorithm, style="bold" if chosen else ""),
            configuration,
            micro(row.seconds),
            micro(row.cost),
            "-" if row.scratch is None else size(row.scratch),
            "-" if row.dispatches is None else str(row.dispatches),
        )
    return shown


def _distinct(row: Row, rows: Sequence[Row]) -> str:
    """What tells a configuration from the others of its algorithm."""
    configs = [other.config for other in rows if other.algorithm == row.algorithm]
    if len(configs) == 1:
        return config_text(row.config)
    differing: Config = {
        name: value
        for name, value in row.config.items()
        if any(config.get(name) != value for config in configs)
    }
    return config_text(differing)
