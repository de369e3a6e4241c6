"""``wgpuconv demo``: real convolutions on this machine's best device, to look at."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from .. import demo
from ..bench.ours import OurDevice
from ..bench.session import Session
from ..errors import ProblemError
from ..images import is_image, pillow
from .bench import heading, refusals_table, results_table
from .options import DeviceOption, JsonOption, TuneOption, open_device
from .output import Work, check_folder, emit_json, note, out, show

EXAMPLES = ("wgpuconv demo",)


def command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the picture goes.")] = Path(
        "wgpuconv-demo.png"
    ),
    device: DeviceOption = None,
    tune: TuneOption = None,
    as_json: JsonOption = False,
) -> None:
    """Filter a photograph, compare the algorithms, and explain the tuner's choice."""
    begin = time.perf_counter()
    # Before any work: pillow may be missing, and the picture may have nowhere to go.
    pillow()
    check_folder(output)
    if not is_image(output):
        raise ProblemError(f"the picture must be an image file, got {str(output)!r}")
    on = open_device(device, tune, quiet=as_json)
    entries = demo.problems(software=on.facts.software)
    with Work(demo.PANELS + len(entries)) as work, Session([OurDevice(on)]) as session:
        on.tuner.progress = work.stage
        panels = []
        for panel in demo.filter_photograph(on):
            work.tell("photograph", panel.title)
            panels.append(panel)
            work.advance()
        demo.draw_sheet(panels, on.name).save(output)
        for _ in session.measure(entries, work.tell):
            work.advance()
    found = session.run()
    if as_json:
        emit_json({"picture": str(output), **found.to_json()})
        return
    out.print(f"[bold]wgpuconv[/bold] on {on.name}", soft_wrap=True)
    out.print(f"[bold]picture[/bold]  {output.resolve()}", soft_wrap=True)
    note(f"A photograph and {len(panels) - 1} filters of it, each a chain of convolutions.")
    out.print()
    for result in found.results:
        out.print(heading(result))
        show(results_table(result, found))
        if result.choice:
            out.print(demo.why(result))
        if result.refusals:
            show(refusals_table(result))
        out.print()
    note(
        "us: device time of one run. error: largest difference from float64 over the largest "
        f"output. *: what the tuner takes. All in {time.perf_counter() - begin:.0f} s."
    )
    out.print(
        f"Now a picture of your own: {program()} run PHOTO.jpg sharpen out.png",
        soft_wrap=True,
    )


def program() -> str:
    """What runs this command again in the user's shell, whose PATH may not have it."""
    if shutil.which("wgpuconv"):
        return "wgpuconv"
    script = Path(sys.argv[0])
    if script.name == "__main__.py":
        return f"{_as_typed(Path(sys.executable))} -m wgpuconv"
    return _as_typed(script)


def _as_typed(program: Path) -> str:
    path, here = program.absolute(), Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
