"""The command line: every example runs, --json is clean, errors are one sentence with status 1."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_sample import sample_run
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

import wgpuconv
from wgpuconv import demo
from wgpuconv.bench.session import Session
from wgpuconv.cli import app, options, output, run, tune
from wgpuconv.cli import demo as demo_command
from wgpuconv.errors import DeviceLostError
from wgpuconv.images import read_image, write_image
from wgpuconv.problem import ACTIVATIONS
from wgpuconv.suites import parse_entry
from wgpuconv.tuning.store import Entry, Key, Store, default_path

pytest.importorskip("PIL")
helper = pytest.importorskip("onnx.helper")

TINY = "conv2d f32 n1 c4 h8 w8 k8 r3 s3 stride1 pad1"
COMMANDS = (
    "devices",
    "algorithms",
    "demo",
    "run",
    "explain",
    "tune",
    "bench",
    "bench report",
    "bench compare",
    "cache info",
    "cache path",
    "cache export",
    "cache import",
    "cache clear",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with what the examples read, and a store of its own."""
    rng = np.random.default_rng(0)
    shutil.copy(demo.PHOTOGRAPH, tmp_path / "photo.jpg")
    np.save(tmp_path / "x.npy", rng.uniform(-1, 1, (1, 4, 8, 9)).astype(np.float32))
    np.save(tmp_path / "w.npy", rng.uniform(-1, 1, (5, 4, 3, 3)).astype(np.float32))
    np.save(tmp_path / "scalar.npy", np.float32(1))
    np.save(tmp_path / "objects.npy", np.array([None]), allow_pickle=True)
    (tmp_path / "text.npy").write_text("no array", encoding="utf-8")
    (tmp_path / "zip.npy").write_bytes(b"PK\x03\x04 and no archive")
    (tmp_path / "cut.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:200])
    write_model(tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WGPUCONV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(output, "PATIENCE", 60.0)  # a slow machine may take a second
    return tmp_path


def write_model(path: Path) -> None:
    """An ONNX model whose batch and size are open, of three convolutions, two of them the same."""
    weights = [
        helper.make_tensor(n, 1, s, bytes(4 * math.prod(s)), raw=True)
        for n, s in (("v", (4, 3, 3, 3)), ("w", (4, 4, 1, 1)))
    ]
    nodes = [
        helper.make_node("Conv", [x, w], [y], name=f"/{y}/conv")
        for x, w, y in (("x", "v", "a"), ("a", "w", "b"), ("b", "w", "c"))
    ]
    x = helper.make_tensor_value_info("x", 1, ("N", 3, "H", "W"))
    y = helper.make_tensor_value_info("c", 1, None)
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], weights))
    path.write_bytes(model.SerializeToString())


def store_one() -> None:
    """Puts a result into the store, as tuning would."""
    key = Key("wgpu", "adapter", "driver", "versions", "limits", "auto", TINY)
    Store(default_path()).put(Entry(key, "direct", {}, (), {}, "auto", "2026-01-01T00:00:00+00:00"))


def invoke(*arguments: str, status: int = 0) -> Any:
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == status, done.output
    return done


def sentence(*arguments: str) -> str:
    """The one line on stderr with which a command fails."""
    done = invoke(*arguments, status=1)
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return str(lines[0])


def examples(command: str) -> list[list[str]]:
    """The commands that a command's help shows, as words without the program's name."""
    text = invoke(*command.split(), "--help").stdout
    lines = [line.strip() for line in text.splitlines()]
    return [shlex.split(line)[1:] for line in lines if re.match(r"wgpuconv (?!\[|.*OPTIONS)", line)]


# ---- help and examples ----


def test_the_help_lists_every_command() -> None:
    text = invoke("--help").stdout
    for command in {name.split()[0] for name in COMMANDS}:
        assert f" {command} " in text
    assert invoke("--version").stdout == f"wgpuconv {wgpuconv.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_of_itself(command: str) -> None:
    found = examples(command)
    assert found
    assert all(words[: len(command.split())] == command.split() for words in found)


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("command", ["", "cache", *COMMANDS])
def test_help_fits_the_terminal_and_shows_what_options_take(
    command: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = invoke(*command.split(), "--help").stdout
    assert max(map(len, text.splitlines())) <= width
    # An option takes a name of its form, or its choices, not the name of a type of Python's.
    options = [line for line in text.splitlines() if re.match(r"\W+--\w", line)]
    assert [line for line in options if re.search(r"<(str|int|int range|float|TEXT)>", line)] == []


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ("demo", "tune", "bench")])
def test_the_examples_run(command: str, folder: Path) -> None:
    if command in ("cache export", "cache import"):
        store_one()
        invoke("cache", "export", "tuning.json")
    if command in ("bench report", "bench compare"):
        for name in ("result", "before", "after"):
            sample_run().save(folder / f"{name}.json")
        (folder / "pictures").mkdir()
    for words in examples(command):
        done = invoke(*words)
        assert done.stdout
        assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.xdist_group("cli")
