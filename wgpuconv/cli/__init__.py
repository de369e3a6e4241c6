"""The command line, ``wgpuconv``: one file a command. Only this package imports typer and rich."""

from __future__ import annotations

from .app import app, main

__all__ = ["app", "main"]
