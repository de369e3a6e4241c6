"""``wgpuconv cache``: what tuning has learned, and how to carry it elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import StoreError, counted
from ..tuning.bundle import merge, read_bundle, write_bundle
from ..tuning.store import Store, default_path
from .options import JsonOption
from .output import emit_json, examples, note, out, show, size, table

EXAMPLES = ("wgpuconv cache info",)
_EMPTY = "nothing was measured yet; run 'wgpuconv tune' (with --full on a software driver)"
app = typer.Typer(
    no_args_is_help=True, help="Look at, clear, export and import what tuning has learned."
)


@app.command(epilog=examples("wgpuconv cache info"))
def info(as_json: JsonOption = False) -> None:
    """Show how many problems are known for which device."""
    path = default_path()
    entries = Store(path).entries()
    nbytes = path.stat().st_size if path.exists() else 0
    groups: dict[tuple[str, str, str, str], int] = {}
    for entry in entries:
        key = (entry.key.backend, entry.key.adapter, entry.key.driver, entry.key.versions)
        groups[key] = groups.get(key, 0) + 1
    if as_json:
        names = ("backend", "adapter", "driver", "versions")
        devices = [
            dict(zip(names, key, strict=True)) | {"problems": count}
            for key, count in groups.items()
        ]
        emit_json({"path": str(path), "bytes": nbytes, "devices": devices})
        return
    size_text = size(nbytes) if nbytes else "0 B"
    out.print(f"{path}: {_problems(len(entries))}, {size_text}", soft_wrap=True)
    if not groups:
        note(_EMPTY)
    else:
        shown = table("backend", "device", "driver", "versions", "problems", right=("problems",))
        for key, count in groups.items():
            shown.add_row(*key, str(count))
        show(shown)


@app.command(epilog=examples("wgpuconv cache path"))
def path() -> None:
    """Print the file's path."""
    typer.echo(default_path())


@app.command(epilog=examples("wgpuconv cache clear --yes"))
def clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Forget everything that was measured."""
    store = Store(default_path())
    count = len(store.entries())
    if not yes:
        typer.confirm(f"Forget {_problems(count)} in {default_path()}?", abort=True)
    store.clear()
    out.print(f"forgot {_problems(count)}")


@app.command("export", epilog=examples("wgpuconv cache export tuning.json"))
def export_(file: Annotated[Path, typer.Argument(help="Where the bundle goes.")]) -> None:
    """Write everything as a JSON bundle, to ship with an application."""
    store = Store(default_path())
    if not store.entries():
        raise StoreError(_EMPTY)
    count = write_bundle(store, file)
    out.print(f"{file}: {_problems(count)}", soft_wrap=True)


@app.command("import", epilog=examples("wgpuconv cache import tuning.json"))
def import_(file: Annotated[Path, typer.Argument(help="A bundle that 'export' wrote.")]) -> None:
    """Add what a JSON bundle holds."""
    bundle = read_bundle(file)
    count, total = merge(Store(default_path()), bundle), len(bundle.entries)
    text = f"{count} of {_problems(total)} new or better"
    if count < total:
        text += f", {total - count} already known"
    out.print(f"{file}: {text}", soft_wrap=True)


def _problems(count: int) -> str:
    return counted(count, "problem")
