"""``wgpuconv tune``: measure now what would be measured at the first call."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

from ..errors import ProblemError
from ..plan import Config
from ..tuning.store import Store, default_path
from .options import DeviceOption, JsonOption, Tune, open_device
from .output import Work, config_text, emit_json, hint, micro, note, out, show, table
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
    "wgpuconv tune mobilenet_v2 --limit 3 --batch 2",
    "wgpuconv tune --onnx model.onnx --batch 8 --size 32,32",
    "wgpuconv tune --full 'conv2d f32 n1 c8 h16 w16 k8 r3 s3 stride1 pad1'",
)


class Measuring(str, Enum):
    """The modes of the tuner that measure."""

    auto = "auto"
    full = "full"


def command(
    problems: ProblemsArgument = None,
    onnx: OnnxOption = None,
    full: Annotated[bool, typer.Option("--full", help="The same as --tune full.")] = False,
    tune: Annotated[
        Measuring | None,
        typer.Option(
            help="auto, the default: measure a few candidates of a problem; full: all of them."
        ),
    ] = None,
    batch: BatchOption = None,
    size: SizeOption = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="f32|f16|bf16|tf32", help="Instead of the suite's.")
    ] = None,
    layout: LayoutOption = None,
    limit: LimitOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest kernel for each problem and store it for later runs.

    With --onnx, for each convolution of a model, so that its first run has nothing to measure.
    A software driver is only measured with --full.
    """
    if full and tune is Measuring.auto:
        raise ProblemError("--full and --tune auto exclude each other; give one of them")
    entries = chosen(
        problems,
        onnx,
        batch=batch,
        size=size,
        dtype=dtype,
        layout=layout,
        limit=limit,
        quiet=as_json,
    )
    everything = full or tune is Measuring.full
    Store(default_path()).require_writable()
    on = open_device(device, Tune.full if everything else Tune.auto, quiet=as_json)
    by_model_only = on.facts.software and not everything
    if by_model_only:
        hint(
            "a software driver is not measured, the cost model chooses what is not stored; "
            "--full measures it"
        )
    found: list[dict[str, Any]] = []
    with Work(len(entries)) as work:
        on.tuner.progress = work.stage
        for entry in entries:
            work.tell(entry.label)
            choice = on.prewarm(entry.problem)
            found.append(
                {
                    "name": entry.name,
                    "problem": str(entry.problem),
                    "algorithm": choice.plan.algorithm,
                    "config": choice.plan.config,
                    "source": choice.source,
                    "seconds": choice.seconds,
                    "measured": len(choice.timings),
                    "failures": dict(choice.failures),
                    "note": choice.note,
                }
            )
            work.advance()
    if as_json:
        emit_json(found)
        return
    timed = any(row["seconds"] for row in found)
    columns = ("problem", "winner", "configuration", "found", *(("us", "of") if timed else ()))
    shown = table(*columns, right=("us", "of"))
    for row in found:
        cells = [
            row["name"] or row["problem"],
            f"[bold]{row['algorithm']}[/bold]",
            f"[dim]{config_text(_main_part(row['config']))}[/dim]",
            row["source"],
        ]
        if timed:
            cells += [micro(row["seconds"]), str(row["measured"]) if row["measured"] else "-"]
        shown.add_row(*cells)
    show(shown)
    reasons = () if by_model_only else (row["note"] for row in found if row["source"] == "model")
    for reason in dict.fromkeys(reasons):
        note(f"By the cost model alone where it says 'model': {reason}.")
    stored = sum(row["source"] in ("tuned", "stored") for row in found)
    out.print(f"Of {len(found)}, {stored} stored, {len(found) - stored} guessed.")


def _main_part(config: Config) -> Config:
    """What shapes the work; 'explain' and --json have the rest."""
    details = ("order", "last_barrier", "unroll", "tm", "tp")
    return {
        name: value
        for name, value in config.items()
        if name not in details and (name, value) != ("splits", 1)
    }