@pytest.mark.parametrize("command", ["demo", "tune", "bench"])
def test_the_longer_examples_run(command: str, folder: Path) -> None:
    for words in examples(command):
        assert invoke(*words).stdout


@pytest.mark.parametrize("command", ["demo", "run", "explain", "tune", "bench"])
def test_a_table_fits_eighty_columns(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(demo, "problems", lambda *, software: [parse_entry(f"tiny: {TINY}")])
    arguments = {
        "demo": [],
        "run": ["photo.jpg", "blur", "y.png"],
        "bench": [TINY, "--peers", "none"],
    }.get(command, [TINY])
    for line in invoke(command, *arguments).stdout.splitlines():
        # A path and the name of a device are never broken, so that they can be copied.
        assert len(line) <= 80 or str(folder) in line or "computed on" in line, line


@pytest.mark.parametrize("command", ["explain", "tune", "bench"])
def test_the_help_explains_a_problems_text(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = invoke(command, "--help").stdout
    _, _, grammar = text.partition("A problem's text: ")
    rows = [line.strip() for line in grammar.partition("Example")[0].splitlines()]
    # Nothing is wrapped: each row is as it was written.
    written = Text.from_markup(options.GRAMMAR).plain.partition(": ")[2].splitlines()
    assert list(filter(None, rows)) == [line.strip() for line in written if line]
    # The first spelling of each row, taken together, makes a problem.
    first = [re.split(r"\s{2,}", row)[0].split(", ") for row in rows[1:] if row]
    words = [w[0] for w in first if re.match(r"f32|n1|stride|pad|dil|gro|nchw|bias|tf32|act", w[0])]
    problem = parse_entry(" ".join(["conv2d", *words])).problem
    assert problem.groups == 32
    assert problem.activation.name == "relu"
    assert problem.precision == "tf32"
    for name in ACTIVATIONS[1:]:
        assert name in grammar


def test_lines_of_a_table_end_where_their_text_ends(folder: Path) -> None:
    for arguments in (["algorithms"], ["devices"], ["tune", TINY]):
        lines = invoke(*arguments).stdout.splitlines()
        assert len(lines) > 2
        assert [line for line in lines if line.endswith(" ")] == []


# ---- progress ----


def test_lines_begin_after_a_while_and_name_each_thing_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = output._Lines(3)
    lines.tell("a")
    assert capsys.readouterr().err == ""
    lines._begin()
    lines.tell("a")
    lines.advance()
    lines.tell("b")
    assert capsys.readouterr().err == "[1/3] a\n[2/3] b\n"


@pytest.mark.parametrize("width", [60, 80])
def test_of_a_long_line_of_progress_the_problem_is_cut(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Console(stderr=True, force_terminal=True, no_color=True, width=width)
    monkeypatch.setattr(output, "err", terminal)
    with output.Work(7) as work:
        work.tell("[conv] " * 20, "roofline")
        work._bar.refresh()
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", capsys.readouterr().err)
    line = text.replace("\r", "\n").strip().splitlines()[-1]
    assert re.match(r"0/7 0:00:0\d \[conv\] .*…: roofline", line.strip())
    assert len(line) <= width


@pytest.mark.parametrize(
    "arguments", ["tune {} {}", "bench {} {} --algorithms direct --peers none --json"]
)
def test_a_long_command_says_on_a_pipe_where_it_is(
    arguments: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = wgpuconv.Device.choose
    prewarm = wgpuconv.Device.prewarm

    def slow(self: Any, *arguments: Any, **more: Any) -> Any:
        time.sleep(0.5)
        return plain(self, *arguments, **more)

    def slow_too(self: Any, *arguments: Any, **more: Any) -> Any:
        time.sleep(0.5)
        return prewarm(self, *arguments, **more)

    monkeypatch.setattr(wgpuconv.Device, "choose", slow)
    monkeypatch.setattr(wgpuconv.Device, "prewarm", slow_too)
    monkeypatch.setattr(output, "PATIENCE", 0.01)
    words = arguments.format(shlex.quote(f"a: {TINY}"), shlex.quote(f"b: {TINY} bias"))
    lines = invoke(*shlex.split(words)).stderr.splitlines()
    assert [line for line in lines if line.startswith("[")] == ["[1/2] a", "[2/2] b"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("devices", "looking for devices ..."),
        ("algorithms", "opening the best device ..."),
        ("explain TINY -d wgpu", "opening the device wgpu ..."),
        ("tune --onnx model.onnx --size 8 --batch 1", "reading model.onnx ..."),
    ],
)
def test_a_command_says_at_once_on_a_terminal_what_it_does(
    arguments: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [TINY if word == "TINY" else word for word in arguments.split()]
    assert said not in invoke(*words).stderr
    terminal = Console(stderr=True, highlight=False, force_terminal=True, no_color=True, width=80)
    monkeypatch.setattr(output, "err", terminal)
    assert said in invoke(*words).stderr
    assert said not in invoke(*words, "--json").stderr


# ---- what the commands do ----


def test_devices_marks_one_default() -> None:
    rows = json.loads(invoke("devices", "--json").stdout)
    assert [row["default"] for row in rows].count(True) == 1
    assert {"spec", "name", "driver", "kind", "problem", "warning"} <= set(rows[0])
    usable = [row for row in rows if row["problem"] is None]
    assert usable
    assert invoke("devices").stdout.count("*") >= 1


def test_algorithms_are_those_of_the_registry(device: wgpuconv.Device) -> None:
    rows = json.loads(invoke("algorithms", "--json").stdout)
    assert [row["name"] for row in rows] == [a.name for a in device.algorithms]
    assert all(row["summary"] and row["operations"] for row in rows)
    assert all(row["name"] in invoke("algorithms").stdout for row in rows)


def test_run_convolves_arrays(folder: Path) -> None:
    np.save("b.npy", np.arange(5, dtype=np.float32))
    done = invoke(
        *shlex.split("run x.npy w.npy y.npy --bias b.npy --stride 2,1 --padding 1,1,0,2 --json")
    )
    x, w = np.load("x.npy"), np.load("w.npy")
    expected = wgpuconv.conv2d(x, w, np.load("b.npy"), stride=(2, 1), padding=((1, 1), (0, 2)))
    np.testing.assert_array_equal(np.load("y.npy"), expected)
    assert json.loads(done.stdout)["shape"] == list(expected.shape)


def test_run_says_that_a_result_is_no_number(folder: Path) -> None:
    for bias in ("nan", "inf"):
        done = invoke("run", "x.npy", "w.npy", "y.npy", "--bias", bias)
        assert "of 210 values are NaN or infinite" in done.stderr
    image = np.zeros((1, 1, 1, 3), np.float32)
    image[0, 0, 0] = [2, 4, np.nan]
    np.save("spoilt.npy", image)
    np.save("one.npy", np.ones((1, 1, 1, 1), np.float32))
    invoke("run", "spoilt.npy", "one.npy", "y.png", "--stretch")
    assert read_image(folder / "y.png").ravel().tolist() == [0, 1, 0]
    text = invoke("run", "x.npy", "w.npy", "y.npy", "--bias", "nan", "--json").stdout
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (found["minimum"], found["maximum"]) == (None, None)


def test_run_transposes(folder: Path) -> None:
    np.save("w.npy", np.ones((4, 2, 2, 2), np.float32))
    invoke(
        *shlex.split("run x.npy w.npy y.npy --transpose --stride 2 --output-padding 1 --bias 0.5"),
        *shlex.split("--activation leaky_relu,0.2 --algorithm direct"),
    )
    expected = wgpuconv.conv_transpose2d(
        np.load("x.npy"),
        np.load("w.npy"),
        np.full(2, 0.5, np.float32),
        stride=2,
        output_padding=1,
        activation=("leaky_relu", 0.2),
        algorithm="direct",
    )
    np.testing.assert_array_equal(np.load("y.npy"), expected)


def test_run_filters_an_image_and_keeps_its_size(folder: Path) -> None:
    invoke("run", "photo.jpg", "blur", "small.png", "--stride", "2")
    assert read_image(folder / "small.png").shape == (3, 148, 224)
    invoke("run", "photo.jpg", "laplacian", "y.png", "--dilation", "3,1", "--stretch")
    y = read_image(folder / "y.png")
    assert y.shape == (3, 296, 448)
    assert (y.min(), y.max()) == (0, 1)
    assert run._size(Path("y.png"), y, "NCHW") == "448 x 296"
    assert run._size(Path("y.png"), y.transpose(1, 2, 0), "NHWC") == "448 x 296"
    assert run._size(Path("y.npy"), y, "NCHW") == "3 x 296 x 448 float32"


def test_explain_shows_the_choice_and_the_refusals(folder: Path) -> None:
    found = json.loads(invoke("explain", TINY, "--json").stdout)
    assert found["problem"] == TINY
    assert found["choice"]["label"] in {row["label"] for row in found["rows"]}
    text = invoke("explain", TINY).stdout
    assert f"chosen {found['choice']['algorithm']}" in text
    assert all(name in text for name in found["refusals"])
    forced = json.loads(invoke("explain", TINY, "--json", "-a", "im2col_gemm").stdout)
    assert {row["algorithm"] for row in forced["rows"]} == {"im2col_gemm"}


def test_tune_stores_what_cache_shows_and_carries(folder: Path) -> None:
    depthwise = "conv2d f32 n1 c8 h8 w8 k8 r3 s3 stride1 pad1 groups8"
    (found,) = json.loads(invoke("tune", "--full", f"mine: {depthwise}", "--json").stdout)
    assert (found["name"], found["problem"]) == ("mine", depthwise)
    assert found["source"] == "tuned"
    assert found["seconds"] > 0
    assert found["measured"] >= 2
    text = invoke("tune", "--full", depthwise).stdout
    assert text.splitlines()[-1] == "Of 1, 1 stored, 0 guessed."
    (again,) = json.loads(invoke("tune", "--full", depthwise, "--json").stdout)
    assert (again["source"], again["config"]) == ("stored", found["config"])

    info = json.loads(invoke("cache", "info", "--json").stdout)
    assert [row["problems"] for row in info["devices"]] == [1]
    assert info["path"] == invoke("cache", "path").stdout.strip()
    assert info["bytes"] > 0
    invoke("cache", "export", "tuning.json")
    assert "forgot 1 problem" in invoke("cache", "clear", "--yes").stdout
    assert json.loads(invoke("cache", "info", "--json").stdout)["devices"] == []
    assert "1 of 1" in invoke("cache", "import", "tuning.json").stdout
    assert json.loads(invoke("cache", "info", "--json").stdout)["devices"] == info["devices"]


def test_tune_refuses_where_nothing_can_be_stored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WGPUCONV_CACHE_DIR", "photo.jpg/cache")
    text = sentence("tune", TINY)
    assert "nothing can be stored in the folder photo.jpg/cache" in text
    assert "Not a directory" in text
    assert "in WGPUCONV_CACHE_DIR" in text
    monkeypatch.setenv("WGPUCONV_CACHE_DIR", ".")
    other = sqlite3.connect(default_path())
    other.execute("CREATE TABLE other (x)")
    other.close()
    assert "is a database of another program" in sentence("tune", TINY)
    default_path().write_bytes(b"corrupt" * 1000)  # which tuning renames and replaces
    Store(default_path()).require_writable()


def test_tune_says_first_that_a_software_driver_is_not_measured(
    folder: Path, device: wgpuconv.Device
) -> None:
    if not device.facts.software:
        pytest.skip("a GPU is measured")
    done = invoke("tune", TINY)
    assert done.stderr.count("\n") == 1
    assert "--full measures it" in done.stderr
    assert "a software driver" not in done.stdout
    assert done.stdout.splitlines()[-1] == "Of 1, 0 stored, 1 guessed."
    assert "us" not in done.stdout.splitlines()[0].split()  # nothing was measured


@pytest.mark.parametrize(
    ("options", "mode"),
    [("", "auto"), ("--tune auto", "auto"), ("--tune full", "full"), ("--full", "full")],
)
def test_tune_takes_full_in_both_forms(
    options: str, mode: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def opened(spec: None, tune: Any, *, quiet: bool) -> None:
        asked.append(tune.value)
        raise DeviceLostError("enough")

    monkeypatch.setattr(tune, "open_device", opened)
    invoke("tune", TINY, *options.split(), status=1)
    assert asked == [mode]


def test_tune_refuses_both_modes_at_once(folder: Path) -> None:
    text = sentence("tune", TINY, "--full", "--tune", "auto")
    assert "--full and --tune auto exclude each other; give one of them" in text


def test_tune_shows_of_a_configuration_what_matters() -> None:
    config = {"tile_m": 32, "tm": 8, "tp": 8, "order": "snake", "last_barrier": True,
              "unroll": False, "splits": 1}  # fmt: skip
    assert tune._main_part(config) == {"tile_m": 32}
    assert tune._main_part({**config, "splits": 4}) == {"tile_m": 32, "splits": 4}


def test_a_model_is_tuned_by_its_layers(folder: Path) -> None:
    arguments = ["tune", "--onnx", "model.onnx", "--batch", "2", "--size", "9,11", "--json"]
    assert [(row["name"], row["problem"]) for row in json.loads(invoke(*arguments).stdout)] == [
        ("/a/conv", "conv2d f32 n2 c3 h9 w11 k4 r3 s3 stride1 pad0"),
        ("/b/conv", "conv2d f32 n2 c4 h7 w9 k4 r1 s1 stride1 pad0"),
    ]
    # Problems that are named come first, and take the batch too.
    (named,) = json.loads(invoke(*arguments, f"t: {TINY}", "--limit", "1").stdout)
    assert named["problem"] == TINY.replace("n1", "n2")
    wide = json.loads(invoke(*arguments, "--layout", "nhwc", "--size", "8").stdout)
    assert wide[0]["problem"].endswith("h8 w8 k4 r3 s3 stride1 pad0 nhwc")


def test_an_empty_cache_is_not_exported(folder: Path) -> None:
    assert "nothing was measured yet; run 'wgpuconv tune'" in sentence("cache", "export", "t.json")
    assert not (folder / "t.json").exists()
    text = invoke("cache", "info").stdout
    assert ": 0 problems, 0 B\n" in text
    assert "run 'wgpuconv tune'" in text


def test_what_is_known_is_not_imported_again(folder: Path) -> None:
    store_one()
    invoke("cache", "export", "tuning.json")
    assert "run 'wgpuconv tune'" not in invoke("cache", "info").stdout
    assert "0 of 1 problem new or better, 1 already known" in (
        invoke("cache", "import", "tuning.json").stdout
    )


def test_run_computes_float64_as_float32_and_says_so(folder: Path) -> None:
    np.save("w64.npy", np.load("w.npy").astype(np.float64))
    np.save("x64.npy", np.load("x.npy").astype(np.float64))
    invoke("run", "x.npy", "w.npy", "y.npy")
    done = invoke("run", "x64.npy", "w64.npy", "y64.npy")
    np.testing.assert_array_equal(np.load("y64.npy"), np.load("y.npy"))
    assert done.stderr == (
        "note: x64.npy holds float64, computed as float32\n"
        "note: w64.npy holds float64, computed as float32\n"
    )


def test_run_keeps_the_transparency_of_an_image(folder: Path) -> None:
    np.save("w4.npy", np.eye(4, 3, dtype=np.float32)[:, :, None, None])
    assert "1 or 3 channels make an image, got 4" in sentence("run", "photo.jpg", "w4.npy", "y.png")
    assert not (folder / "y.png").exists()
    write_image(folder / "clear.png", np.full((4, 6, 7), 0.5, np.float32))
    invoke("run", "clear.png", "blur", "y.png")
    assert read_image(folder / "y.png").shape == (4, 6, 7)


def test_devices_says_that_the_variable_names_none() -> None:
    done = program("devices", "--json", WGPUCONV_DEVICE="xyz")
    assert not any(row["default"] for row in json.loads(done.stdout))
    assert re.search(r"warning: .*'xyz' \(from .* variable WGPUCONV_DEVICE\)", done.stderr)


def test_cache_clear_asks(folder: Path) -> None:
    done = CliRunner().invoke(app, ["cache", "clear"], input="n\n")
    assert done.exit_code == 1
    assert "Forget 0 problems" in done.output


def test_bench_writes_all_it_measured(folder: Path) -> None:
    options = shlex.split("--algorithms direct --batch 2 --peers none --out b.json --json")
    done = invoke("bench", f"a: {TINY}", *options)
    found = json.loads(done.stdout)
    assert found == json.loads(Path("b.json").read_text(encoding="utf-8"))
    (only,) = found["results"]
    assert only["problem"] == TINY.replace("n1", "n2")
    assert [side["what"] for side in only["sides"]] == ["direct"]
    assert only["sides"][0]["call"] > 0
    assert found["devices"][0]["bandwidth"] > 0
    text = invoke("bench", TINY, "--algorithms", "direct", "--peers", "none").stdout
    assert "GFLOP/s" in text
    assert "geomean us" in text


def test_bench_takes_dtypes_rounds_and_measures(folder: Path, device: wgpuconv.Device) -> None:
    options = "--algorithms direct --peers none --rounds 2 --measure kernel --json"
    dtypes = "f32,f16" if device.facts.f16 else "f32"
    done = invoke("bench", f"a: {TINY}", *shlex.split(options), "--dtype", dtypes)
    found = json.loads(done.stdout)["results"]
    assert [result["problem"].split()[1] for result in found] == dtypes.split(",")
    assert all(len(side["samples"]) == 2 for result in found for side in result["sides"])
    assert all(side["call"] is None for result in found for side in result["sides"])


def test_bench_compares_with_a_baseline(folder: Path) -> None:
    pytest.importorskip("torch")
    options = "--algorithms direct --peers torch-cpu --baseline torch-cpu --measure kernel"
    text = invoke("bench", f"a: {TINY} bias", *shlex.split(options)).stdout
    assert text.count("/ torch-cpu") == 2  # in the problem's table, and in that of all
    assert "Fastest: " in text
    assert re.search(r"^wgpu f32 .*\b[01] of 1\b", text, re.M)


def test_bench_reads_a_model(folder: Path) -> None:
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper

    value, shape = helper.make_tensor_value_info, TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], name="first")],
        "g",
        [value("x", shape, [1, 3, 8, 8])],
        [value("y", shape, None)],
        [helper.make_tensor("w", shape, [4, 3, 3, 3], [0.1] * 108)],
    )
    onnx.save(helper.make_model(graph), "m.onnx")
    options = "--onnx m.onnx --algorithms direct --peers none --measure kernel --json"
    (only,) = json.loads(invoke("bench", *shlex.split(options)).stdout)["results"]
    assert (only["name"], only["problem"]) == (
        "first", "conv2d f32 n1 c3 h8 w8 k4 r3 s3 stride1 pad0"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("complete", "out", "expected"),
    [
        (1, "--out b.json", "interrupted: 1 of 2 problems are in b.json"),
        (1, "", "interrupted: 1 of 2 problems are complete"),
        (0, "--out b.json", "interrupted before the first problem was complete; b.json is as it"),
        (0, "--out new.json", "first problem was complete; no file was made"),
    ],
)
def test_an_interrupted_bench_keeps_and_says_what_it_has(
    complete: int, out: str, expected: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Session.measure

    def interrupted(*arguments: Any, **more: Any) -> Any:
        for _ in range(complete):
            yield next(plain(*arguments, **more))
        raise KeyboardInterrupt

    sample_run().save(Path("b.json"))
    earlier = Path("b.json").read_text(encoding="utf-8")
    monkeypatch.setattr(Session, "measure", interrupted)
    options = shlex.split("--algorithms direct --peers none")
    done = invoke("bench", TINY, TINY, *options, *shlex.split(out), status=130)
    assert expected in done.stderr
    found = Path("b.json").read_text(encoding="utf-8")
    if complete and out:
        assert len(json.loads(found)["results"]) == 1
    else:
        assert found == earlier
    assert not Path("new.json").exists()
    assert not list(folder.glob(".*"))


def test_a_result_that_cannot_be_written_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b.json"
    path.write_text("earlier", encoding="utf-8")

    def full(self: Path, *_: Any, **__: Any) -> None:
        self.write_bytes(b"{")
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        sample_run().save(path)
    assert path.read_text(encoding="utf-8") == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_the_help_of_bench_shows_its_options_and_what_reads_results() -> None:
    text = invoke("bench", "--help").stdout
    assert "Usage: wgpuconv bench [OPTIONS]" in text
    assert re.search("^ *report RESULT", text, re.M)
    assert re.search("^ *compare BEFORE AFTER", text, re.M)
    for option in ("--peers", "--baseline", "--onnx", "--device"):
        assert f" {option} " in text
    assert "Usage: wgpuconv bench compare [OPTIONS]" in invoke("bench", "compare", "-h").stdout


def test_bench_fails_where_something_fails(folder: Path) -> None:
    huge = "conv2d f32 n1 c4096 h4096 w4096 k1 r1 s1 stride1 pad0"
    done = invoke("bench", huge, "--peers", "none", status=1)
    assert "error: a problem or an algorithm failed" in done.stderr


def test_demo_writes_a_picture_and_compares(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "problems", lambda *, software: [parse_entry(f"tiny: {TINY}")])
    text = invoke("demo", "-o", "p.png").stdout
    assert str(folder / "p.png") in text.replace("\n", "")
    assert "The tuner takes" in text
    assert " run PHOTO.jpg sharpen out.png" in text.splitlines()[-1]
    assert "col2im" in text
    pixels = read_image(folder / "p.png")
    assert pixels.std() > 0.1
    found = json.loads(invoke("demo", "-o", "p.png", "--json").stdout)
    assert found["picture"] == "p.png"
    assert found["results"]


@pytest.mark.parametrize(
    ("script", "installed", "expected"),
    [
        ("{here}/.venv/bin/wgpuconv", True, "wgpuconv"),
        ("{here}/.venv/bin/wgpuconv", False, ".venv/bin/wgpuconv"),
        (".venv/bin/wgpuconv", False, ".venv/bin/wgpuconv"),
        ("/my tools/wgpuconv", False, "'/my tools/wgpuconv'"),
        ("/lib/wgpuconv/__main__.py", False, "/usr/bin/python3 -m wgpuconv"),
    ],
)
def test_what_the_demo_says_to_type_is_found_by_the_shell(
    script: str, installed: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script.format(here=tmp_path)])
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if installed else None)
    assert demo_command.program() == expected


