"""What all commands share of how results look: tables, progress, JSON, numbers."""

from __future__ import annotations

import errno
import io
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TimeElapsedColumn,
)
from rich.segment import Segment, Segments
from rich.table import Column, Table
from rich.text import Text

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def complain(sentence: str) -> None:
    """An error, on stderr."""
    _remark(f"error: {sentence}", "bold red")


def warn(sentence: str) -> None:
    _remark(f"warning: {sentence}", "yellow")


def stopped(sentence: str) -> None:
    """How far a command came that the user ended."""
    _remark(sentence, "bold")


def hint(sentence: str) -> None:
    """What to know about a result that stands on stdout, or is about to."""
    _remark(f"note: {sentence}", "dim")


def _remark(sentence: str, style: str) -> None:
    """On stderr: wrapped at words on a terminal, else one line however long it is."""
    err.print(Text(" ".join(sentence.split()), style=style), soft_wrap=not err.is_terminal)


def line(sentence: str) -> None:
    """On stdout: wrapped at words on a terminal, else one line however long it is."""
    out.print(Text(sentence), soft_wrap=not out.is_terminal)


def note(sentence: str) -> None:
    """A remark below a table, wrapped at words."""
    show(Text(sentence, style="dim"))


def emit_json(value: Any) -> None:
    """The one thing on stdout where a program asked with ``--json``."""
    typer.echo(json.dumps(value, indent=2, default=str))


def examples(*commands: str, before: str = "") -> str:
    """The epilog of a command's help, ``before`` standing above; tests run what stands here."""
    title = "[bold]Example[/bold]" + ("s" if len(commands) > 1 else "")
    return "\n\n".join(filter(None, [before, title, *commands]))


def table(*columns: str, title: str | None = None, right: tuple[str, ...] = ()) -> Table:
    """An empty table; the columns named in ``right`` hold numbers."""
    made = Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
    )
    for column in columns:
        if column in right:
            made.add_column(column, justify="right", no_wrap=True)
        else:
            made.add_column(column, overflow="fold")
    return made


def show(made: Table | Text, console: Console | None = None) -> None:
    """Prints, on stdout or elsewhere, without the spaces that rich leaves behind a line."""
    console = console or out
    segments: list[Segment] = []
    for line in console.render_lines(made, pad=False):
        while line and not line[-1].text.rstrip():
            line.pop()
        if line:
            line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
        segments += [*line, Segment.line()]
    console.print(Segments(segments), end="", soft_wrap=True)


def plain(*made: Table | Text) -> str:
    """What :func:`show` prints of these, one below the other, without colours."""
    file = io.StringIO()
    console = Console(file=file, width=out.width, color_system=None, force_jupyter=False)
    for each in made:
        show(each, console)
    return file.getvalue().rstrip()


def check_folder(path: Path | None) -> None:
    """Refuses a file in a folder that is not there, before any work is done for it."""
    if path is not None and not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


@contextmanager
def busy(what: str, quiet: bool = False) -> Iterator[None]:
    """Says on a terminal's stderr what is done before there is any progress to show.

    ``quiet`` is for ``--json``.
    """
    if quiet or not err.is_terminal:
        yield
    else:
        with err.status(Text(what)):
            yield


PATIENCE = 1.0
"""Seconds after which a command says on a stderr that is no terminal what it does."""


class _Lines:
    """Progress where stderr is no terminal: a line for each thing that is begun.

    Nothing is said within the first second, so that short commands stay silent.
    """

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._line = ""
        self._talks = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(PATIENCE, self._begin)
        self._timer.daemon = True

    def start(self) -> None:
        self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()
        self._timer.join()

    def tell(self, what: str) -> None:
        line = f"[{self._done + 1}/{self._total}] {what}"
        with self._lock:
            if line != self._line:
                self._line = line
                self._print()

    def advance(self) -> None:
        self._done += 1

    def _begin(self) -> None:
        with self._lock:
            self._talks = True
            self._print()

    def _print(self) -> None:
        if self._talks and self._line:
            err.print(Text(self._line), soft_wrap=True)


BAR = 37
"""Characters that the bar, the count and the time take of a line."""
SHORTEST = 8
"""Characters that are left of what is done where a terminal is narrow."""


class _What(ProgressColumn):
    """What is done now: the column that gives way where a terminal is narrow."""

    def __init__(self) -> None:
        super().__init__(Column())

    def render(self, task: Task) -> Text:
        return Text(task.description, no_wrap=True, overflow="ellipsis")


class Work:
    """Progress on stderr: a bar, gone when done, or lines where stderr is no terminal.

    A context manager.
    """

    def __init__(self, total: int) -> None:
        self._lines = None if err.is_terminal else _Lines(total)
        self._bar = Progress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _What(),
            console=err,
            transient=True,
            disable=not err.is_terminal,
        )
        self._task = self._bar.add_task("", total=total)
        self._what = ""

    def __enter__(self) -> Work:
        self._bar.start()
        if self._lines is not None:
            self._lines.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self._lines is not None:
            self._lines.stop()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Takes the bar away while something is printed on stdout."""
        self._bar.stop()
        yield
        self._bar.start()

    def tell(self, what: str, step: str = "") -> None:
        """What is about to happen; lines leave out the step."""
        self._what = what
        if self._lines is not None:
            self._lines.tell(what)
        self._describe(step)

    def stage(self, stage: str, done: int, total: int) -> None:
        """How far the tuner is with it; see tuner.Progress."""
        self._describe(f"{stage} {done}/{total}")

    def _describe(self, step: str) -> None:
        """A problem's text may be as long as the terminal is wide, so that the step is kept."""
        room = max(err.width - BAR - len(f": {step}"), SHORTEST)
        what = self._what if len(self._what) <= room else f"{self._what[: room - 1]}…"
        self._bar.update(self._task, description=f"{what}: {step}" if step else self._what)

    def advance(self) -> None:
        self._bar.advance(self._task)
        if self._lines is not None:
            self._lines.advance()


def micro(seconds: float | None) -> str:
    """Microseconds, with three significant digits."""
    return "-" if seconds is None else significant(seconds * 1e6)


def significant(value: float) -> str:
    """Three significant digits without an exponent: 0.123, 12.3, 12,300."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{2 if abs(value) >= 1 else 3}f}" if abs(value) < 10 else f"{value:.1f}"


def speed(rate: float, unit: str) -> str:
    """A rate with a decimal prefix: 81.3 GB/s, 62.0 TFLOP/s."""
    prefix, scale = next(
        (p, s) for p, s in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("", 0.0)) if rate >= s
    )
    return f"{significant(rate / (scale or 1))} {prefix}{unit}"


def size(nbytes: int) -> str:
    """Bytes in binary units: 0, 512 B, 1.5 MiB."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    if not nbytes:
        return "0"
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def config_text(config: Mapping[str, Any]) -> str:
    """``tile_m=64 tile_p=128``, or a dash for none."""
    return " ".join(f"{name}={value}" for name, value in config.items()) or "-"
