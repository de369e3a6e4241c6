"""The page and the pictures of results: their numbers, hostile texts, and the page in a browser."""

from __future__ import annotations

import copy
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from bench_sample import sample_run
from browser import CHROMIUM, Browser
from typer.testing import CliRunner

from wgpuconv.bench import summary
from wgpuconv.bench.report import page, view
from wgpuconv.bench.result import PeerFacts, ProblemResult, Run, Side, load
from wgpuconv.cli.bench_report import report_command
from wgpuconv.errors import BenchError, MissingExtraError

TEXT = "conv2d f32 n1 c8 h16 w16 k8 r3 s3 stride1 pad1 bias"
HALF = TEXT.replace("f32", "f16")


def side(on: str, what: str, *samples: float, **more: Any) -> Side:
    return Side(on, what, more.pop("precision", "f32"), on in ("wgpu", "dawn"), samples, **more)


def result(*sides: Side, name: str = "a", text: str = TEXT, **more: Any) -> ProblemResult:
    return ProblemResult(name, text, more.pop("count", 1), 2000, 100, sides, **more)


def run(*results: ProblemResult, **more: Any) -> Run:
    """On the machine of the sample, whose baseline is torch-cuda."""
    return replace(sample_run(dtypes=()), results=results, **more)


# ---- the numbers ----


def test_the_baseline_is_the_best_that_did_the_same_work_without_loss() -> None:
    problem = result(
        side("torch-cuda", "tf32", 1.0, precision="tf32"),
        side("torch-cuda", "no bias", 2.0, same_work=False),
        side("torch-cuda", "prepared", 3.0, prepared=True),
        side("torch-cuda", "nchw", 4.0),
        side("torch-cuda", "channels_last", 5.0),
        side("torch-cuda", "broken", failure="no"),
    )
    found = summary.baseline_of(run(problem), problem)
    assert found is not None
    assert found.what == "nchw"
    assert summary.baseline_of(run(problem, baseline="ncnn"), problem) is None
    assert summary.baseline_of(run(problem, baseline=None), problem) is None


def test_the_standing_of_a_device() -> None:
    base = side("torch-cuda", "nchw", 1.0, 1.0, 1.0)
    whole = run(
        result(side("wgpu", "gemm", 0.25, 0.25, 0.25), base, name="faster"),
        result(side("wgpu", "gemm", 0.99, 1.0, 1.02), base, name="tied"),
        result(side("wgpu", "gemm", 2.0, 2.0, 2.0), base, name="slower"),
        result(base, name="not there"),
        result(side("wgpu", "gemm", 9.0, precision="f16"), text=HALF, name="f16"),
    )
    first = summary.groups(whole)[0]
    assert (first.name, first.dtype) == ("wgpu f32", "f32")
    found = summary.standing(first, whole)
    assert (found.wins, found.ties, found.losses, found.problems) == (1, 1, 1, 3)
    assert found.mean == pytest.approx((0.25 * 1.0 * 2.0) ** (1 / 3))
    assert (found.worst, found.worst_at) == (2.0, "slower")
    assert summary.total(first, whole) is None  # it lacks a problem
    (half,) = [group for group in summary.groups(whole) if group.dtype == "f16"]
    assert math.isnan(summary.standing(half, whole).mean)
    assert summary.total(half, whole) == 9.0


def test_a_total_counts_each_problem_as_often_as_the_network_has_it() -> None:
    whole = run(
        result(side("wgpu", "gemm", 1.0), count=3), result(side("wgpu", "gemm", 2.0), name="b")
    )
    assert summary.total(summary.groups(whole)[0], whole) == 5.0


def test_a_group_stands_against_each_other_one() -> None:
    whole = run(
        result(
            side("wgpu", "gemm", 1.0),
            side("torch-cuda", "nchw", 2.0),
            side("torch-cuda", "nchw tf32", 0.5, precision="tf32"),
        )
    )
    (row,) = view([("a", whole)])["runs"][0]["matrix"]
    assert {cell["against"]: cell["mean"] for cell in row["cells"]} == {
        "torch-cuda f32": 0.5,
        "torch-cuda tf32": 2.0,
    }


