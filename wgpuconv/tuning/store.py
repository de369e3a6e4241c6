"""The store: what was measured, in one SQLite file, kept by names.

Entries say which kernel a problem is best computed with, speeds how fast a device is.

It is a cache. Whatever happens to the file (killed writers, garbage, another program's
database, a read-only folder, a full disk), a caller sees at most one TuningWarning, and the
store goes on in memory. A stored choice is a hint: whoever uses one checks that it still fits.

Each operation opens and closes its own connection. It takes a fraction of a millisecond, it is
needed once a problem and process, and so nothing has to be shared between threads or survive
a fork.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import reprlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..errors import StoreError, TuningWarning
from ..plan import Config, candidate_label
from ..problem import ConvProblem

if TYPE_CHECKING:
    import sqlite3

ENV_CACHE_DIR = "WGPUCONV_CACHE_DIR"
FILE_NAME = "tuning-2.sqlite3"
"""With the schema's version, so that a newer one leaves an older cache alone and starts afresh."""
IN_MEMORY = ":memory:"
BUSY_SECONDS = 5.0
"""How long to wait for another process's write, which takes milliseconds."""

_APPLICATION_ID = 0x77636F6E  # 'wcon', in the file's header
_SCHEMA_VERSION = 2

T = TypeVar("T")


class Key(NamedTuple):
    """What a measurement holds for."""

    backend: str
    adapter: str
    driver: str
    versions: str
    limits: str
    """A digest of the device's limits, which decide what kernels there are to choose from."""
    scope: str
    """What the caller left to choose: 'auto' or an algorithm, and a workspace limit if given."""
    problem: str
    """The text of a ConvProblem."""

    @property
    def family(self) -> str:
        """The problem without its batch and image size."""
        return str(ConvProblem.parse(self.problem).with_(n=0, h=0, w=0))


@dataclass(frozen=True)
class Trial:
    """One candidate as it was met: timed, or failed and why."""

    algorithm: str
    config: Config
    seconds: float | None = None
    """Median device seconds of one run."""
    best: float | None = None
    """Minimum."""
    failure: str | None = None

    @property
    def label(self) -> str:
        return candidate_label(self.algorithm, self.config)


@dataclass(frozen=True)
class Entry:
    """Everything learned about one problem on one device."""

    key: Key
    algorithm: str
    """The winner, by name and configuration."""
    config: Config
    trials: tuple[Trial, ...]
    sources: Mapping[str, str]
    """Hash of the kernel sources of each algorithm that was in the running, by its name."""
    mode: str
    """'auto' (a few candidates were measured) or 'full' (all)."""
    date: str
    """UTC, ISO 8601."""

    @property
    def seconds(self) -> float | None:
        """The winner's time."""
        winner = candidate_label(self.algorithm, self.config)
        return next((t.seconds for t in self.trials if t.label == winner), None)

    @property
    def ranked(self) -> list[Trial]:
        """The winner, then the others that were timed, fastest first."""
        winner = candidate_label(self.algorithm, self.config)
        timed = [t for t in self.trials if t.failure is None and t.seconds is not None]
        return sorted(timed, key=lambda t: (t.label != winner, t.seconds or 0.0))

    def to_json(self) -> dict[str, Any]:
        """As dicts and lists that ``json.dumps`` takes; :func:`entry_of` reads it back."""
        return {
            **self.key._asdict(),
            "algorithm": self.algorithm,
            "config": dict(self.config),
            "trials": [
                {k: v for k, v in vars(trial).items() if v is not None} for trial in self.trials
            ],
            "sources": dict(self.sources),
            "mode": self.mode,
            "date": self.date,
        }


class DeviceKey(NamedTuple):
    """What measured speeds hold for."""

    backend: str
    adapter: str
    driver: str
    versions: str
    probes: str
    """Hash of the source of the kernels that measured them."""


@dataclass(frozen=True)
class Speeds:
    """What was measured of a device; None where that failed."""

    key: DeviceKey
    bandwidth: float | None
    """Bytes a second of a copy, read plus written."""
    fma_rate: float | None
    """f32 operations a second, a multiply-add counting as two."""
    date: str
    """UTC, ISO 8601."""

    @property
    def complete(self) -> bool:
        return None not in (self.bandwidth, self.fma_rate)

    def to_json(self) -> dict[str, Any]:
        """As a dict that ``json.dumps`` takes; :func:`speeds_of` reads it back."""
        return {
            **self.key._asdict(),
            "bandwidth": self.bandwidth,
            "fma_rate": self.fma_rate,
            "date": self.date,
        }


class Winner(NamedTuple):
    """An entry without its trials, of which there may be hundreds."""

    problem: str
    algorithm: str
    config: Config
    sources: Mapping[str, str]


