"""The typer application: its commands, and how errors and warnings leave it."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import WgpuConvError
from . import algorithms, bench, cache, demo, devices, explain, run, tune
from .options import GRAMMAR
from .output import complain, examples, warn

ENV_DEBUG = "WGPUCONV_DEBUG"


class _Group(TyperGroup):
    """Turns our own errors into one sentence and exit status 1, for every command."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except (WgpuConvError, OSError, MemoryError) as error:
            if isinstance(error, OSError) and error.filename is None:  # a closed pipe, say
                raise
            if ctx.params.get("debug"):
                raise
            complain(_sentence(error))
            raise typer.Exit(1) from error


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, WgpuConvError):
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError) and not isinstance(error, WgpuConvError):
        return f"this machine has no memory left: {error}; use a smaller batch"
    return " ".join(str(error).split())


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    warn(str(message))


app = typer.Typer(
    cls=_Group,
    name="wgpuconv",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("wgpuconv demo"),
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"wgpuconv {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", envvar=ENV_DEBUG, hidden=True)] = False,
) -> None:
    """GPU convolutions: what runs here, how fast, and why."""


for _module in (devices, algorithms, demo, run, explain, tune):
    _name = _module.__name__.rpartition(".")[2]
    _before = GRAMMAR if _module in (explain, tune) else ""
    app.command(_name, epilog=examples(*_module.EXAMPLES, before=_before))(_module.command)
app.add_typer(bench.app, name="bench")
app.add_typer(cache.app, name="cache", epilog=examples(*cache.EXAMPLES))


def main() -> None:
    """The console script."""
    # Mesa's EGL complains on stderr where this is not set; see backends/provider.py.
    os.environ.setdefault("XDG_RUNTIME_DIR", "/tmp")
    sys.exit(app())
