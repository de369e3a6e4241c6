"""Pictures of a result for papers and READMEs: PNG and SVG, drawn by matplotlib (extra `bench`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import BenchError, MissingExtraError
from . import summary
from .result import Run, Side

COLOURS = (
    "#0b62c4", "#c2570c", "#12805c", "#8b3fb8", "#8a6d00", "#c01f6b", "#3d7f95", "#6b6f76"
)  # fmt: skip
"""By device or peer in the order of the groups, as on the page."""
MARKS = "osD^v"
FILLED = {"f32": 1.0, "tf32": 0.0}
"""Opacity by precision; half for the others."""

STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dde1e5",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "wgpuconv",  # the same file from the same result
}


def draw(run: Run, folder: Path) -> list[Path]:
    """Writes bars of the time ratios (times where there is no baseline), the roofline and error
    against time into an existing folder, of each dtype's problems; returns what it wrote.

    Raises MissingExtraError without matplotlib and BenchError where nothing was timed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            f"drawing pictures needs matplotlib ({error}); "
            "install it with: pip install 'wgpuconv[bench]'"
        ) from error
    groups = summary.groups(run)
    if not groups:
        raise BenchError("the result holds no timed side, so there is nothing to draw")
    written: list[Path] = []
    with matplotlib.rc_context(STYLE):
        for dtype in dict.fromkeys(group.dtype for group in groups):
            here = [group for group in groups if group.dtype == dtype]
            for name, paint in (("bars", _bars), ("roofline", _roofline), ("error", _error)):
                figure = Figure(layout="constrained")
                if paint(figure, run, here):
                    for suffix in ("png", "svg"):
                        path = folder / f"{name}-{dtype}.{suffix}"
                        date = {"Date": None} if suffix == "svg" else None
                        figure.savefig(path, dpi=160, metadata=date)
                        written.append(path)
    return written


class _Look:
    """How each group is painted, alike in all pictures."""

    def __init__(self, run: Run) -> None:
        self._places = list(dict.fromkeys(group.on for group in summary.groups(run)))

    def colour(self, on: str) -> str:
        return COLOURS[self._places.index(on) % len(COLOURS)]

    def face(self, group: summary.Group) -> tuple[str, float]:
        return self.colour(group.on), FILLED.get(group.precision, 0.5)

    def mark(self, group: summary.Group) -> str:
        return MARKS[self._places.index(group.on) % len(MARKS)]


def _bars(figure: Any, run: Run, groups: Sequence[summary.Group]) -> bool:
    look = _Look(run)
    results = [r for r in run.results if any(group.best(r) for group in groups)]
    dtype = groups[0].dtype
    relative = any(summary.baseline_of(run, result) for result in results)
    drawn = [g for g in groups if not (relative and (g.on, g.precision) == (run.baseline, dtype))]
    if not drawn:
        return False
    figure.set_size_inches(max(5.0, 0.16 * len(results) * (len(drawn) + 1.5) + 1), 3.4)
    axes = figure.subplots()
    width = 1 / (len(drawn) + 1.5)
    for index, group in enumerate(drawn):
        at, heights = [], []
        for place, result in enumerate(results):
            height = _value(group.best(result), summary.baseline_of(run, result), relative)
            if height is not None:
                at.append(place + (index - (len(drawn) - 1) / 2) * width)
                heights.append(height - 1 if relative else height)
        axes.bar(
            at,
            heights,
            width * 0.9,
            bottom=1 if relative else 0,
            label=group.name,
            facecolor=look.face(group),
            edgecolor=look.colour(group.on),
            linewidth=0.7,
        )
    axes.set_yscale("log")
    axes.set_xticks(range(len(results)), [result.label for result in results])
    if max(len(result.label) for result in results) > 5:
        axes.tick_params(axis="x", labelrotation=90)
    axes.grid(visible=False, axis="x")
    axes.margins(x=0.01)
    if relative:
        axes.axhline(1, color="#5c646c", linewidth=0.9)
        axes.set_ylabel(f"time over {run.baseline} {dtype}")
        _plain(axes.yaxis)
    else:
        axes.set_ylabel("µs")
    figure.legend(loc="outside upper center", ncols=min(4, len(drawn)))
    return True


def _roofline(figure: Any, run: Run, groups: Sequence[summary.Group]) -> bool:
    look = _Look(run)
    figure.set_size_inches(5.0, 4.0)
    axes = figure.subplots()
    drawn = False
    reach: list[float] = []
    for group in groups:
        points = [
            (at, result.flop / side.seconds / 1e12)
            for result in run.results
            if (side := group.best(result)) and side.seconds and (at := summary.intensity(result))
        ]
        if points:
            drawn = True
            reach += [x for x, _ in points]
            _scatter(axes, points, group, look)
    if not drawn:
        return False
    ons = {group.on for group in groups}
    low, high = min(reach) / 1.5, max(reach) * 1.5
    for device in run.devices:
        roof = summary.roof_of(device)
        if device.name in ons and roof is not None:
            bandwidth, rate = roof
            xs = sorted({low, min(max(rate / bandwidth, low), high), high})
            ys = [min(rate, x * bandwidth) / 1e12 for x in xs]
            axes.plot(xs, ys, color=look.colour(device.name), linewidth=1.2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations a byte")
    axes.set_ylabel("TFLOP/s")
    _plain(axes.xaxis)
    _plain(axes.yaxis)
    figure.legend(loc="outside upper center", ncols=3)
    return True


def _error(figure: Any, run: Run, groups: Sequence[summary.Group]) -> bool:
    look = _Look(run)
    figure.set_size_inches(5.0, 4.0)
    axes = figure.subplots()
    relative = run.baseline is not None
    drawn = False
    for group in groups:
        points = []
        for result in run.results:
            side = group.best(result)
            x = _value(side, summary.baseline_of(run, result), relative)
            if side is not None and side.error and x is not None:
                points.append((x, side.error))
        if points:
            drawn = True
            _scatter(axes, points, group, look)
    if not drawn:
        return False
    axes.set_xscale("log")
    axes.set_yscale("log")
    if relative:
        axes.axvline(1, color="#5c646c", linewidth=0.9)
        axes.set_xlabel(f"time over {run.baseline} {groups[0].dtype}")
        _plain(axes.xaxis)
    else:
        axes.set_xlabel("µs")
    axes.set_ylabel("largest error over the largest output")
    figure.legend(loc="outside upper center", ncols=3)
    return True


def _value(side: Side | None, baseline: Side | None, relative: bool) -> float | None:
    """The time ratio, or microseconds; None where there is none."""
    if side is None or side.seconds is None:
        return None
    return summary.ratio(side, baseline) if relative else side.seconds * 1e6


def _scatter(
    axes: Any, points: Sequence[tuple[float, float]], group: summary.Group, look: _Look
) -> None:
    axes.scatter(
        [x for x, _ in points],
        [y for _, y in points],
        s=22,
        marker=look.mark(group),
        label=group.name,
        facecolor=look.face(group),
        edgecolor=look.colour(group.on),
        linewidth=0.8,
    )


def _plain(axis: Any) -> None:
    """Numbers on a log scale as 0.3, 1, 3 instead of powers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