def entry_of(data: Any) -> Entry:
    """The entry that such JSON holds. Raises ValueError with a reason where it holds none."""
    if not isinstance(data, dict):
        raise ValueError(f"an entry must be an object, got {brief(data)}")
    key = Key(*(_checked(data, name, str) for name in Key._fields))
    _check_problem(key.problem)
    trials = []
    for trial in _checked(data, "trials", list):
        if not isinstance(trial, dict):
            raise ValueError(f"a trial must be an object, got {brief(trial)}")
        trials.append(
            Trial(
                _checked(trial, "algorithm", str),
                _config(trial),
                _seconds(trial, "seconds"),
                _seconds(trial, "best"),
                _checked(trial, "failure", str) if "failure" in trial else None,
            )
        )
    return Entry(
        key,
        _checked(data, "algorithm", str),
        _config(data),
        tuple(trials),
        _sources(data),
        _checked(data, "mode", str),
        _checked(data, "date", str),
    )


def speeds_of(data: Any) -> Speeds:
    """The speeds that such JSON holds. Raises ValueError with a reason where it holds none."""
    if not isinstance(data, dict):
        raise ValueError(f"speeds must be an object, got {brief(data)}")
    key = DeviceKey(*(_checked(data, name, str) for name in DeviceKey._fields))
    bandwidth, fma_rate = _rate(data, "bandwidth"), _rate(data, "fma_rate")
    return Speeds(key, bandwidth, fma_rate, _checked(data, "date", str))


_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxstring, _repr.maxother = 1, 80, 80


def brief(value: Any) -> str:
    """A value of JSON for a message: a few elements of an array or object, which may be large."""
    return _repr.repr(value)


def _checked(data: dict[str, Any], name: str, kind: type[T]) -> T:
    if name not in data:
        raise ValueError(f"{name!r} is missing")
    value = data[name]
    if not isinstance(value, kind):
        raise ValueError(f"{name!r} must be {_JSON_NAMES[kind]}, got {brief(value)}")
    return value


_JSON_NAMES: dict[type, str] = {str: "a string", dict: "an object", list: "an array"}


def _check_problem(text: str) -> None:
    if ConvProblem.parse(text).empty:  # and no other size is near to it
        raise ValueError(f"nothing can have been measured of {brief(text)}, which has no images")


def _config(data: dict[str, Any]) -> Config:
    config = _checked(data, "config", dict)
    if not all(isinstance(value, (int, float, bool, str)) for value in config.values()):
        raise ValueError(f"'config' must hold numbers, booleans and names, got {brief(config)}")
    return config


def _sources(data: dict[str, Any]) -> dict[str, str]:
    sources = _checked(data, "sources", dict)
    if not all(isinstance(hashed, str) for hashed in sources.values()):
        raise ValueError(f"'sources' must map names to hashes, got {brief(sources)}")
    return sources


def _seconds(data: dict[str, Any], name: str) -> float | None:
    if name not in data:
        return None
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise ValueError(f"{name!r} must be seconds, got {brief(value)}")
    return float(value)


def _rate(data: dict[str, Any], name: str) -> float | None:
    value = data.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name!r} must be a rate a second or null, got {brief(value)}")
    return float(value)


def default_path() -> Path:
    """The store's file: in the folder WGPUCONV_CACHE_DIR, or in the user's cache folder."""
    folder = os.environ.get(ENV_CACHE_DIR)
    if not folder:
        import platformdirs

        folder = platformdirs.user_cache_dir("wgpuconv", appauthor=False)
    return Path(folder) / FILE_NAME


class _ForeignError(Exception):
    """The file is a database, but not ours."""


_COLUMNS = (*Key._fields, "family", "algorithm", "config", "trials", "sources", "mode", "date")
_JSON_COLUMNS = ("config", "trials", "sources")
_CREATE = (
    f"CREATE TABLE entries ({', '.join(f'{name} TEXT NOT NULL' for name in _COLUMNS)}, "
    f"PRIMARY KEY ({', '.join(Key._fields)}))"
)
_INSERT = f"INSERT OR REPLACE INTO entries VALUES ({', '.join('?' * len(_COLUMNS))})"
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM entries"
_SPEEDS = (*DeviceKey._fields, "bandwidth", "fma_rate", "date")
_CREATE_SPEEDS = (
    f"CREATE TABLE speeds ({', '.join(f'{name} TEXT NOT NULL' for name in DeviceKey._fields)}, "
    "bandwidth REAL, fma_rate REAL, date TEXT NOT NULL, "
    f"PRIMARY KEY ({', '.join(DeviceKey._fields)}))"
)
_INSERT_SPEEDS = f"INSERT OR REPLACE INTO speeds VALUES ({', '.join('?' * len(_SPEEDS))})"
_SELECT_SPEEDS = f"SELECT {', '.join(_SPEEDS)} FROM speeds"
_DELETE_ALL = (("DELETE FROM entries", ()), ("DELETE FROM speeds", ()))
_FAMILY = (*Key._fields[:-1], "family")


