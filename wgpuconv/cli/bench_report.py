"""``wgpuconv bench report`` and ``wgpuconv bench compare``: what reads the bench's results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ..bench.compare import Comparison, Difference, by_change, compare, percent
from ..bench.report import page
from ..bench.result import load
from ..errors import BenchError
from .options import JsonOption
from .output import (
    busy,
    check_folder,
    complain,
    emit_json,
    line,
    micro,
    note,
    out,
    show,
    table,
    warn,
)

REPORT_EXAMPLES = (
    "wgpuconv bench report result.json -o report.html",
    "wgpuconv bench report before.json after.json --plots pictures",
)
COMPARE_EXAMPLES = ("wgpuconv bench compare before.json after.json --fail-over 1.05",)

_VERDICTS = {"slower": "red", "faster": "green", "same": "dim"}


def report_command(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULT...", help="Files that 'bench --out' wrote.", show_default=False
        ),
    ],
    page_file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The page; report.html where nothing else is asked for.",
            show_default=False,
        ),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write the pictures of the last result, PNG and SVG."),
    ] = None,
) -> None:
    """Show results as one self-contained page of HTML.

    Of several results, the later ones are compared with the first.
    """
    if page_file is None and plots is None:
        page_file = Path("report.html")
    if page_file is not None and page_file.suffix.lower() not in (".html", ".htm"):
        raise BenchError(f"a page's name ends in .html, got {page_file}; --plots makes pictures")
    check_folder(page_file)
    check_folder(plots)
    runs = [(path.name, load(path)) for path in results]
    if page_file is not None:
        page_file.write_text(page(runs), encoding="utf-8")
        note(f"The page is in {page_file}.")
    if plots is not None:
        with busy("drawing ..."):
            from ..bench.plots import draw  # imports matplotlib

            plots.mkdir(exist_ok=True)
            written = draw(runs[-1][1], plots)
        note(f"Pictures are in {plots}: {', '.join(path.name for path in written)}.")


def compare_command(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="A result.", show_default=False)],
    after: Annotated[
        Path, typer.Argument(metavar="AFTER", help="A later one.", show_default=False)
    ],
    fail_over: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            metavar="RATIO",
            help="Exit with status 1 where what a device of ours offers on a problem takes more "
            "than this many times as long, or is gone. 1.05 allows 5 %.",
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Show every side, not only what changed of ours.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare two results: what became faster, what slower.

    A change inside the spread of the samples, or below 2 %, counts as none.
    """
    found = compare(load(before), load(after))
    over = () if fail_over is None else found.over(fail_over)
    if as_json:
        emit_json(
            {"before": str(before), "after": str(after), "fail_over": fail_over}
            | found.to_json()
            | {"over": [each.to_json() for each in over]}
        )
    else:
        _print(found, every)
    if fail_over is None:
        return
    if over:
        worst = over[0]
        complain(
            f"{len(over)} of {len(found.ours)} took more than {fail_over:g} times as long, "
            f"at worst {worst.problem} on {worst.on}: {worst.ratio:.3f}"
        )
    if found.lost:
        complain("; ".join(found.lost))
    if not found.ours and not found.lost:
        complain("nothing of ours is in both results, so nothing was compared with the limit")
    if over or found.lost or not found.ours:
        raise typer.Exit(1)


def _print(found: Comparison, every: bool) -> None:
    for warning in found.warnings:
        warn(warning)
    shown = list(found.sides) if every else [d for d in found.ours if d.verdict != "same"]
    if shown:
        _table(by_change(shown))
    if every:
        for title, names in (("before", found.only_before), ("after", found.only_after)):
            for name in names:
                note(f"only {title}: {name}")
    elif found.only_before or found.only_after:
        note(
            f"Only before: {len(found.only_before)}, only after: {len(found.only_after)} problems "
            "and sides; --all lists them."
        )
    worst = found.worst
    if worst is None:
        out.print("Nothing of ours is in both results.")
        return
    counts = [sum(d.verdict == v for d in found.ours) for v in ("slower", "faster", "same")]
    line(
        f"Ours on {len(found.ours)}: geometric mean {percent(found.mean)}, "
        f"worst {percent(worst.ratio)} ({worst.problem} on {worst.on}); "
        "{} slower, {} faster, {} the same within the noise.".format(*counts)
    )


def _table(differences: list[Difference]) -> None:
    numbers = ("before us", "after us", "change")
    shown = table("problem", "side", *numbers, "", right=numbers)
    for each in differences:
        shown.add_row(
            each.problem,
            each.side,
            micro(each.before),
            micro(each.after),
            percent(each.ratio),
            Text(each.verdict, style=_VERDICTS[each.verdict]),
        )
    show(shown)
