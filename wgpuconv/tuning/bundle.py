"""Portable bundles: tuning results as JSON, to ship with an application."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..errors import StoreError
from .store import Entry, Speeds, Store, brief, entry_of, speeds_of

FORMAT = "wgpuconv-tuning"
VERSION = 2
_REMEDY = "write it with 'wgpuconv cache export' or wgpuconv.export_bundle"

T = TypeVar("T")


class Bundle(NamedTuple):
    """What a file holds: results, and the speeds of the devices that they were measured on."""

    entries: list[Entry]
    speeds: list[Speeds]


def write_bundle(store: Store, path: str | os.PathLike[str]) -> int:
    """Writes all entries and speeds of a store; returns how many entries. Raises StoreError."""
    entries = sorted(store.entries(), key=lambda entry: entry.key)
    data = {
        "format": FORMAT,
        "version": VERSION,
        "devices": [speeds.to_json() for speeds in store.all_speeds()],
        "entries": [entry.to_json() for entry in entries],
    }
    try:
        Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write the bundle {path}: {error.strerror}") from error
    return len(entries)


def read_bundle(path: str | os.PathLike[str]) -> Bundle:
    """What a bundle holds. Raises StoreError where the file is no bundle."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise StoreError(f"cannot read the bundle {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        where = ""
        if isinstance(error, json.JSONDecodeError):
            where = f" from line {error.lineno}, column {error.colno} on"
        raise StoreError(f"{path} is no tuning bundle: it is no JSON{where}; {_REMEDY}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise StoreError(f'{path} is no tuning bundle: it lacks "format": "{FORMAT}"; {_REMEDY}')
    if data.get("version") != VERSION:
        raise StoreError(
            f"{path} is a tuning bundle of version {brief(data.get('version'))}, "
            f"this wgpuconv reads version {VERSION}; {_REMEDY}"
        )
    entries = _list(data, "entries", entry_of, path)
    return Bundle(entries, _list(data, "devices", speeds_of, path))


def _list(
    data: dict[str, Any],
    name: str,
    parse: Callable[[Any], T],
    path: str | os.PathLike[str],
) -> list[T]:
    if not isinstance(data.get(name), list):
        raise StoreError(f"{path} is a broken tuning bundle: it has no list of {name}; {_REMEDY}")
    found = []
    for number, item in enumerate(data[name]):
        try:
            found.append(parse(item))
        except ValueError as error:
            raise StoreError(
                f"{path} is a broken tuning bundle, in {name}[{number}]: {error}; {_REMEDY}"
            ) from error
    return found


def merge(store: Store, bundle: Bundle) -> int:
    """Puts the entries that beat what the store has; returns how many did.

    Of speeds the store keeps its own: its entries' candidates follow from them.
    """
    store.put_speeds(*(s for s in bundle.speeds if store.speeds(s.key) is None))
    better = []
    for entry in bundle.entries:
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