# ---- errors and warnings ----


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("explain 'conv3d f32'", "a problem begins with 'conv2d'"),
        ("bench resnet18", "the suites are burn"),
        ("tune nothing.txt", "the suites are burn"),
        ("tune --onnx absent.onnx", "there is no model 'absent.onnx'"),
        ("tune --onnx photo.jpg", "'photo.jpg' is no ONNX model, as torch.onnx.export and"),
        ("tune --onnx model.onnx --batch 8", "give the size (--size 224,224)"),
        ("tune --onnx model.onnx --size 2x2", "as in 480,640, got '2x2'"),
        (f"tune '{TINY}' --size 9", "--size is for a model, given by --onnx"),
        (f"bench '{TINY}' --algorithms cudnn", "unknown algorithm 'cudnn'"),
        (f"bench '{TINY}' --peers tf", "no peer is named 'tf'; the peers are"),
        (f"bench '{TINY}' --peers none --baseline torch", "no baseline is named 'torch'; there"),
        (f"bench '{TINY}' --peers none --baseline torch-cuda", "the baseline torch-cuda is miss"),
        (f"bench '{TINY}' --measure time", "unknown measure 'time'; there are kernel, call"),
        (f"bench '{TINY}' -d wgpu -d wgpu", "the device 'wgpu' is named twice"),
        (f"bench '{TINY}' -d wgpu:99", "no device 'wgpu:99'"),
        ("bench --onnx absent.onnx", "absent.onnx"),
        ("bench report absent.json", "there is no result file absent.json"),
        ("bench report absent.json -o page.pdf", "a page's name ends in .html, got page.pdf"),
        ("bench model.onnx", "model.onnx is a model, not a list of problems; give it as --onnx"),
        (f"bench '{TINY}' --layout nwhc", "'nchw', 'nhwc' or 'channels_last', got 'nwhc'"),
        (f"explain '{TINY}' -a col2im", "does not apply"),
        (f"explain '{TINY}' -d wgpu:99", "no device 'wgpu:99'"),
        ("run absent.jpg blur y.png", "there is no file absent.jpg"),
        ("run PHOTO blur y.png", "there is no file PHOTO"),
        ("run x.npy absent.npy y.npy", "absent.npy: No such file or directory"),
        ("run x.npy w.npy y.xyz", "the output's name must end in .png, .jpg"),
        ("run model.onnx w.npy y.npy", "the input's name must end in .png, .jpg"),
        ("run photo.jpg bloom y.png", "the filters are blur"),
        ("run x.npy w.npy y.png", "1 or 3 channels make an image, got 5"),
        ("run x.npy w.npy y.npy --activation clip", "is written clip,low,high, as in clip,0,6"),
        ("run x.npy w.npy y.npy --activation relu,1", "activation relu is written relu, got"),
        ("explain resnet50", "got the suite 'resnet50'; tune and bench take suites"),
        (f"explain {TINY}", "put a problem's text in quotes"),
        (f"tune {TINY}", "put a problem's text in quotes"),
        (f"bench mine: {TINY}", "put a problem's text in quotes"),
        (f"tune '{TINY}' --dtype f64", "dtype must be f32, f16, bf16 or tf32, got 'f64'"),
        (f"explain '{TINY} dilation2'", "write dil2; the words are f32, f16, bf16, n, c, h,"),
        (f"explain '{TINY} act:clip,1'", "as in clip,0,6"),
        ("run x.npy w.npy y.npy --stride 1.5", "--stride takes whole numbers"),
        ("run x.npy w.npy y.npy --stride 0", "stride must be"),
        ("run x.npy w.npy y.npy --bias abc", "--bias must be an .npy file or a number"),
        ("run x.npy w.npy y.npy --activation tan", "unknown activation 'tan'"),
        ("run x.npy w.npy y.npy --layout NCWH", "layout must be"),
        ("run scalar.npy blur y.npy", "scalar.npy must hold an input of 4 dimensions (N, C, H, W)"),
        ("run scalar.npy w.npy y.npy --layout nhwc", "4 dimensions (N, H, W, C), or 3 without"),
        ("run x.npy scalar.npy y.npy", "4 dimensions (K, C/groups, R, S), got shape ()"),
        ("run x.npy scalar.npy y.npy --transpose", "4 dimensions (C, K/groups, R, S), got shape ("),
        ("run x.npy text.npy y.npy", "text.npy is no .npy file; an array of numbers is expected"),
        ("run x.npy zip.npy y.npy", "zip.npy is no .npy file; an array of numbers is expected"),
        ("run x.npy objects.npy y.npy", "objects.npy is an .npy file of Python objects, or"),
        ("run cut.npy w.npy y.npy", "or the rest of it is missing; an array of numbers is exp"),
        ("run x.npy w.npy y.npy --padding 1,2,3", "--padding takes a number, vertical,horizontal,"),
        ("run x.npy w.npy y.npy --padding reflect", "'valid' or 'same', in pixels, got 'reflect'"),
        ("run x.npy w.npy y.npy --padding ''", "--padding takes a number"),
        ("run x.npy w.npy y.npy --padding=-1", "--padding takes a number"),
        ("run x.npy w.npy y.npy --padding same --stride 2", "give the pixels of padding instead"),
        ("run x.npy w.npy y.npy --transpose --padding same", "or top,bottom,left,right, in pixels"),
        ("run x.npy w.npy y.npy --output-padding 1", "--output-padding is for --transpose"),
        ("run x.npy w.npy y.npy --stretch", "--stretch is for an image, got the output 'y.npy'"),
        ("run x.npy w.npy absent/y.npy", "absent/y.npy: No such file or directory"),
        ("run photo.jpg w.npy y.png", "channels"),
        ("cache import photo.jpg", "is no tuning bundle"),
        ("cache import absent.json", "cannot read the bundle absent.json"),
        ("demo -o absent/p.png", "absent/p.png: No such file or directory"),
        ("demo -o p.xyz", "must be an image file, got 'p.xyz'"),
        (f"bench '{TINY}' --out absent/b.json", "absent/b.json: No such file or directory"),
    ],
)
def test_an_error_is_one_sentence(arguments: str, expected: str, folder: Path) -> None:
    assert expected in sentence(*shlex.split(arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        "x.npy w.npy y.xyz",
        "x.txt w.npy y.npy",
        "absent.npy w.npy y.npy",
        "photo.jpg bloom y.png",
        "x.npy w.npy absent/y.npy",
        "x.npy scalar.npy y.npy",
        "scalar.npy w.npy y.npy",
        "x.npy w.npy y.npy --stretch",
        "x.npy w.npy y.npy --output-padding 1",
        "x.npy w.npy y.npy --stride 1.5",
        "x.npy w.npy y.npy --padding reflect",
        "x.npy w.npy y.npy --dilation a",
        "x.npy w.npy y.npy --bias abc",
        "x.npy w.npy y.npy --activation tan",
    ],
)
def test_run_opens_no_device_for_wrong_arguments(
    arguments: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "open_device", lambda *_, **__: pytest.fail("a device was opened"))
    assert sentence("run", *arguments.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["walk"],
        ["bench"],
        ["bench", "--json", "report", "x.json"],
        ["tune"],
        ["explain", TINY, "--tune", "maybe"],
        ["tune", TINY, "--tune", "off"],
        ["run", "x.npy"],
    ],
)
def test_wrong_usage_has_status_two(arguments: list[str]) -> None:
    done = invoke(*arguments, status=2)
    assert done.stdout == ""
    assert "Usage" in done.stderr


