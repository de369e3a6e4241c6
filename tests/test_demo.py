"""The demo: its filters do what they say, and its picture can be looked at."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from wgpuconv import Device, conv2d, conv_transpose2d
from wgpuconv.bench.result import ProblemResult, Side
from wgpuconv.demo import PANELS, PHOTOGRAPH, Panel, draw_sheet, filter_photograph, problems, why
from wgpuconv.errors import MissingExtraError, ProblemError
from wgpuconv.filters import FILTERS, bilinear, depthwise, kernel
from wgpuconv.images import pillow, read_image, write_image

pytest.importorskip("PIL")


@pytest.fixture(scope="module")
def panels(device: Device) -> list[Panel]:
    return list(filter_photograph(device))


def test_the_photograph_is_small_and_comes_with_its_licence() -> None:
    assert PHOTOGRAPH.stat().st_size < 150_000
    assert "CC0" in (PHOTOGRAPH.parent / "README.md").read_text(encoding="utf-8")
    assert read_image(PHOTOGRAPH).shape == (3, 296, 448)


def test_each_panel_shows_something_else(panels: list[Panel]) -> None:
    assert len(panels) == PANELS
    assert len({panel.title for panel in panels}) == PANELS
    for panel in panels:
        assert panel.values.shape[1:] == (296, 448)
        assert np.isfinite(panel.values).all()
        assert np.clip(panel.values, 0, 1).std() > 0.01, panel.title
    photograph = panels[0].values
    assert all(
        abs(panel.values.mean(axis=0) - photograph.mean(axis=0)).mean() > 0.005
        for panel in panels[1:]
    )


def test_the_panels_are_what_numpy_computes(panels: list[Panel]) -> None:
    by_title = {panel.title: panel.values for panel in panels}
    x = np.pad(by_title["photograph"].astype(np.float64), ((0, 0), (1, 1), (1, 1)))
    taps = kernel("sharpen")
    sharp = sum(taps[r, s] * x[:, r : r + 296, s : s + 448] for r in range(3) for s in range(3))
    # Nine products of at most five, so gamma(9) times the sum of sizes, which is at most nine.
    np.testing.assert_allclose(
        by_title["sharpen"], np.clip(sharp, 0, 1), rtol=0, atol=9 * 9 * 2.0**-24
    )
    # Way down and up: away from the border the mean of a smooth picture stays.
    inner = (slice(None), slice(16, -16), slice(16, -16))
    for title in ("down to an eighth", "and smoothly back up"):
        assert by_title[title][inner].mean() == pytest.approx(
            by_title["photograph"][inner].mean(), abs=0.01
        )


def test_the_sheet_is_a_picture(panels: list[Panel], tmp_path: Path) -> None:
    path = tmp_path / "sheet.png"
    draw_sheet(panels, "a device with a rather long name").save(path)
    pixels = read_image(path)
    assert pixels.shape[1] > 3 * 296
    assert pixels.shape[2] > 3 * 448
    assert pixels.std() > 0.1
    # The photograph stands where the first panel does, unchanged.
    top, left = 76, 24
    shown = pixels[:, top : top + 296, left : left + 448]
    np.testing.assert_allclose(shown, panels[0].values, atol=0.5 / 255)


def test_the_problems_differ_in_what_applies(device: Device) -> None:
    few, many = problems(software=True), problems(software=False)
    assert [e.name for e in few] == [e.name for e in many[: len(few)]]
    assert {e.problem.n for e in many} == {16}
    assert {e.problem.op for e in few} == {"conv2d", "conv_transpose2d"}
    refusals = [frozenset(device.survey(e.problem).refusals) for e in many]
    assert len(set(refusals)) == len(many)


def result(*times: tuple[str, float], choice: str) -> ProblemResult:
    sides = tuple(Side("wgpu", n, "f32", True, (t,), label=f"{n}()") for n, t in times)
    on = "wgpu"
    return ProblemResult(
        "a", "conv2d f32 n1 c1 h1 w1 k1 r1 s1", 1, 2, 12, sides,
        choice={on: f"{choice}()"}, source={on: "tuned"}, note={on: "measured today"},
    )  # fmt: skip


def test_the_choice_is_explained() -> None:
    text = why(result(("a", 1.0), ("b", 2.0), choice="a"))
    assert text == (
        "The tuner takes a, the fastest of those measured now (measured today); it is the fastest "
        "here."
    )
    assert "a took 50% of its time here" in why(result(("a", 1.0), ("b", 2.0), choice="b"))
    assert why(result(("a", 1.0), choice="b")).endswith("(measured today).")


# ---- filters and images ----


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_keeps_the_brightness_or_takes_it_away(name: str) -> None:
    assert kernel(name).sum() == (1 if name in ("blur", "sharpen", "emboss") else 0)


def test_an_unknown_filter_lists_those_there_are() -> None:
    with pytest.raises(ProblemError, match=r"'bloom'; the filters are blur, sharpen, .*sobel_y"):
        kernel("bloom")


def test_a_depthwise_weight_serves_each_channel(device: Device) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 1, (3, 6, 7)).astype(np.float32)
    y = conv2d(x, depthwise(kernel("laplacian"), 3), padding=1, groups=3, device=device)
    one = conv2d(x[1:2], depthwise(kernel("laplacian"), 1), padding=1, device=device)
    np.testing.assert_allclose(y[1:2], one, atol=9 * 2.0**-24 * 16)


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_bilinear_upsampling_keeps_an_even_picture(device: Device, factor: int) -> None:
    taps = bilinear(factor)
    padding = (len(taps) - factor) // 2
    x = np.full((1, 5, 6), 0.75, np.float32)
    y = conv_transpose2d(x, depthwise(taps, 1), stride=factor, padding=padding, device=device)
    assert y.shape == (1, 5 * factor, 6 * factor)
    inner = y[:, factor:-factor, factor:-factor]
    np.testing.assert_allclose(inner, 0.75, rtol=taps.size * 2.0**-24)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_an_image_comes_back_as_it_was_written(channels: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(channels)
    values = rng.integers(0, 256, (channels, 5, 4)).astype(np.float32) / np.float32(255)
    write_image(tmp_path / "x.png", values)
    np.testing.assert_array_equal(read_image(tmp_path / "x.png"), values)


@pytest.mark.parametrize(
    ("name", "values", "white"),
    [
        ("deep.png", np.array([[0, 257, 65535]], np.uint16), 65535),
        ("deep.pgm", np.array([[0, 257, 65535]], np.uint16), 65535),  # the mode of older pillows
        ("deep.tif", np.array([[0, 257, 65535]], np.uint16), 65535),
        ("signed.tif", np.array([[-5, 30000, 2**31 - 1]], np.int32), 2**31 - 1),
        ("float.tif", np.array([[0.0, 0.25, 1.0]], np.float32), 1),
    ],
)
def test_a_deep_image_is_not_cut_to_bytes(
    name: str, values: np.ndarray, white: float, tmp_path: Path
) -> None:
    pillow().fromarray(values).save(tmp_path / name)
    np.testing.assert_allclose(read_image(tmp_path / name), [values / white], rtol=1e-6)


def test_a_deep_image_of_unsigned_integers(tmp_path: Path) -> None:
    """Pillow reads them as signed, and writes no others: so the tag is changed that says which."""
    path = tmp_path / "x.tif"
    values = np.array([[0, 30000, 2**32 - 1]], np.uint32)
    pillow().fromarray(values.view(np.int32)).save(path)
    signed, unsigned = (struct.pack("<HHIH", 339, 3, 1, kind) for kind in (2, 1))
    data = path.read_bytes()
    assert data.count(signed) == 1
    path.write_bytes(data.replace(signed, unsigned))
    np.testing.assert_allclose(read_image(path), [values / (2**32 - 1)], rtol=1e-6)


def test_what_an_image_cannot_show_is_clipped(tmp_path: Path) -> None:
    values = np.array([[[-1.0, 0.5, 2.0, np.nan]]], np.float32)
    write_image(tmp_path / "x.png", values)
    np.testing.assert_array_equal(
        read_image(tmp_path / "x.png"), np.float32([[[0, 128 / 255, 1, 0]]])
    )


def test_images_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    broken = tmp_path / "x.png"
    broken.write_bytes(b"no image")
    with pytest.raises(ProblemError, match="cannot be read as an image"):
        read_image(broken)
    with pytest.raises(ProblemError, match="1, 3 or 4 channels, got 2"):
        write_image(tmp_path / "y.png", np.zeros((2, 3, 3), np.float32))
    with pytest.raises(ProblemError, match="no transparency"):
        write_image(tmp_path / "y.jpg", np.zeros((4, 3, 3), np.float32))


def test_without_pillow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'wgpuconv\[image\]'"):
        read_image(PHOTOGRAPH)
