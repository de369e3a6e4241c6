"""The suites of problems: each network as it was published, counted against its known totals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from wgpuconv import ConvProblem
from wgpuconv.errors import DtypeError, ProblemError
from wgpuconv.problem import _NUMBERED, _WORDS, DTYPES
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


SUITES = (
    "burn",
    "craft",
    "dcgan",
    "deeplabv3",
    "efficientnet_b0",
    "fsrcnn",
    "mobilenet_v2",
    "resnet50",
    "unet",
    "vgg16",
)


def test_the_suites_are_there() -> None:
    assert suite_names() == list(SUITES)


@pytest.mark.parametrize("name", SUITES)
def test_every_problem_is_named_biased_and_listed_once(name: str) -> None:
    entries = load_suite(name)
    assert len({entry.name for entry in entries}) == len(entries)
    assert len({entry.problem for entry in entries}) == len(entries)
    assert all(entry.name and entry.problem.bias for entry in entries)
    assert {entry.problem.n for entry in entries} == {16 if name == "burn" else 1}
    for entry in entries:
        assert ConvProblem.parse(str(entry.problem)) == entry.problem


# The parameters are those of the published models, without fully connected and batch norm layers:
# ResNet-50 25,557,032 - 2,049,000 - 53,120; MobileNetV2 3,504,872 - 1,281,000 - 34,112; the
# generator of DCGAN in PyTorch's examples 3,576,704 - 1,920. FSRCNN's are in its paper's table 2.
@pytest.mark.parametrize(
    ("name", "layers", "weights"),
    [
        ("resnet50", 53, 23_454_912),
        ("mobilenet_v2", 52, 2_189_760),
        ("dcgan", 5, 3_574_784),
        ("fsrcnn", 8, 12_464),
    ],
)
def test_layers_and_weights(name: str, layers: int, weights: int) -> None:
    assert sum(entry.count for entry in load_suite(name)) == layers
    assert total(name, "weights") == weights


# U-Net: 31,030,658 with one input channel and two classes. CRAFT: 20,770,466 of which 10,304
# belong to batch norm. VGG16: 138,357,544 of which 123,642,856 are fully connected.
@pytest.mark.parametrize(
    ("name", "parameters"), [("unet", 31_030_658), ("craft", 20_760_162), ("vgg16", 14_714_688)]
)
def test_parameters(name: str, parameters: int) -> None:
    assert total(name, "parameters") == parameters


# As torchvision publishes them with its weights, to three decimals, but for what is no convolution
# of the suite: the fully connected layers, and DeepLabV3's auxiliary head.
@pytest.mark.parametrize(
    ("name", "published", "others"),
    [
        ("resnet50", 4.089, 2048 * 1000),
        ("mobilenet_v2", 0.301, 1280 * 1000),
        ("efficientnet_b0", 0.386, 1280 * 1000),
        ("vgg16", 15.47, 25088 * 4096 + 4096 * 4096 + 4096 * 1000),
        ("deeplabv3", 178.722, 65 * 65 * 256 * (1024 * 9 + 21)),
    ],
)
def test_multiply_adds(name: str, published: float, others: int) -> None:
    giga = (total(name, "multiply_adds") + others) / 1e9
    assert giga == pytest.approx(published, abs=0.0006)


JOINED = {
    # Four branches of spatial pyramid pooling and the pooled one, 256 channels each.
    ("deeplabv3", "aspp.project"),
}
"""Layers whose input joins more than two others'."""


@pytest.mark.parametrize("name", [name for name in SUITES if name != "burn"])
def test_each_layer_takes_what_earlier_ones_made(name: str) -> None:
    """Its input's channels and size are those of an earlier output: as it is, pooled (by two or to
    a pixel), upsampled by two, or joined to another's channels."""
    first, *others = load_suite(name)
    made = {(first.problem.k, first.problem.out_h, first.problem.out_w)}
    for entry in others:
        p = entry.problem
        sizes = {
            channels
            for channels, h, w in made
            if (p.h, p.w) in ((h, w), (-(-h // 2), -(-w // 2)), (1, 1), (2 * h, 2 * w))
        }
        joined = {a + b for a in sizes for b, *_ in made}
        assert p.c in sizes | joined or (name, entry.name) in JOINED, entry.name
        made.add((p.k, p.out_h, p.out_w))


@pytest.mark.parametrize("name", ["dcgan", "fsrcnn", "vgg16"])
def test_a_chain_of_layers_has_no_gap(name: str) -> None:
    before, *others = load_suite(name)
    for entry in others:
        previous, p = before.problem, entry.problem
        pooled = 2 if name == "vgg16" and entry.name.endswith("_1") else 1
        made = (previous.k, previous.out_h // pooled, previous.out_w // pooled)
        assert (p.c, p.h, p.w) == made, entry.name
        before = entry


def test_what_generators_make() -> None:
    sizes = [(e.problem.out_h, e.problem.out_w) for e in load_suite("dcgan")]
    assert sizes == [(4, 4), (8, 8), (16, 16), (32, 32), (64, 64)]
    assert load_suite("fsrcnn")[-1].problem.out_shape == (1, 1, 1080, 1920)


def test_what_each_network_is_there_for() -> None:
    """5x5 depthwise layers, dilated ones, transposed ones that overlap."""
    efficient = [e for e in load_suite("efficientnet_b0") if e.problem.groups > 1]
    assert sum(e.count for e in efficient) == 16
    assert sum(e.count for e in efficient if e.problem.r == 5) == 9
    dilations = {e.problem.dilation[0] for e in load_suite("deeplabv3")}
    assert dilations == {1, 2, 4, 12, 24, 36}
    overlapping = [
        e
        for name in ("dcgan", "fsrcnn")
        for e in load_suite(name)
        if e.problem.transposed and e.problem.r > e.problem.stride[0]
    ]
    assert len(overlapping) == 6


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
    with pytest.raises(ProblemError, match="is no list of problems, a text with one a line"):
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
        ("f64", "f32 or f16 or bf16"),
        ("float32", "f32 or f16 or bf16"),
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
    last = varied(entry, layout="channels_last").problem
    assert (last.layout, last.weight_last) == ("NHWC", True)
    assert not varied(Entry("", last, 1), layout="nhwc").problem.weight_last
    changed = varied(entry, batch=4, dtype="f16", layout="nhwc")
    assert str(changed.problem) == TEXT.replace("f32 n1", "f16 n4") + " nhwc"
    assert (changed.name, changed.count) == ("a", 2)
    assert varied(entry) == entry
    tf32 = varied(entry, dtype="tf32")
    assert (tf32.problem.dtype, tf32.problem.precision) == ("f32", "tf32")
    assert varied(tf32) == tf32
    assert varied(tf32, dtype="f16") == varied(entry, dtype="f16")
    with pytest.raises(DtypeError, match="dtype must be f32, f16, bf16 or tf32, got 'f64'"):
        varied(entry, dtype="f64")
    with pytest.raises(ProblemError):
        varied(entry, layout="nwhc")


def test_the_table_of_words_has_all() -> None:
    text = (Path(__file__).parent.parent / "bench" / "README.md").read_text(encoding="utf-8")
    table = text.partition("| word |")[2].partition("\n\n")[0]
    words = {word for row in table.splitlines() for word in re.findall(r"`([^`]*)`", row)}
    assert words >= {*DTYPES, *_WORDS}
    assert {*_NUMBERED} <= {word.rstrip("0123456789,") for word in words}