class Store:
    """Entries and speeds by key, in ``path`` (None: memory alone) and in memory.

    Safe from several threads and processes.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None or str(path) == IN_MEMORY else Path(path)
        self._memory: dict[Key, Entry] = {}
        self._speeds: dict[DeviceKey, Speeds] = {}
        self._readable = self._writable = self.path is not None
        self._warned: set[str] = set()

    def get(self, key: Key) -> Entry | None:
        """What is known for exactly this key."""
        if key in self._memory:
            return self._memory[key]
        found = self._query(f"{_SELECT} WHERE {_all_of(Key._fields)}", key, _entry)
        return found[0] if found else None

    def family(self, key: Key) -> list[Winner]:
        """Winners of problems that differ from the key's at most in batch and image size."""
        family = key.family
        query = f"SELECT {', '.join(Winner._fields)} FROM entries WHERE {_all_of(_FAMILY)}"
        found = self._query(query, (*key[:-1], family), _winner)
        by_problem = {winner.problem: winner for winner in found}
        for known, entry in list(self._memory.items()):
            if known[:-1] == key[:-1] and known.family == family:
                winner = Winner(known.problem, entry.algorithm, entry.config, entry.sources)
                by_problem[known.problem] = winner
        return list(by_problem.values())

    def entries(self) -> list[Entry]:
        """All entries, of all devices."""
        by_key = {
            entry.key: entry for entry in self._query(f"{_SELECT} ORDER BY problem", (), _entry)
        }
        return list((by_key | self._memory).values())

    def put(self, *entries: Entry) -> None:
        """Adds entries, or replaces those with the same key."""
        for entry in entries:
            self._memory[entry.key] = entry
        self._insert(_INSERT, [_row(entry) for entry in entries])

    def speeds(self, key: DeviceKey) -> Speeds | None:
        """What was measured of exactly this device."""
        if key in self._speeds:
            return self._speeds[key]
        query = f"{_SELECT_SPEEDS} WHERE {_all_of(DeviceKey._fields)}"
        found = self._query(query, key, _speeds)
        return found[0] if found else None

    def all_speeds(self) -> list[Speeds]:
        """What was measured of any device."""
        found = self._query(f"{_SELECT_SPEEDS} ORDER BY adapter, date", (), _speeds)
        return list(({speeds.key: speeds for speeds in found} | self._speeds).values())

    def put_speeds(self, *measured: Speeds) -> None:
        """Adds speeds, or replaces those with the same key."""
        for speeds in measured:
            self._speeds[speeds.key] = speeds
        self._insert(_INSERT_SPEEDS, [tuple(speeds.to_json().values()) for speeds in measured])

    def clear(self) -> int:
        """Forgets everything; returns how many entries there were."""
        count = len(self.entries())
        self._memory.clear()
        self._speeds.clear()
        if self._writable:
            self._guarded(lambda: _exists(self.path) and self._write(_DELETE_ALL))
        return count

    def require_writable(self) -> None:
        """Raises StoreError where nothing would outlast the process; asked before long work."""
        import sqlite3

        if self.path is None:
            return
        try:
            # Beginning alone succeeds on a file that cannot be written.
            self._write([(f"PRAGMA user_version = {_SCHEMA_VERSION}", ())])
        except (_ForeignError, sqlite3.Error, OSError) as error:
            if not _is_corrupt(error):  # else it is moved aside when there is something to store
                reason = getattr(error, "strerror", None) or error
                raise StoreError(
                    f"nothing can be stored in the folder {self.path.parent} "
                    f"({self.path.name}: {reason}); name another one in {ENV_CACHE_DIR}"
                ) from error

    # ---- the file ----

    def _insert(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        if self._writable and rows:
            written = self._guarded(lambda: self._write([(statement, row) for row in rows]))
            self._writable = written is not None

    def _query(
        self, query: str, values: tuple[str, ...], parse: Callable[[tuple[Any, ...]], T]
    ) -> list[T]:
        if not self._readable:
            return []
        rows = self._guarded(lambda: self._read(query, values))
        if rows is None:
            self._readable = False
        parsed = []
        for row in rows or []:
            try:
                parsed.append(parse(row))
            except ValueError as error:
                self._warn("entry", f"has an entry that cannot be read ({error}); it is ignored")
        return parsed

    def _read(self, query: str, values: tuple[str, ...]) -> list[tuple[Any, ...]]:
        if not _exists(self.path):  # connecting would create it
            return []
        with self._connection() as connection:
            return connection.execute(query, values).fetchall() if _is_ours(connection) else []

    def _write(self, work: Sequence[tuple[str, tuple[Any, ...]]]) -> bool:
        """Executes statements with their values, all or none."""
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            if not _is_ours(connection):
                connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
                connection.execute(_CREATE)
                connection.execute(_CREATE_SPEEDS)
            for statement, values in work:
                connection.execute(statement, values)
            connection.execute("COMMIT")
        return True

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        import sqlite3

        # The default rollback journal, not WAL: it works on network folders, can be read in a
        # read-only one, and one commit a problem is rare enough.
        connection = sqlite3.connect(str(self.path), timeout=BUSY_SECONDS, isolation_level=None)
        try:
            yield connection
        finally:
            connection.close()  # rolls back what was not committed

    def _guarded(self, work: Callable[[], T]) -> T | None:
        """The work's result; None, after a warning, where the file fails us."""
        import sqlite3

        for last in (False, True):
            seen = _file_identity(self.path)
            try:
                return work()
            except _ForeignError as error:
                self._readable = self._writable = False
                self._warn("file", f"{error}; it is left alone and tuning is kept in memory")
            except (sqlite3.Error, OSError) as error:
                if not last and _is_corrupt(error) and self._move_aside(seen):
                    continue
                self._warn("file", f"cannot be used ({error}); tuning is kept in memory")
            return None
        return None

    def _move_aside(self, seen: tuple[int, int] | None) -> bool:
        """Renames a corrupt file, unless another process has replaced it since it was opened."""
        assert self.path is not None
        if _file_identity(self.path) != seen:
            return True
        aside = self.path.with_name(self.path.name + ".corrupt")
        try:
            # A journal left behind would be played into the new file.
            with contextlib.suppress(FileNotFoundError):
                self.path.with_name(self.path.name + "-journal").replace(f"{aside}-journal")
            self.path.replace(aside)
        except FileNotFoundError:
            return True  # another process was faster
        except OSError:
            return False
        self._warn("corrupt", f"is corrupt; it was renamed to {aside.name} and a new one begun")
        return True

    def _warn(self, kind: str, what: str) -> None:
        """Once a kind of trouble and store."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"the tuning store {self.path} {what}", TuningWarning, stacklevel=4)


def _all_of(names: tuple[str, ...]) -> str:
    return " AND ".join(f"{name} = ?" for name in names)


def _row(entry: Entry) -> tuple[str, ...]:
    data = entry.to_json() | {"family": entry.key.family}
    return tuple(
        json.dumps(data[name], allow_nan=False) if name in _JSON_COLUMNS else data[name]
        for name in _COLUMNS
    )


def _entry(row: tuple[str, ...]) -> Entry:
    return entry_of(_decoded(_COLUMNS, row))


def _speeds(row: tuple[Any, ...]) -> Speeds:
    return speeds_of(dict(zip(_SPEEDS, row, strict=True)))


def _winner(row: tuple[str, ...]) -> Winner:
    data = _decoded(Winner._fields, row)
    _check_problem(_checked(data, "problem", str))
    return Winner(data["problem"], _checked(data, "algorithm", str), _config(data), _sources(data))


def _decoded(columns: tuple[str, ...], row: tuple[str, ...]) -> dict[str, Any]:
    data: dict[str, Any] = dict(zip(columns, row, strict=True))
    try:
        return data | {name: json.loads(data[name]) for name in _JSON_COLUMNS if name in data}
    except TypeError as error:  # not text
        raise ValueError(str(error)) from None


def _is_ours(connection: sqlite3.Connection) -> bool:
    """Whether the file holds our tables; False where it is still empty."""
    ((application,),) = connection.execute("PRAGMA application_id").fetchall()
    ((version,),) = connection.execute("PRAGMA user_version").fetchall()
    ((tables,),) = connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
    if not tables and application in (0, _APPLICATION_ID):
        return False
    if application != _APPLICATION_ID:
        raise _ForeignError("is a database of another program")
    if version != _SCHEMA_VERSION:
        raise _ForeignError(f"was written by another version (schema {version})")
    return True


def _exists(path: Path | None) -> bool:
    return path is not None and path.exists()


def _file_identity(path: Path | None) -> tuple[int, int] | None:
    try:
        status = os.stat(str(path))
    except OSError:
        return None
    return (status.st_dev, status.st_ino)


def _is_corrupt(error: Exception) -> bool:
    """SQLITE_CORRUPT or SQLITE_NOTADB: what is in the file, not what surrounds it."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # Python 3.10 has the text alone
        return str(error) in ("database disk image is malformed", "file is not a database")
    return code & 0xFF in (11, 26)
