"""Bundles: tuning results that travel with an application."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_store import KEY, SPEEDS, entry, sized

from wgpuconv import ConvProblem, Device, export_bundle, import_bundle
from wgpuconv.errors import StoreError
from wgpuconv.tuning.bundle import Bundle, merge, read_bundle
from wgpuconv.tuning.store import Store


def test_a_bundle_carries_everything(tmp_path: Path) -> None:
    source, target = Store(None), Store(tmp_path / "tuning.sqlite3")
    source.put(entry(), entry(sized(2)), entry(driver="another"))
    source.put_speeds(SPEEDS)
    assert export_bundle(tmp_path / "bundle.json", source) == 3
    assert import_bundle(tmp_path / "bundle.json", target) == 3
    by_key = {e.key: e for e in source.entries()}
    assert {e.key: e for e in Store(target.path).entries()} == by_key
    assert Store(target.path).all_speeds() == [SPEEDS]


def test_a_store_keeps_the_speeds_that_its_own_choices_rest_on(tmp_path: Path) -> None:
    """The numbers of splits on offer follow from them."""
    ours, theirs = Store(None), Store(None)
    ours.put_speeds(SPEEDS)
    other = replace(SPEEDS, key=SPEEDS.key._replace(driver="driver 2"))
    theirs.put_speeds(replace(SPEEDS, fma_rate=60e12, date="2027-01-01T00:00:00+00:00"), other)
    export_bundle(tmp_path / "bundle.json", theirs)
    assert import_bundle(tmp_path / "bundle.json", ours) == 0
    assert ours.all_speeds() == [SPEEDS, other]


def test_it_is_plain_json_with_names(tmp_path: Path) -> None:
    store = Store(None)
    store.put(entry())
    export_bundle(tmp_path / "bundle.json", store)
    data = json.loads((tmp_path / "bundle.json").read_text())
    assert (data["format"], data["version"]) == ("wgpuconv-tuning", 2)
    (found,) = data["entries"]
    assert found["adapter"] == KEY.adapter
    assert found["problem"] == KEY.problem
    assert found["algorithm"] == "direct"
    assert found["config"] == {"filters": 4, "order": "rows"}
    assert found["sources"]["direct"] == "aa"
    assert [t.get("seconds") for t in found["trials"]] == [1e-3, 2e-3, None]


def test_importing_again_changes_nothing(tmp_path: Path) -> None:
    store = Store(None)
    store.put(entry())
    export_bundle(tmp_path / "bundle.json", store)
    assert import_bundle(tmp_path / "bundle.json", store) == 0


OTHER_KERNELS = {"direct": "a newer one"}


@pytest.mark.parametrize(
    ("change", "wins"),
    [
        ({"seconds": 5e-4}, True),
        ({"seconds": 5e-3}, False),
        ({"seconds": 5e-4, "date": "2025-01-01T00:00:00+00:00"}, True),
        ({"date": "2026-01-02T00:00:00+00:00"}, True),
        # Times of other kernels say nothing about today's: the newer result counts.
        ({"sources": OTHER_KERNELS, "seconds": 5e-3, "date": "2027-01-01T00:00:00+00:00"}, True),
        ({"sources": OTHER_KERNELS, "seconds": 5e-4, "date": "2025-01-01T00:00:00+00:00"}, False),
    ],
)
def test_of_the_same_kernels_the_faster_wins_else_the_newer(
    change: dict[str, Any], wins: bool
) -> None:
    store = Store(None)
    store.put(entry())
    made = entry(seconds=change.pop("seconds", 1e-3))
    brought = replace(made, **change)
    assert merge(store, Bundle([brought], [])) == wins
    assert store.get(KEY) == (brought if wins else entry())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "no tuning bundle: it is no JSON from line 1, column 1 on"),
        ("\x00\x01", "no tuning bundle: it is no JSON"),
        ('{"format":\n "wgpu', "no tuning bundle: it is no JSON from line 2, column 2 on"),
        ("[" * 100_000, "no tuning bundle: it is no JSON;"),
        ("[]", 'lacks "format"'),
        ('{"format": "other"}', 'lacks "format"'),
        ('{"format": "wgpuconv-tuning", "version": 1}', "of version 1, this wgpuconv reads"),
        ('{"format": "wgpuconv-tuning", "version": 2}', "has no list of entries"),
        ('{"format": "wgpuconv-tuning", "version": 2, "entries": []}', "has no list of devices"),
        (
            '{"format": "wgpuconv-tuning", "version": 2, "entries": [{"backend": 1}]}',
            r"broken tuning bundle, in entries\[0\]: 'backend' must be a string, got 1",
        ),
        (
            '{"format": "wgpuconv-tuning", "version": 2, "entries": [], "devices": [7]}',
            r"broken tuning bundle, in devices\[0\]: speeds must be an object, got 7",
        ),
    ],
)
def test_what_is_no_bundle_is_refused_with_a_reason(
    tmp_path: Path, content: str, reason: str
) -> None:
    path = tmp_path / "bundle.json"
    path.write_text(content)
    store = Store(None)
    with pytest.raises(StoreError, match=reason) as caught:
        import_bundle(path, store)
    message = str(caught.value)
    assert str(path) in message
    assert message.endswith("; write it with 'wgpuconv cache export' or wgpuconv.export_bundle")
    for raw in ("Error", "Errno", "codec", "char ", "Expecting", "recursion"):
        assert raw not in message
    assert store.entries() == []


@pytest.mark.parametrize(
    "broken",
    [
        {"version": list(range(1000))},
        {"entries": [[*range(1000)]]},
        {"entries": [{"backend": ["x" * 1000] * 1000}]},
        {"entries": [{"backend": "x" * 1000, "adapter": {str(i): i for i in range(1000)}}]},
        {"devices": [[[[*range(1000)]] * 1000]]},
        {"devices": ["x" * 1000]},
    ],
)
def test_a_message_shows_little_of_what_is_broken(
    tmp_path: Path, broken: dict[str, object]
) -> None:
    path = tmp_path / "bundle.json"
    good = {"format": "wgpuconv-tuning", "version": 2, "entries": [], "devices": []}
    path.write_text(json.dumps(good | broken))
    with pytest.raises(StoreError, match=r"\.\.\.") as caught:
        read_bundle(path)
    assert len(str(caught.value)) < len(str(path)) + 800


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bundle.json").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(StoreError, match="it is no JSON; write it with"):
        read_bundle(tmp_path / "bundle.json")


def test_one_broken_entry_keeps_the_others_out_too(tmp_path: Path) -> None:
    good = Store(None)
    good.put(entry(), entry(sized(2)))
    path = tmp_path / "bundle.json"
    export_bundle(path, good)
    data = json.loads(path.read_text())
    data["entries"][1]["problem"] = "conv2d f32 n1"
    path.write_text(json.dumps(data))
    store = Store(None)
    with pytest.raises(StoreError, match=r"in entries\[1\]: a problem needs one number"):
        import_bundle(path, store)
    assert store.entries() == []


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError, match=r"cannot read the bundle .*none\.json: No such file or directory$"
    ):
        import_bundle(tmp_path / "none.json", Store(None))
    with pytest.raises(StoreError, match=r"cannot write the bundle .*: No such file or directory$"):
        export_bundle(tmp_path / "none" / "bundle.json", Store(None))


def test_a_device_uses_what_was_imported(tmp_path: Path) -> None:
    """Tuned on one machine, shipped, and used on another one of the same kind."""
    text = "conv2d f32 n1 c3 h9 w11 k8 r3 s3 pad1"
    problem, bundle = ConvProblem.parse(text), tmp_path / "bundle.json"
    first = Device(tune="full", store=":memory:")
    tuned = first.choose(problem, algorithm="direct")
    assert export_bundle(bundle, first) == 1

    second = Device(tune="stored", store=":memory:")
    assert second.choose(problem, algorithm="direct").source == "model"
    assert import_bundle(bundle, second) == 1
    choice = second.choose(problem, algorithm="direct")
    assert choice.source == "stored"
    assert choice.candidate == tuned.candidate
