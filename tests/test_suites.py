"""The suites of problems: each network as it was published, counted against its known totals."""

from __future__ import annotations

from pathlib import Path

import pytest

from wgpuconv import ConvProblem
from wgpuconv.errors import DtypeError, ProblemError
from wgpuconv.suites import Entry, gather, load_suite, parse_entry, parse_suite, suite_names, varied

TEXT = "conv2d f32 n1 c4 h8 w8 k8 r3 s3 stride1 pad1"


def total(name: str, what: str) -> int:
    """Multiply-adds, weights or parameters (weights and biases) of a whole network."""
    sums = {
        "multiply_adds": lambda p: p.multiply_adds,
        "weights": lambda p: p.weight_bytes // p.itemsize,
        "parameters": lambda p: p.weight_bytes // p.itemsize + p.k,
    }
    return sum(entry.count * sums[what](entry.problem) for entry in load_suite(name))


def test_the_suites_are_there() -> None:
    assert suite_names() == ["burn", "craft", "mobilenet_v2", "resnet50", "unet"]


@pytest.mark.parametrize("name", ["burn", "craft", "mobilenet_v2", "resnet50", "unet"])
def test_every_problem_is_named_biased_and_listed_once(name: str) -> None:
    entries = load_suite(name)
    assert len({entry.name for entry in entries}) == len(entries)
    assert len({entry.problem for entry in entries}) == len(entries)
    assert all(entry.name and entry.problem.bias for entry in entries)
    assert {entry.problem.n for entry in entries} == {16 if name == "burn" else 1}
    for entry in entries:
        assert ConvProblem.parse(str(entry.problem)) == entry.problem


# The parameters are those of the published models, without fully connected and batch norm layers:
# ResNet-50 25,557,032 - 2,049,000 - 53,120; MobileNetV2 3,504,872 - 1,281,000 - 34,112.
@pytest.mark.parametrize(
    ("name", "layers", "weights"),
    [("resnet50", 53, 23_454_912), ("mobilenet_v2", 52, 2_189_760)],
)
def test_layers_and_weights(name: str, layers: int, weights: int) -> None:
    assert sum(entry.count for entry in load_suite(name)) == layers
    assert total(name, "weights") == weights


# U-Net: 31,030,658 with one input channel and two classes. CRAFT: 20,770,466 of which 10,304
# belong to batch norm.
@pytest.mark.parametrize(("name", "parameters"), [("unet", 31_030_658), ("craft", 20_760_162)])
def test_parameters(name: str, parameters: int) -> None:
    assert total(name, "parameters") == parameters


# Published with one decimal or two; the fully connected layers are 0.002 and 0.001 of them.
@pytest.mark.parametrize(("name", "giga"), [("resnet50", 4.089), ("mobilenet_v2", 0.301)])
def test_multiply_adds(name: str, giga: float) -> None:
    assert total(name, "multiply_adds") / 1e9 == pytest.approx(giga, abs=0.003)


def test_the_backbone_of_craft_is_vgg16() -> None:
    backbone = [e for e in load_suite("craft") if e.name.startswith("conv") and "_" in e.name]
    at_768 = sum(entry.count * entry.problem.multiply_adds for entry in backbone)
    # VGG16's convolutions take 15.347 G at 224 x 224, conv5_3, which is not used, among them.
    assert sum(entry.count for entry in backbone) == 12
    at_224 = at_768 * (224 / 768) ** 2 + 14 * 14 * 512 * 512 * 9
    assert at_224 / 1e9 == pytest.approx(15.347, abs=0.001)
    dilated = [entry.problem for entry in load_suite("craft") if entry.problem.dilation != (1, 1)]
    assert [(p.dilation, p.padding, p.out_h) for p in dilated] == [
        ((6, 6), (6, 6, 6, 6), p.h) for p in dilated
    ]
    assert len(dilated) == 1


def test_the_layers_of_a_network_follow_each_other() -> None:
    # The decoder of U-Net: each transposed convolution doubles, each 3x3 one takes two pixels off.
    sizes = [(e.name, e.problem.h, e.problem.out_h) for e in load_suite("unet")]
    before = None
    for name, size, out in sizes:
        if before is not None and not name.endswith("conv1") and name != "head":
            assert size == before, name
        assert out == (2 * size if "upconv" in name else size if name == "head" else size - 2)
        before = out
    assert sizes[-1] == ("head", 388, 388)


