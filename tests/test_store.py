"""The store of tuning results: what it keeps, and that no fault of its file reaches a caller."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from wgpuconv.errors import TuningWarning
from wgpuconv.tuning import store as store_module
from wgpuconv.tuning.store import (
    DeviceKey,
    Entry,
    Key,
    Speeds,
    Store,
    Trial,
    default_path,
    entry_of,
    speeds_of,
)

PROBLEM = "conv2d f32 n1 c16 h31 w29 k16 r3 s3 stride1 pad1"
KEY = Key("wgpu", "a GPU", "driver 1", "wgpu 0.32.0", "0123abcd", "auto", PROBLEM)


def entry(problem: str = PROBLEM, seconds: float = 1e-3, **key: str) -> Entry:
    trials = (
        Trial("direct", {"filters": 4, "order": "rows"}, seconds, seconds * 0.9),
        Trial("implicit_gemm", {"splits": 2, "unroll": True}, seconds * 2, seconds),
        Trial("im2col_gemm", {"tile": 8}, failure="wrong result: 1 of 256"),
    )
    return Entry(
        KEY._replace(problem=problem, **key),
        "direct",
        {"filters": 4, "order": "rows"},
        trials,
        {"direct": "aa", "implicit_gemm": "bb", "im2col_gemm": "cc"},
        "auto",
        "2026-01-01T00:00:00+00:00",
    )


SPEEDS = Speeds(DeviceKey(*KEY[:4], probes="ff"), 4.2e12, 62e12, date="2026-01-01T00:00:00+00:00")


def sized(n: int) -> str:
    return PROBLEM.replace("n1 ", f"n{n} ")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "tuning.sqlite3"


# ---- what it keeps ----


def test_an_entry_comes_back_whole(path: Path) -> None:
    Store(path).put(entry())
    found = Store(path).get(KEY)
    assert found == entry()
    assert found is not None
    assert found.seconds == 1e-3
    assert [t.algorithm for t in found.ranked] == ["direct", "implicit_gemm"]


@pytest.mark.parametrize("field", Key._fields)
def test_every_part_of_the_key_counts(path: Path, field: str) -> None:
    Store(path).put(entry())
    other = KEY._replace(**{field: sized(2) if field == "problem" else "other"})
    assert Store(path).get(other) is None


def test_a_second_entry_of_a_key_replaces_the_first(path: Path) -> None:
    Store(path).put(entry(seconds=1e-3))
    Store(path).put(entry(seconds=2e-3))
    assert [e.seconds for e in Store(path).entries()] == [2e-3]


def test_a_family_differs_in_batch_and_size_only(path: Path) -> None:
    other_channels = PROBLEM.replace("c16", "c32")
    taller = PROBLEM.replace("h31", "h64")
    store = Store(path)
    store.put(entry(), entry(sized(8)), entry(taller), entry(other_channels))
    store.put(entry(scope="direct"), entry(driver="driver 2"))
    for reader in (store, Store(path)):  # from memory, and from the file
        found = {w.problem for w in reader.family(KEY)}
        assert found == {PROBLEM, sized(8), taller}


def test_an_empty_batch_is_nobodys_relative(path: Path) -> None:
    Store(path).put(entry(), entry(sized(0)))
    with pytest.warns(TuningWarning, match="has no images"):
        assert [w.problem for w in Store(path).family(KEY)] == [PROBLEM]


@pytest.mark.parametrize("bandwidth", [4.2e12, None])
def test_speeds_come_back_whole(path: Path, bandwidth: float | None) -> None:
    known = replace(SPEEDS, bandwidth=bandwidth)
    Store(path).put_speeds(known)
    assert Store(path).speeds(SPEEDS.key) == known
    newer = replace(known, fma_rate=60e12)
    Store(path).put_speeds(newer)
    assert Store(path).all_speeds() == [newer]


@pytest.mark.parametrize("field", DeviceKey._fields)
def test_every_part_of_a_devices_key_counts(path: Path, field: str) -> None:
    Store(path).put_speeds(SPEEDS)
    assert Store(path).speeds(SPEEDS.key._replace(**{field: "other"})) is None


def test_broken_speeds_are_a_miss_and_can_be_replaced(path: Path) -> None:
    Store(path).put_speeds(SPEEDS)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE speeds SET bandwidth = 'fast'")
    connection.commit()
    connection.close()
    store = Store(path)
    with pytest.warns(TuningWarning, match="cannot be read"):
        assert store.speeds(SPEEDS.key) is None
    store.put_speeds(SPEEDS)
    assert Store(path).speeds(SPEEDS.key) == SPEEDS


def test_clear_forgets_memory_and_file(path: Path) -> None:
    store = Store(path)
    store.put(entry(), entry(sized(2)))
    store.put_speeds(SPEEDS)
    assert store.clear() == 2
    assert store.get(KEY) is None
    assert store.speeds(SPEEDS.key) is None
    assert Store(path).entries() == []
    assert Store(path).all_speeds() == []


@pytest.mark.parametrize("where", [None, ":memory:"])
def test_in_memory_nothing_is_written(
    where: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store(where)
    store.put(entry())
    store.put_speeds(SPEEDS)
    assert store.get(KEY) == entry()
    assert store.speeds(SPEEDS.key) == SPEEDS
    assert store.clear() == 1
    assert list(tmp_path.iterdir()) == []


def test_reading_creates_no_file(path: Path) -> None:
    assert Store(path).get(KEY) is None
    assert Store(path).entries() == []
    assert Store(path).speeds(SPEEDS.key) is None
    assert not path.parent.exists()


def test_the_cache_folder_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WGPUCONV_CACHE_DIR", str(tmp_path))
    assert default_path() == tmp_path / "tuning-2.sqlite3"
    monkeypatch.delenv("WGPUCONV_CACHE_DIR")
    assert default_path().parent.name == "wgpuconv"


def test_importing_neither_loads_sqlite_nor_touches_the_disk(tmp_path: Path) -> None:
    code = "import sys, wgpuconv; assert 'sqlite3' not in sys.modules; wgpuconv.ConvProblem"
    folder = tmp_path / "cache"
    environment = os.environ | {"WGPUCONV_CACHE_DIR": str(folder)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert not folder.exists()


# ---- faults ----


def works_in_memory(store: Store) -> None:
    """Puts and gets succeed, whatever the file is."""
    store.put(entry())
    assert store.get(KEY) == entry()
    store.put(entry(sized(3)))
    assert {PROBLEM, sized(3)} <= {w.problem for w in store.family(KEY)}
    assert {PROBLEM, sized(3)} <= {e.key.problem for e in store.entries()}
    store.put_speeds(SPEEDS)
    assert store.speeds(SPEEDS.key) == SPEEDS


def one_warning(action: Callable[[], None]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    assert [w.category for w in caught] == [TuningWarning], [str(w.message) for w in caught]
    return str(caught[0].message)


@pytest.mark.parametrize("garbage", [b"garbage" * 1000, b"\x00" * 8192, b"SQLite format 3\x00" * 9])
def test_a_corrupt_file_is_moved_aside(path: Path, garbage: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(garbage)
    store = Store(path)
    message = one_warning(lambda: works_in_memory(store))
    assert "tuning.sqlite3.corrupt" in message
    assert path.with_name("tuning.sqlite3.corrupt").read_bytes() == garbage
    assert Store(path).get(KEY) == entry(), "a new file was begun"


def test_a_damaged_page_is_moved_aside(path: Path) -> None:
    Store(path).put(*(entry(sized(n)) for n in range(1, 200)))
    data = bytearray(path.read_bytes())
    assert len(data) > 40_000
    data[4096:] = b"\xa5" * (len(data) - 4096)  # the header and the schema stay
    path.write_bytes(data)
    message = one_warning(lambda: works_in_memory(Store(path)))
    assert "corrupt" in message
    assert Store(path).get(KEY) == entry()


@pytest.mark.parametrize("keep", [0, 1, 50, 100, 1000, 4096, 5000, 40_000])
def test_a_file_cut_short_costs_its_entries_only(path: Path, keep: int) -> None:
    Store(path).put(*(entry(sized(n)) for n in range(1, 200)))
    os.truncate(path, keep)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        works_in_memory(Store(path))
    assert [w.category for w in caught] in ([], [TuningWarning])
    assert Store(path).get(KEY) == entry()


def test_another_programs_database_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE entries (name TEXT)")
        connection.execute("INSERT INTO entries VALUES ('theirs')")
    connection.close()
    before = path.read_bytes()
    store = Store(path)
    message = one_warning(lambda: works_in_memory(store))
    assert "another program" in message
    assert path.read_bytes() == before
    assert not list(path.parent.glob("*.corrupt"))


def test_a_store_of_another_version_is_left_alone(path: Path) -> None:
    Store(path).put(entry())
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = path.read_bytes()
    store = Store(path)
    assert "schema 99" in one_warning(lambda: works_in_memory(store))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("trials", "not json"),
        ("trials", '[{"algorithm": 3}]'),
        ("trials", '[{"algorithm": "direct", "config": {}, "seconds": -1}]'),
        ("config", '{"filters": [1]}'),
        ("sources", '{"direct": 1}'),
        ("config", b"\x00\xff"),
    ],
)
def test_a_broken_entry_is_a_miss_and_can_be_replaced(
    path: Path, column: str, value: object
) -> None:
    Store(path).put(entry(), entry(sized(2)))
    connection = sqlite3.connect(path)
    connection.execute(f"UPDATE entries SET {column} = ? WHERE problem = ?", (value, PROBLEM))
    connection.commit()
    connection.close()
    store = Store(path)

    def use() -> None:
        assert store.get(KEY) is None
        assert [e.key.problem for e in store.entries()] == [sized(2)]

    assert "cannot be read" in one_warning(use)
    store.put(entry())
    assert Store(path).get(KEY) == entry()


def test_a_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("I am no folder")
    store = Store(tmp_path / "file" / "tuning.sqlite3")
    assert "kept in memory" in one_warning(lambda: works_in_memory(store))


def test_a_folder_in_place_of_the_file(path: Path) -> None:
    path.mkdir(parents=True)
    assert "kept in memory" in one_warning(lambda: works_in_memory(Store(path)))


def failing_writes(
    monkeypatch: pytest.MonkeyPatch, *, pages: int = 0, read_only: bool = False
) -> None:
    """Makes every connection of the store one to a full or a write-protected disk."""
    connect = sqlite3.connect

    def limited(*args: object, **kwargs: object) -> sqlite3.Connection:
        connection = connect(*args, **kwargs)  # type: ignore[call-overload]
        if read_only:  # root may write where chmod says no, so SQLite itself must refuse
            connection.execute("PRAGMA query_only = 1")
        if pages:
            connection.execute(f"PRAGMA max_page_count = {pages}")
        return connection

    monkeypatch.setattr(sqlite3, "connect", limited)


def test_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(path).put(entry())
    with monkeypatch.context() as full:
        failing_writes(full, pages=4)
        store = Store(path)

        def fill() -> None:
            for n in range(2, 100):
                store.put(entry(sized(n)))

        assert "full" in one_warning(fill)
        assert len(store.entries()) == 99, "what was known before and what memory holds"
    kept = Store(path)
    assert kept.get(KEY) == entry()
    assert all(e == entry(e.key.problem) for e in kept.entries())


def test_a_device_that_is_always_full() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    one_warning(lambda: works_in_memory(Store("/dev/full")))


def test_a_read_only_file_is_still_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(path).put(entry(sized(5)))
    failing_writes(monkeypatch, read_only=True)
    store = Store(path)
    assert store.get(KEY._replace(problem=sized(5))) == entry(sized(5))

    def write() -> None:
        store.put(entry())
        store.put(entry(sized(6)))

    assert "readonly" in one_warning(write)
    assert store.get(KEY) == entry()
    assert len(store.entries()) == 3


def test_a_folder_that_cannot_be_made(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert "Permission denied" in one_warning(lambda: works_in_memory(Store(path)))


def test_a_lock_that_is_never_released(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(path).put(entry(sized(5)))
    monkeypatch.setattr(store_module, "BUSY_SECONDS", 0.1)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    try:
        begin = time.monotonic()
        store = Store(path)
        assert "locked" in one_warning(lambda: works_in_memory(store))
        assert time.monotonic() - begin < 2
    finally:
        other.close()
    assert Store(path).get(KEY._replace(problem=sized(5))) == entry(sized(5))


# ---- several at once ----

WRITER = """
import sys
sys.path.insert(0, {folder!r})
from test_store import Store, entry, sized
store = Store({path!r})
print("ready", flush=True)
for n in range({first}, {last}):
    store.put(entry(sized(n)))