def test_there_is_no_leader_inside_the_spread() -> None:
    def leading(*sides: Side) -> list[str]:
        return [leader.name for leader in summary.leaders(result(*sides))]

    close = side("wgpu", "gemm", 1.0, 1.05, 1.1), side("dawn", "gemm", 1.04, 1.06, 1.1)
    assert leading(*close) == ["wgpu gemm", "dawn gemm"]
    assert leading(*close, side("wgpu", "direct", 2.0)) == ["wgpu gemm", "dawn gemm"]
    assert leading(close[0], side("dawn", "gemm", 1.06, 1.07)) == ["wgpu gemm"]
    less = side("torch-cuda", "nchw", 0.5, same_work=False)
    rough = side("torch-cuda", "nchw", 0.5, precision="tf32")
    assert leading(*close, less, rough) == ["wgpu gemm", "dawn gemm"]
    assert leading(less, rough, side("wgpu", "gemm", failure="no")) == []


def test_the_roofline_is_the_lower_of_bandwidth_and_rate() -> None:
    device = replace(sample_run(dtypes=()).devices[0], bandwidth=10.0, fma_rate=150.0)
    assert summary.attainable(device, result()) == 150.0  # at 20 operations a byte
    assert summary.attainable(device, replace(result(), flop=1000)) == 100.0
    assert summary.attainable(replace(device, bandwidth=None), result()) is None
    (only,) = view([("a", run(result(side("wgpu", "gemm", 20.0)), devices=(device,)))])["runs"]
    assert only["problems"][0]["sides"][0]["share"] == pytest.approx(2000 / 20 / 150)


def test_the_view_marks_what_stands_for_whom() -> None:
    problem = result(
        side("wgpu", "gemm", 1.0, label="gemm(a)"),
        side("wgpu", "direct", 2.0, label="direct(a)"),
        side("torch-cuda", "nchw", 4.0),
        choice={"wgpu": "direct(a)"},
    )
    (found,) = view([("a", run(problem))])["runs"][0]["problems"]
    assert [each["best"] for each in found["sides"]] == [True, False, True]
    assert [each["choice"] for each in found["sides"]] == [False, True, False]
    assert [each["ratio"] for each in found["sides"]] == [0.25, 0.5, 1.0]
    assert (found["baseline"], found["leaders"]) == (2, [0])


def test_a_result_without_any_time_is_shown_with_its_reasons() -> None:
    whole = run(
        result(failure="the device was lost"),
        result(side("wgpu", "gemm", failure="it hangs"), name="b"),
    )
    assert "the device was lost" in page([("a", whole)])
    assert view([("a", whole)])["runs"][0]["groups"] == []


def test_results_without_problems_or_in_common_are_refused() -> None:
    with pytest.raises(BenchError, match=r"empty\.json holds no problem"):
        page([("empty.json", run())])
    one, other = run(result(side("wgpu", "gemm", 1.0))), run(result(name="b"))
    with pytest.raises(BenchError, match="share no problem"):
        page([("a", one), ("b", other)])


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _places(value[key], (*path, key))