def test_an_error_wraps_at_words_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Console(stderr=True, highlight=False, force_terminal=True, no_color=True, width=40)
    monkeypatch.setattr(output, "err", terminal)
    output.complain("word " * 20)
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().err).splitlines()
    assert len(lines) == 3
    assert max(len(line) for line in lines) <= 40
    assert set(" ".join(lines).split()) == {"error:", "word"}


def test_a_line_of_stdout_wraps_at_words_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for terminal, count in ((True, 3), (False, 1)):
        console = Console(force_terminal=terminal, no_color=True, width=40)
        monkeypatch.setattr(output, "out", console)
        output.line("word " * 20)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == count
        assert set(" ".join(lines).split()) == {"word"}


def test_an_error_in_red_and_its_traceback_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise DeviceLostError("the device\nis lost")

    monkeypatch.setattr(wgpuconv.Device, "explain", lost)
    assert sentence("explain", TINY) == "error: the device is lost"
    done = CliRunner().invoke(app, ["--debug", "explain", TINY])
    assert isinstance(done.exception, DeviceLostError)
    monkeypatch.setenv("WGPUCONV_DEBUG", "1")
    assert isinstance(CliRunner().invoke(app, ["explain", TINY]).exception, DeviceLostError)


def test_a_warning_is_one_line_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = wgpuconv.Device.explain

    def warning(self: Any, *arguments: Any, **more: Any) -> Any:
        warnings.warn("something\nto know", UserWarning, stacklevel=2)
        return plain(self, *arguments, **more)

    monkeypatch.setattr(wgpuconv.Device, "explain", warning)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        done = invoke("explain", TINY, "--json")
    assert done.stderr == "warning: something to know\n"
    assert json.loads(done.stdout)


