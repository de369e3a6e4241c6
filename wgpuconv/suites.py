"""Suites of problems: the convolutions of known networks, one a line, in bench/problems.

A line is a problem's text, with an optional name before it and a count behind it::

    layer1.0.conv2: conv2d f32 n1 c64 h56 w56 k64 r3 s3 stride1 pad1 bias act:relu x3

A name holds no white space; ``#`` begins a comment. A file of one's own has the same form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .errors import DtypeError, ProblemError
from .problem import DTYPES, LAYOUTS, ConvProblem

_HERE = Path(__file__).parent
_LINE = re.compile(r"(?:(?P<name>[^\s#]+):\s+)?(?P<text>.+?)(?:\s+x(?P<count>\d+))?")


@dataclass(frozen=True)
class Entry:
    """A problem of a suite."""

    name: str
    """The layer's name, or an empty string."""
    problem: ConvProblem
    count: int = 1
    """How often the network has it."""

    @property
    def label(self) -> str:
        return self.name or str(self.problem)


def suites_dir() -> Path:
    """The folder of suites: inside an installed package, or beside it in a checkout."""
    inside = _HERE / "bench_problems"
    return inside if inside.is_dir() else _HERE.parent / "bench" / "problems"


def suite_names() -> list[str]:
    """The suites that ``load_suite`` finds by name."""
    return sorted(path.stem for path in suites_dir().glob("*.txt"))


def load_suite(name: str) -> list[Entry]:
    """The problems of a suite by its name, or of a file of that form by its path."""
    path = suites_dir() / f"{name}.txt"
    if name not in suite_names():
        path = Path(name)
        if not path.is_file():
            raise ProblemError(
                f"no suite or file is named {name!r}; the suites are {', '.join(suite_names())}"
            )
    if path.suffix == ".onnx":
        raise ProblemError(f"{name} is a model, not a list of problems; give it as --onnx {name}")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ProblemError(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ProblemError(f"{name} is no list of problems, a text with one a line") from error
    return parse_suite(text, name)


def parse_suite(text: str, source: str) -> list[Entry]:
    """The problems of a suite's text; ``source`` names it in errors."""
    entries = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].strip()
        if line:
            try:
                entries.append(parse_entry(line))
            except ProblemError as error:
                raise ProblemError(f"{source}, line {number}: {error}") from error
    if not entries:
        raise ProblemError(f"{source} holds no problem")
    return entries


def parse_entry(line: str) -> Entry:
    """One line of a suite, without its comment."""
    match = _LINE.fullmatch(line)
    if match is None:
        raise ProblemError(f"a problem's text is expected, got {line!r}; {IN_QUOTES}")
    count = int(match["count"] or 1)
    if count < 1:
        raise ProblemError(f"a count must be at least 1, got x{count}")
    return Entry(match["name"] or "", ConvProblem.parse(match["text"]), count)


IN_QUOTES = "put a problem's text in quotes, as in 'conv2d f32 n1 c3 h32 w32 k8 r3 s3 stride1 pad1'"


def gather(words: Sequence[str]) -> list[Entry]:
    """The problems that a command line names: suites, files, and problem texts among them."""
    if len(words) > 1 and any(word in ("conv2d", "conv_transpose2d") for word in words):
        raise ProblemError(IN_QUOTES)
    entries: list[Entry] = []
    for word in words:
        if re.search(r"\bconv(_transpose)?2d\s", word):
            entries.append(parse_entry(word.strip()))
        else:
            entries += load_suite(word)
    return entries


def varied(
    entry: Entry, *, batch: int | None = None, dtype: str | None = None, layout: str | None = None
) -> Entry:
    """The same layer with another batch, dtype or layout.

    The layout is 'nchw', 'nhwc', or 'channels_last': PyTorch's, whose weights have it too.
    The dtype is 'f32', 'f16', 'bf16' or 'tf32': float32 that may be multiplied as TF32.
    """
    p = entry.problem
    last = layout == "channels_last"
    if layout is not None and not last and layout.upper() not in LAYOUTS:
        raise ProblemError(f"the layout must be 'nchw', 'nhwc' or 'channels_last', got {layout!r}")
    if dtype is not None and dtype not in (*DTYPES, "tf32"):
        raise DtypeError(f"dtype must be {', '.join(DTYPES)} or tf32, got {dtype!r}")
    if dtype is not None:
        tf32 = dtype == "tf32"
        p = replace(p, dtype="f32" if tf32 else dtype, precision="tf32" if tf32 else "default")
    changed = replace(
        p,
        n=p.n if batch is None else batch,
        layout="NHWC" if last else (layout or p.layout).upper(),
        weight_last=last if layout else p.weight_last,
    )
    # Through the text, so that everything is checked as for a problem that was typed.
    return replace(entry, problem=ConvProblem.parse(str(changed)))