def test_mobilenet_has_its_depthwise_layers() -> None:
    depthwise = [e for e in load_suite("mobilenet_v2") if e.problem.groups > 1]
    assert sum(entry.count for entry in depthwise) == 17
    assert all(e.problem.groups == e.problem.c == e.problem.k for e in depthwise)


def test_the_burn_suite_is_what_burn_bench_runs() -> None:
    shapes = [
        (p.c, p.h, p.w, p.k, p.r, p.stride[0]) for p in (e.problem for e in load_suite("burn"))
    ]
    assert len(shapes) == 14
    assert shapes[0] == (16, 512, 512, 16, 3, 1)
    assert shapes[4] == (64, 224, 224, 64, 7, 2)
    assert shapes[13] == (96, 224, 224, 64, 1, 1)
    flop = 2 * total("burn", "multiply_adds")
    assert flop / 1e9 == pytest.approx(170.07, abs=0.01)


def test_a_line_has_a_name_a_problem_and_a_count() -> None:
    assert parse_entry(TEXT) == Entry("", ConvProblem.parse(TEXT), 1)
    found = parse_entry(f"layer1.0: {TEXT} act:relu x3")
    assert (found.name, found.count) == ("layer1.0", 3)
    assert found.problem.activation.name == "relu"


def test_comments_and_empty_lines_are_left_out() -> None:
    assert len(parse_suite(f"# a\n\n{TEXT} # b\n", "here")) == 1


def test_an_error_names_the_suite_and_the_line() -> None:
    with pytest.raises(ProblemError, match=r"here, line 2: a problem needs"):
        parse_suite(f"{TEXT}\nconv2d f32 n1 c4", "here")
    with pytest.raises(ProblemError, match="here holds no problem"):
        parse_suite("# nothing\n", "here")
    with pytest.raises(ProblemError, match="count must be at least 1, got x0"):
        parse_entry(f"{TEXT} x0")


def test_an_unknown_suite_lists_those_there_are() -> None:
    with pytest.raises(ProblemError, match=r"'resnet18'; the suites are burn, craft, .*unet"):
        load_suite("resnet18")


def test_a_file_of_that_form_is_a_suite(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text(f"a: {TEXT}\n", encoding="utf-8")
    assert [entry.name for entry in load_suite(str(mine))] == ["a"]
    mine.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ProblemError, match="cannot be read as a list of problems"):
        load_suite(str(mine))


def test_suites_and_problems_are_gathered_in_order() -> None:
    found = gather(["unet", f"mine: {TEXT}", TEXT])
    assert [entry.name for entry in found[-2:]] == ["mine", ""]
    assert len(found) == len(load_suite("unet")) + 2


def test_a_problem_without_its_quotes_is_told() -> None:
    for words in (TEXT.split(), ["mine:", *TEXT.split()], ["unet", *TEXT.split()]):
        with pytest.raises(ProblemError, match="in quotes"):
            gather(words)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("dilation2", "dil2"),
        ("padding1,2", "pad1,2"),
        ("output_padding1", "outpad1"),
        ("stride=2", "stride2"),
        ("strides2x3", "stride2,3"),
        ("group4", "groups4"),
        ("f64", "f32 or f16"),
        ("float32", "f32 or f16"),
        ("relu", "act:relu"),
        ("act=clip,0,1", "act:clip,0,1"),
        ("NHWC", "nhwc"),
    ],
)
def test_a_word_that_is_nearly_right_is_told(word: str, meant: str) -> None:
    text = TEXT.replace(" stride1 pad1", f" {word}")
    with pytest.raises(ProblemError, match=rf"cannot read '{word}' in .*; write {meant}; the wor"):
        ConvProblem.parse(text)


def test_other_words_are_answered_with_those_there_are() -> None:
    with pytest.raises(ProblemError, match=r"zzz'; the words are .*outpad.*act:NAME; an example"):
        ConvProblem.parse(f"{TEXT} zzz")


def test_a_problem_is_varied() -> None:
    entry = Entry("a", ConvProblem.parse(TEXT), 2)
    changed = varied(entry, batch=4, dtype="f16", layout="nhwc")
    assert str(changed.problem) == TEXT.replace("f32 n1", "f16 n4") + " nhwc"
    assert (changed.name, changed.count) == ("a", 2)
    assert varied(entry) == entry
    with pytest.raises(DtypeError, match="dtype must be f32 or f16, got 'f64'"):
        varied(entry, dtype="f64")
    with pytest.raises(ProblemError):
        varied(entry, layout="nwhc")