# ---- as a program ----


def program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.argv[0] = 'wgpuconv'; from wgpuconv.cli import main; main()"
    root = str(Path(wgpuconv.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


def test_json_is_all_that_a_program_sees() -> None:
    done = program("explain", TINY, "--json", "--tune", "off")
    # What wgpu 0.31 says of its own where there is no display.
    native = ("Unable to find extension", "No windowing system", "No config found")
    said = [line for line in done.stderr.splitlines() if not line.startswith(native)]
    assert (done.returncode, said) == (0, [])
    assert json.loads(done.stdout)["problem"] == TINY


def test_a_program_sees_an_error_without_a_traceback() -> None:
    done = program("bench", "resnet18")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: no suite or file is named 'resnet18'")
    shown = program("--debug", "bench", "resnet18")
    assert shown.returncode == 1
    assert "Traceback" in shown.stderr


def test_no_driver_is_said_in_a_sentence() -> None:
    # An ICD list that names nothing leaves the loader without a driver.
    nothing = {"VK_DRIVER_FILES": "/dev/null", "VK_ICD_FILENAMES": "/dev/null"}
    done = program("explain", TINY, **nothing)
    if done.returncode == 0:
        pytest.skip("this machine has an adapter that is not Vulkan's")
    assert done.returncode == 1
    assert "apt install mesa-vulkan-drivers" in done.stderr
    listed = program("devices", "--json", **nothing)
    assert listed.returncode == 0
    assert all(row["problem"] for row in json.loads(listed.stdout))
