"""Portable bundles: tuning results as JSON, to ship with an application."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..errors import StoreError
from .store import Entry, Store, entry_of

FORMAT = "wgpuconv-tuning"
VERSION = 1


def write_bundle(store: Store, path: str | os.PathLike[str]) -> int:
    """Writes all entries of a store; returns how many. Raises StoreError."""
    entries = sorted(store.entries(), key=lambda entry: entry.key)
    data = {
        "format": FORMAT,
        "version": VERSION,
        "entries": [entry.to_json() for entry in entries],
    }
    try:
        Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write the bundle {path}: {error}") from error
    return len(entries)


def read_bundle(path: str | os.PathLike[str]) -> list[Entry]:
    """The entries of a bundle. Raises StoreError where the file is no bundle."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise StoreError(f"cannot read the bundle {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is no tuning bundle, since it is no JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise StoreError(
            f'{path} is no tuning bundle: it lacks "format": "{FORMAT}"; '
            "make one with export_bundle"
        )
    if data.get("version") != VERSION:
        raise StoreError(
            f"{path} is a tuning bundle of version {data.get('version')!r}, "
            f"this wgpuconv reads version {VERSION}; export it again"
        )
    entries = data.get("entries")
    if not isinstance(entries, list):
        raise StoreError(f"{path} is a broken tuning bundle: it has no list of entries")
    found = []
    for number, entry in enumerate(entries):
        try:
            found.append(entry_of(entry))
        except ValueError as error:
            raise StoreError(f"{path}: entry {number} is broken: {error}") from error
    return found


def merge(store: Store, entries: list[Entry]) -> int:
    """Puts the entries that beat what the store has; returns how many did."""
    better = []
    for entry in entries:
        known = store.get(entry.key)
        if known is None or _beats(entry, known):
            better.append(entry)
    store.put(*better)
    return len(better)


def _beats(entry: Entry, known: Entry) -> bool:
    """Of results for the same kernels the faster one, else the newer one."""
    if entry.sources == known.sources and entry.seconds != known.seconds:
        return (entry.seconds or 1e9) < (known.seconds or 1e9)
    return entry.date > known.date