def test_a_broken_file_is_refused_in_a_sentence_or_shown(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    whole = run(
        result(side("wgpu", "gemm", 1.0, 1.1, error=1e-7), side("torch-cuda", "nchw", 2.0)),
        peers=(PeerFacts("torch-cuda", {"torch": "2"}),),
    )
    good = whole.to_json()
    refused = shown = 0
    for place in list(_places(json.loads(json.dumps(good)))):
        for value in (None, "x", -3, 0, 1.5, [], {}, True, math.nan, "absent"):
            broken = copy.deepcopy(json.loads(json.dumps(good)))
            *above, last = place
            holder = broken
            for key in above:
                holder = holder[key]
            if value == "absent":
                del holder[last]
            else:
                holder[last] = value
            path.write_text(json.dumps(broken), encoding="utf-8")
            try:
                page([("a", load(path))])
                shown += 1
            except BenchError:
                refused += 1
    assert refused > 200
    assert shown > 200


# ---- the page as text ----


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = page([("a.json", sample_run()), ("b.json", sample_run(scale=1.1))])
    assert set(re.findall(r"https?://[^\s\"']*", text)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text
    assert not re.search(r"<(link|script|img|iframe)[^>]+(src|href)=\"(?!data:)", text)


def test_the_same_results_make_the_same_page() -> None:
    assert page([("a", sample_run())]) == page([("a", sample_run())])


HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>&\"$x"


def hostile() -> Run:
    whole = run(
        result(
            side("wgpu", HOSTILE, 1.0, label=HOSTILE),
            side("wgpu", "direct", failure=HOSTILE),
            side(HOSTILE, HOSTILE, 2.0),
            name=HOSTILE,
            refusals={HOSTILE: HOSTILE},
            failure=HOSTILE,
        ),
        method=HOSTILE,
        machine={HOSTILE: HOSTILE},
        commit=HOSTILE,
        date=HOSTILE,
        peers=(PeerFacts(HOSTILE, {HOSTILE: HOSTILE}, HOSTILE), PeerFacts("b", absent=HOSTILE)),
        baseline=HOSTILE,
    )
    return replace(whole, devices=(replace(whole.devices[0], adapter=HOSTILE, driver=HOSTILE),))


def test_no_text_of_a_file_becomes_markup() -> None:
    text = page([(HOSTILE, hostile()), (HOSTILE, hostile())])
    assert text.count("</script>") == 2
    assert "<img" not in text
    found = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    assert json.loads(found[1])["runs"][0]["method"] == HOSTILE


# ---- the pictures ----


def test_pictures_are_drawn_for_each_dtype(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from PIL import Image

    from wgpuconv.bench.plots import draw

    written = draw(sample_run(), tmp_path)
    names = {f"{n}-{d}" for n in ("bars", "roofline", "error") for d in ("f32", "f16")}
    assert {path.name for path in written} == {f"{n}.{s}" for n in names for s in ("png", "svg")}
    for path in written:
        if path.suffix == ".png":
            with Image.open(path) as picture:
                assert min(picture.size) > 400
                assert len(picture.convert("RGB").getcolors(1 << 20) or ()) > 20
        else:
            texts = "".join(ElementTree.parse(path).getroot().itertext())
            assert "onnxruntime-webgpu" in texts


def test_pictures_without_a_baseline_show_times(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from wgpuconv.bench.plots import draw

    bare = run(result(side("wgpu", "gemm", 1e-3, error=1e-7)), baseline=None)
    first = {path: path.read_bytes() for path in draw(bare, tmp_path)}
    assert {path: path.read_bytes() for path in draw(bare, tmp_path)} == first
    bars = "".join(ElementTree.parse(tmp_path / "bars-f32.svg").getroot().itertext())
    assert "µs" in bars
    with pytest.raises(BenchError, match="no timed side"):
        draw(run(result()), tmp_path)


def test_without_matplotlib_the_error_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wgpuconv.bench.plots import draw

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'wgpuconv\[bench\]'"):
        draw(sample_run(), tmp_path)


# ---- the command ----


def test_the_command_writes_the_page_and_the_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = typer.Typer()
    app.command()(report_command)

    def invoke(*arguments: str) -> Any:
        return CliRunner().invoke(app, list(arguments))

    monkeypatch.chdir(tmp_path)
    sample_run(dtypes=("f32",)).save(Path("a.json"))
    done = invoke("a.json")
    assert done.exit_code == 0, done.output
    assert "report.html" in done.stdout
    text = Path("report.html").read_text(encoding="utf-8")
    assert text == page([("a.json", sample_run(dtypes=("f32",)))])
    assert invoke("a.json", "a.json", "-o", "two.html").exit_code == 0
    assert "two.html" in {path.name for path in tmp_path.iterdir()}
    assert isinstance(invoke("a.json", "-o", "nowhere/x.html").exception, FileNotFoundError)
    assert isinstance(invoke("b.json").exception, BenchError)
    assert invoke().exit_code == 2
    pytest.importorskip("matplotlib")
    done = invoke("a.json", "--plots", "pictures", "-o", "three.html")
    assert done.exit_code == 0, done.output
    assert len(list(Path("pictures").iterdir())) == 6


# ---- the page in a browser ----

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages by what they show."""
    folder = tmp_path_factory.mktemp("pages")
    one, other = sample_run(), sample_run(scale=1.1, seed=1)
    bare = run(
        result(side("wgpu", "gemm", 1e-3, 1.1e-3), failure=None, name=""),
        result(failure="the device was lost", name="b"),
        baseline=None,
        peers=(),
    )
    made = {
        "one": [("a.json", one)],
        "two": [("a.json", one), ("b.json", other)],
        "bare": [("bare.json", bare)],
        "nothing": [("n.json", run(result(failure="the device was lost")))],
        "hostile": [(HOSTILE, hostile()), (HOSTILE, hostile())],
    }
    for name, results in made.items():
        (folder / f"{name}.html").write_text(page(results), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


def column(browser: Browser, table: str, number: int) -> list[str]:
    """The texts of a column of the first table in an element."""
    found: list[str] = browser.run(
        f"[...document.querySelector('#{table} table').tBodies[0].rows]"
        f".map((row) => row.cells[{number}].textContent)"
    )
    return found


SPREAD_OUT = "[...document.querySelectorAll('details')].forEach((each) => { each.open = true; })"
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@in_browser
@pytest.mark.parametrize("name", ["one", "two", "bare", "nothing", "hostile"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True)])
def test_the_page_opens_cleanly_and_fits(
    browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    browser.open(pages[name], width=width, height=760, dark=dark)
    assert browser.run(WIDER) == 0
    browser.run(SPREAD_OUT)
    assert browser.run(WIDER) == 0
    assert browser.complaints() == []
    assert browser.requests() == [pages[name].as_uri()]
    assert browser.run("window.hacked") is None
    assert "null" not in browser.run("document.querySelector('main').innerText")
    assert "undefined" not in browser.run("document.querySelector('main').innerText")
    assert "NaN" not in browser.run("document.body.outerHTML.replace(/<script.*/s, '')")


@in_browser
def test_the_numbers_are_those_of_the_result(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"])
    whole = sample_run()
    group = summary.groups(whole)[0]
    mean = f"{summary.standing(group, whole).mean:.2f}"
    assert browser.run("document.querySelector('.tile b').textContent") == f"{mean} ×"
    expected = []
    for each in whole.results[:14]:
        best, base = group.best(each), summary.baseline_of(whole, each)
        assert best is not None
        expected.append(f"{summary.ratio(best, base) or 0:.2f}")
    assert column(browser, "overview", 2) == expected
    # A bar for all but the baseline: 4 groups on f32 and 3 on f16 problems.
    assert browser.run("document.querySelectorAll('#bars rect').length") == 14 * (4 + 3)
    assert browser.run("document.querySelectorAll('#roofline .mark').length") == 14 * (5 + 4)
    assert browser.run("document.querySelectorAll('#error .mark').length") == 14 * (5 + 4)


@in_browser
def test_tables_are_sorted_from_the_keyboard(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"])
    heading = "document.querySelector('#overview thead').rows[0].cells[1]"
    assert column(browser, "overview", 0)[:3] == ["c0", "c1", "c2"]
    browser.run(f"{heading}.querySelector('button').focus()")
    browser.press("Enter")
    sizes = [float(text) for text in column(browser, "overview", 1)]
    assert sizes == sorted(sizes)
    assert sizes[0] != sizes[-1]
    assert browser.run(f"{heading}.getAttribute('aria-sort')") == "ascending"
    browser.press(" ")
    assert [float(text) for text in column(browser, "overview", 1)] == sizes[::-1]
    assert browser.run(f"{heading}.getAttribute('aria-sort')") == "descending"
    browser.press("Tab")
    browser.press("Enter")
    assert browser.run(f"{heading}.getAttribute('aria-sort')") is None
    ratios = [float(text) for text in column(browser, "overview", 2)]
    assert ratios == sorted(ratios)
    browser.run("document.querySelector('#overview thead button').click()")
    names = [f"c{number}" for number in range(14)]  # c10 behind c9
    assert column(browser, "overview", 0) == names


@in_browser
def test_filters(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"])

    def headings() -> list[str]:
        script = "[...document.querySelectorAll('#overview th button')].map((b) => b.textContent)"
        found: list[str] = browser.run(script)
        return found

    assert headings().count("dawn") == 2  # a table for each dtype
    browser.run("document.querySelector('[value=\"dawn f32\"]').click()")
    assert headings().count("dawn") == 1
    assert browser.run("document.querySelectorAll('#bars rect').length") == 14 * (3 + 3)
    change = "document.getElementById('{}').value = '{}'; document.getElementById('{}')"
    dispatch = ".dispatchEvent(new Event('{}'))"
    browser.run(change.format("dtype", "f16", "dtype") + dispatch.format("change"))
    assert browser.run("document.querySelectorAll('#overview table').length") == 1
    browser.run(change.format("find", "stride2 C4", "find") + dispatch.format("input"))
    assert column(browser, "overview", 0) == ["c4"]
    assert browser.run("document.querySelectorAll('#problems > details').length") == 1
    browser.run(change.format("measure", "time", "measure") + dispatch.format("change"))
    assert float(column(browser, "overview", 2)[0].replace(",", "")) > 100  # microseconds
    browser.run(change.format("find", "nonsense", "find") + dispatch.format("input"))
    assert "No problem matches" in browser.run("document.getElementById('overview').innerText")
    assert browser.complaints() == []


@in_browser
def test_regressions_are_marked_and_any_result_can_be_shown(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["two"])
    told = browser.run("document.getElementById('comparisons').innerText")
    assert "+10.0 % time in geometric mean" in told
    assert "56 slower, 0 faster, 0 the same" in told
    assert set(column(browser, "comparisons", 4)) == {"slower"}
    tile = "document.querySelector('.tile b').textContent"
    newer = browser.run(tile)
    browser.run("const s = document.getElementById('result'); s.value = '0'; "
                "s.dispatchEvent(new Event('change'))")  # fmt: skip
    assert float(newer.split()[0]) > float(browser.run(tile).split()[0])
    browser.open(pages["one"])
    assert browser.run("document.getElementById('differences').hidden") is True


@in_browser
def test_all_sides_of_a_problem_with_their_notes(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"])
    assert browser.run("document.querySelectorAll('#problems table').length") == 0
    browser.run("document.getElementById('open-all').click()")
    browser.run("new Promise((done) => setTimeout(done, 100))")
    assert browser.run("document.querySelectorAll('#problems > details[open]').length") == 28
    first = "document.querySelector('#problems .inside')"
    badges = browser.run(f"[...{first}.querySelectorAll('.badge')].map((b) => b.textContent)")
    expected = {"baseline", "prepared", "no bias", "fastest", "choice", "failed"}
    assert set(badges) == expected
    assert "needs a buffer of 1.0 GiB" in browser.run(f"{first}.innerText")
    explained = browser.run("document.querySelector('dl.words:not(#run dl)').innerText")
    for word in ("prepared", "tie", "no bias", "ratio", "choice", "error"):
        assert word in explained


@in_browser
@pytest.mark.parametrize("dark", [False, True])
def test_texts_stand_out_from_the_background(
    browser: Browser, pages: dict[str, Path], dark: bool
) -> None:
    browser.open(pages["one"], dark=dark)
    names = ("paper", "panel", "ink", "dim", "accent", "good", "bad")
    script = "getComputedStyle(document.documentElement).getPropertyValue('--{}').trim()"
    colours = {name: browser.run(script.format(name)) for name in names}
    light = {name: _luminance(colour) for name, colour in colours.items()}
    assert (light["paper"] < 0.1) == dark
    for text in ("ink", "dim", "accent", "good", "bad"):
        for ground in ("paper", "panel"):
            low, high = sorted((light[text], light[ground]))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)  # WCAG 2.1, level AA


def _luminance(colour: str) -> float:
    """Relative luminance of #rgb or #rrggbb, as WCAG defines it."""
    digits = colour.removeprefix("#")
    digits = "".join(2 * d for d in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@in_browser
def test_everything_that_can_be_used_has_a_name(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["two"])
    nodes = browser.send("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "checkbox", "combobox", "searchbox", "table", "image", "region", "form"}
    found: dict[str, list[str]] = {}
    for node in nodes:
        role = node.get("role", {}).get("value")
        if role in roles and not node.get("ignored"):
            found.setdefault(role, []).append(node.get("name", {}).get("value", ""))
    assert {"button", "checkbox", "combobox", "searchbox", "table", "image"} <= set(found)
    assert {role: names.count("") for role, names in found.items() if "" in names} == {}