"""


def writer(path: Path, first: int, last: int) -> subprocess.Popen[str]:
    code = WRITER.format(folder=str(Path(__file__).parent), path=str(path), first=first, last=last)
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_several_processes_write_at_once(path: Path) -> None:
    each = 25
    children = [writer(path, 1 + i * each, 1 + (i + 1) * each) for i in range(4)]
    for child in children:
        child.communicate(timeout=120)
    assert [child.returncode for child in children] == [0] * 4  # a warning is an error there
    found = Store(path).entries()
    assert {e.key.problem for e in found} == {sized(n) for n in range(1, 1 + 4 * each)}
    assert all(e == entry(e.key.problem) for e in found)


def test_a_writer_killed_at_any_moment_breaks_nothing(path: Path) -> None:
    """kill -9, ten times at other moments; what remains is whole, and no warning is due."""
    counts = []
    for attempt in range(10):
        child = writer(path, 1, 1_000_000)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.005 + 0.013 * attempt)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert child.returncode == -signal.SIGKILL
        store = Store(path)
        found = store.entries()
        assert all(e == entry(e.key.problem) for e in found)
        store.put(entry(seconds=5e-3))
        again = Store(path).get(KEY)
        assert again is not None
        assert again.seconds == 5e-3
        Store(path).put(entry())
        counts.append(len(found))
    assert max(counts) > 1, "the children never got to write"


def test_a_corrupt_file_met_by_two_stores_at_once(path: Path) -> None:
    """The second must not move aside what the first has begun anew."""
    path.parent.mkdir()
    path.write_bytes(b"garbage" * 1000)
    first, second = Store(path), Store(path)
    seen = store_module._file_identity(path)
    assert "corrupt" in one_warning(lambda: first.put(entry()))
    assert second._move_aside(seen) is True  # it opened the garbage, and comes too late
    assert Store(path).get(KEY) == entry()


def test_threads_share_one_store(path: Path) -> None:
    store = Store(path)
    errors: list[BaseException] = []

    def work(start: int) -> None:
        try:
            for n in range(start, start + 10):
                store.put(entry(sized(n)))
                assert store.get(KEY._replace(problem=sized(n))) == entry(sized(n))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(1 + 10 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(Store(path).entries()) == 40


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_uses_the_store(path: Path) -> None:
    store = Store(path)
    store.put(entry())
    child = os.fork()
    if child == 0:
        try:
            fine = store.get(KEY) == entry()
            store.put(entry(sized(2)))
            os._exit(0 if fine else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store.put(entry(sized(3)))
    assert {e.key.problem for e in Store(path).entries()} == {PROBLEM, sized(2), sized(3)}


# ---- JSON ----


def test_an_entry_survives_json() -> None:
    assert entry_of(entry().to_json()) == entry()
    assert entry_of(replace(entry(), trials=()).to_json()).seconds is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"backend": None}, "'backend' must be a string, got None"),
        ({"problem": "conv9d"}, "begins with 'conv2d'"),
        ({"problem": sized(0)}, "has no images"),
        ({"trials": "none"}, "'trials' must be an array, got 'none'"),
        ({"trials": [1]}, "a trial must be an object"),
        ({"config": {"a": None}}, "'config' must hold"),
        ({"mode": 1}, "'mode' must be a string, got 1"),
    ],
)
def test_what_is_no_entry_is_refused_with_a_reason(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        entry_of(entry().to_json() | change)


def test_what_an_entry_lacks_is_named() -> None:
    data = entry().to_json()
    del data["driver"]
    with pytest.raises(ValueError, match="'driver' is missing"):
        entry_of(data)


def test_speeds_survive_json() -> None:
    for known in (SPEEDS, replace(SPEEDS, bandwidth=None, fma_rate=None)):
        assert speeds_of(known.to_json()) == known


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"driver": 1}, "'driver' must be a string, got 1"),
        ({"bandwidth": 0}, "'bandwidth' must be a rate a second or null, got 0"),
        ({"fma_rate": float("inf")}, "'fma_rate' must be a rate a second or null, got inf"),
        ({"fma_rate": True}, "'fma_rate' must be a rate"),
        ({"date": None}, "'date' must be a string, got None"),
    ],
)
def test_what_are_no_speeds_is_refused_with_a_reason(
    change: dict[str, object], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        speeds_of(SPEEDS.to_json() | change)
