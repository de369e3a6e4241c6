"""The convolutions of ONNX models, held against onnx's own evaluator; and what is refused."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference

from wgpuconv.errors import MissingExtraError, ModelWarning, ProblemError
from wgpuconv.onnx_model import read_model
from wgpuconv.suites import Entry, load_suite, parse_entry

onnx = pytest.importorskip("onnx")
evaluator = pytest.importorskip("onnx.reference")
helper, FLOAT = onnx.helper, onnx.TensorProto.FLOAT

W3 = ("w", (8, 3, 3, 3))
"""The kernel of most models here: from 3 to 8 channels."""


def weight(name: str, shape: tuple[int, ...], dtype: int = FLOAT) -> Any:
    size = {FLOAT: 4, onnx.TensorProto.FLOAT16: 2, onnx.TensorProto.DOUBLE: 8}[dtype]
    return helper.make_tensor(name, dtype, shape, bytes(int(np.prod(shape)) * size), raw=True)


def value(name: str, shape: Any, dtype: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def save(
    folder: Path,
    nodes: list[Any],
    *weights: Any,
    x: Any = (1, 3, 8, 9),
    inputs: tuple[Any, ...] = (),
    outputs: tuple[str, ...] = (),
    opset: int = 20,
    **more: Any,
) -> Path:
    """Writes a model; its outputs are those named, or the last node's."""
    names = outputs or (nodes[-1].output[0],)
    graph = helper.make_graph(
        nodes,
        "g",
        [*([value("x", x)] if x else []), *inputs],
        [value(name, None) for name in names],
        [weight(*w) if isinstance(w, tuple) else w for w in weights],
        value_info=more.pop("value_info", None),
    )
    opsets = [helper.make_opsetid("", opset), *more.pop("opsets", ())]
    model = helper.make_model(graph, opset_imports=opsets, **more)
    path = folder / "net.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def conv(x: str, y: str, w: str = "w", **attributes: Any) -> Any:
    return helper.make_node("Conv", [x, w], [y], name=f"conv_{y}", **attributes)


def texts(entries: list[Entry]) -> list[str]:
    return [str(entry.problem) for entry in entries]


# ---- one node: the problem computes what the node does ----

CASES = [
    # operator, input, kernel, attributes
    ("Conv", (2, 3, 8, 9), (4, 3, 3, 3), {}),
    ("Conv", (1, 3, 8, 9), (4, 3, 3, 3), {"pads": [1, 0, 2, 1]}),
    ("Conv", (1, 3, 8, 9), (4, 3, 3, 2), {"auto_pad": "SAME_UPPER"}),
    ("Conv", (1, 3, 8, 9), (4, 3, 3, 2), {"auto_pad": "SAME_LOWER"}),
    ("Conv", (1, 3, 8, 9), (4, 3, 3, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ("Conv", (1, 3, 9, 8), (4, 3, 2, 3), {"auto_pad": "SAME_LOWER", "strides": [2, 3]}),
    ("Conv", (1, 3, 8, 9), (4, 3, 1, 1), {"auto_pad": "SAME_UPPER", "strides": [3, 2]}),
    ("Conv", (1, 3, 8, 9), (4, 3, 3, 3), {"auto_pad": "VALID", "strides": [2, 1]}),
    ("Conv", (1, 4, 8, 9), (6, 2, 3, 3), {"group": 2, "dilations": [2, 1]}),
    ("Conv", (1, 4, 8, 9), (4, 1, 3, 3), {"group": 4, "kernel_shape": [3, 3], "pads": [1] * 4}),
    ("Conv", (1, 3, 12), (4, 3, 3), {"strides": [2], "pads": [2, 1], "dilations": [2]}),
    ("Conv", (1, 3, 12), (4, 3, 3), {"auto_pad": "SAME_LOWER", "strides": [2]}),
    ("ConvTranspose", (1, 3, 5, 6), (3, 4, 3, 3), {}),
    ("ConvTranspose", (1, 3, 5, 6), (3, 4, 3, 3), {"pads": [1, 0, 0, 2], "strides": [2, 3]}),
    ("ConvTranspose", (1, 3, 5, 6), (3, 4, 3, 3), {"strides": [3, 2], "output_padding": [2, 1]}),
    ("ConvTranspose", (1, 3, 5, 6), (3, 4, 3, 3), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ("ConvTranspose", (1, 3, 5, 6), (3, 4, 3, 3), {"strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    ("ConvTranspose", (1, 3, 5, 6), (3, 4, 3, 3), {"strides": [2, 2], "auto_pad": "VALID"}),
    ("ConvTranspose", (1, 3, 5, 6), (3, 4, 3, 3), {"strides": [3, 2], "output_shape": [16, 14]}),
    ("ConvTranspose", (1, 3, 5, 6), (3, 4, 2, 2), {"dilations": [1, 2]}),
    ("ConvTranspose", (1, 3, 7), (3, 4, 4), {"strides": [2], "pads": [1, 1]}),
]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("operator", "x", "w", "attributes"), CASES)
def test_a_problem_computes_what_its_node_does(
    operator: str,
    x: tuple[int, ...],
    w: tuple[int, ...],
    attributes: dict[str, Any],
    bias: bool,
    tmp_path: Path,
) -> None:
    filters = w[0] if operator == "Conv" else w[1] * attributes.get("group", 1)
    node = helper.make_node(operator, ["x", "w", *["b"] * bias], ["y"], name="node", **attributes)
    path = save(tmp_path, [node], ("w", w), *[("b", (filters,))] * bias, x=x)
    (entry,) = read_model(path)
    assert (entry.name, entry.count) == ("node", 1)
    arrays = reference.arrays(entry.problem, exact=True)
    shapes = (x, w, (filters,))
    free = dict(zip("xwb"[: 2 + bias], arrays, strict=False))
    inputs = [value(name, shape) for name, shape in zip(free, shapes, strict=False)]
    model = helper.make_model(
        helper.make_graph([node], "g", inputs, [value("y", None)]),
        opset_imports=[helper.make_opsetid("", 20)],
    )
    feeds = {n: free[n].reshape(s).astype(np.float32) for n, s in zip(free, shapes, strict=False)}
    (y,) = evaluator.ReferenceEvaluator(model).run(None, feeds)
    expected = reference.convolve(entry.problem, *arrays)
    np.testing.assert_array_equal(y.reshape(expected.shape), expected)


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        # By itself the output is 15 x 13; a smaller one is cropped, before where the total is odd.
        ({"output_shape": [14, 11]}, "stride3,2 pad1,0,1,1"),
        ({"output_shape": [1, 4, 14, 12]}, "stride3,2 pad1,0,1,0"),
        ({"output_shape": [14, 12], "auto_pad": "SAME_UPPER"}, "stride3,2 pad0,1,0,1"),
        # Pads are made then, so those that are given do not count.
        ({"output_shape": [14, 12], "pads": [3, 3, 3, 3]}, "stride3,2 pad1,0,1,0"),
        ({"group": 3}, "stride3,2 pad0 groups3"),
    ],
)
def test_what_the_evaluator_cannot_compute(
    attributes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    kernel = (3, 4 // attributes.get("group", 1) or 1, 3, 3)
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[3, 2], **attributes)
    (entry,) = read_model(save(tmp_path, [node], ("w", kernel), x=(1, 3, 5, 6)))
    filters = kernel[1] * attributes.get("group", 1)
    assert str(entry.problem) == f"conv_transpose2d f32 n1 c3 h5 w6 k{filters} r3 s3 {text}"
    wanted = attributes.get("output_shape", [15, 13])[-2:]
    assert [entry.problem.out_h, entry.problem.out_w] == wanted


# ---- what lies behind a convolution ----

ACTIVATIONS = [
    ([("Relu", ["y"], {})], "act:relu"),
    ([("Sigmoid", ["y"], {})], "act:sigmoid"),
    ([("Tanh", ["y"], {})], "act:tanh"),
    ([("Gelu", ["y"], {})], "act:gelu"),
    ([("Gelu", ["y"], {"approximate": "tanh"})], ""),
    ([("LeakyRelu", ["y"], {"alpha": 0.25})], "act:leaky_relu,0.25"),
    ([("Clip", ["y", "zero", "six"], {})], "act:clip,0,6"),
    ([("Clip", ["y", "", "six"], {})], "act:clip,-inf,6"),
    ([("Clip", ["y", "zero"], {})], "act:clip,0,inf"),
    ([("Clip", ["y", "six", "zero"], {})], ""),
    ([("Clip", ["y", "any"], {})], ""),
    ([("HardSwish", ["y"], {})], ""),
    ([("Sigmoid", ["y"], {}), ("Mul", ["y", "z0"], {})], "act:silu"),
    ([("Sigmoid", ["y"], {}), ("Mul", ["z0", "y"], {})], "act:silu"),
    ([("Sigmoid", ["y"], {}), ("Mul", ["y", "x1"], {})], ""),
    ([("Sigmoid", ["y"], {}), ("Mul", ["y", "z0"], {}), ("Neg", ["z0"], {})], ""),
    ([("Relu", ["y"], {}), ("Neg", ["y"], {})], ""),
    ([("BatchNormalization", ["y", "b", "b", "b", "b"], {})], "bias"),
    ([("BatchNormalization", ["y", *"bbbb"], {}), ("Relu", ["z0"], {})], "bias act:relu"),
    ([("BatchNormalization", ["y", *"bbbb"], {}), ("Relu", ["y"], {})], ""),
]


@pytest.mark.parametrize(("behind", "text"), ACTIVATIONS)
def test_what_is_alone_behind_a_convolution_is_part_of_it(
    behind: list[tuple[str, list[str], dict[str, Any]]], text: str, tmp_path: Path
) -> None:
    nodes = [conv("x", "y")]
    nodes += [
        helper.make_node(kind, taken, [f"z{i}"], **given)
        for i, (kind, taken, given) in enumerate(behind)
    ]
    scalars = [helper.make_tensor(n, FLOAT, [], [v]) for n, v in (("zero", 0.0), ("six", 6.0))]
    path = save(
        tmp_path, nodes, W3, ("b", (8,)), *scalars, inputs=(value("any", []), value("x1", [1]))
    )
    plain = "conv2d f32 n1 c3 h8 w9 k8 r3 s3 stride1 pad0"
    assert texts(read_model(path)) == [f"{plain} {text}".strip()]


def test_an_output_of_the_model_is_not_overwritten_by_an_activation(tmp_path: Path) -> None:
    nodes = [conv("x", "y"), helper.make_node("Relu", ["y"], ["z"])]
    (entry,) = read_model(save(tmp_path, nodes, W3, outputs=("y", "z")))
    assert entry.problem.activation.name == "identity"


def test_the_bounds_of_old_and_of_computed_clips(tmp_path: Path) -> None:
    old = helper.make_node("Clip", ["y"], ["z"], min=-1.0, max=1.0)
    path = save(tmp_path, [conv("x", "y"), old], W3, opset=10)
    assert str(read_model(path)[0].problem).endswith("act:clip,-1,1")
    constant = helper.make_node("Constant", [], ["c"], value=helper.make_tensor("", FLOAT, [], [2]))
    new = helper.make_node("Clip", ["y", "", "c"], ["z"])
    path = save(tmp_path, [conv("x", "y"), constant, new], W3)
    assert str(read_model(path)[0].problem).endswith("act:clip,-inf,2")


# ---- whole models ----


def test_equal_layers_count_once_in_the_models_order(tmp_path: Path) -> None:
    same = {"pads": [1, 1, 1, 1]}
    nodes = [conv("x", "a", **same), *(conv(p, q, "v", **same) for p, q in ("ab", "bc", "cd"))]
    nodes.append(conv("d", "e", "v"))
    entries = read_model(save(tmp_path, nodes, W3, ("v", (8, 8, 3, 3))))
    assert [(e.name, e.count) for e in entries] == [("conv_a", 1), ("conv_b", 3), ("conv_e", 1)]


def test_the_model_of_resnet50_that_onnx_ships_is_the_suite() -> None:
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    entries = read_model(folder / "light_resnet50.onnx")
    suite = {entry.problem: entry.count for entry in load_suite("resnet50")}
    assert {entry.problem: entry.count for entry in entries} == suite


NAMES = [
    "/layer1/0/conv1",
    "a b\tc",
    "model/conv2d/Conv2D:0",
    "x: conv2d",
    "a#b",
    "ünïcode",
    "é;x3",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_can_stand_in_a_suite(name: str, tmp_path: Path) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], name=name)
    (entry,) = read_model(save(tmp_path, [node], W3))
    assert parse_entry(f"{entry.name}: {entry.problem} x2").name == entry.name
    if not {" ", "\t", "#"} & set(name):
        assert entry.name == name


def test_a_node_without_a_name_is_called_as_its_output(tmp_path: Path) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["made here"])
    assert read_model(save(tmp_path, [node], W3))[0].name == "made_here"


def test_half_precision(tmp_path: Path) -> None:
    half = onnx.TensorProto.FLOAT16
    path = save(
        tmp_path,
        [conv("x", "y")],
        weight("w", W3[1], half),
        x=None,
        inputs=(value("x", (1, 3, 8, 8), half),),
    )
    assert read_model(path)[0].problem.dtype == "f16"


def test_weights_in_a_file_that_is_not_there(tmp_path: Path) -> None:
    tensor = onnx.TensorProto(name="w", data_type=FLOAT, dims=W3[1])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="gone.bin")
    assert read_model(save(tmp_path, [conv("x", "y")], tensor))[0].problem.k == 8


def test_shapes_that_the_model_computes_from_constants(tmp_path: Path) -> None:
    """A weight, and the sizes of Reshape, need the values of constants."""
    shape = helper.make_tensor("shape", onnx.TensorProto.INT64, [4], [1, 12, 4, 4])
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["y"]),
        helper.make_node("Transpose", ["v"], ["w"], perm=[3, 2, 0, 1]),
        conv("y", "z"),
    ]
    path = save(tmp_path, nodes, ("v", (3, 3, 12, 5)), shape, x=(1, 3, 8, 8))
    assert texts(read_model(path)) == ["conv2d f32 n1 c12 h4 w4 k5 r3 s3 stride1 pad0"]


def test_a_large_weight_leaves_the_shapes_of_others(tmp_path: Path) -> None:
    """Large values are dropped before inference, small ones are read by it."""
    shape = helper.make_tensor("shape", onnx.TensorProto.INT64, [4], [1, 64, 4, 4])
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"]), conv("y", "z")]
    path = save(tmp_path, nodes, ("w", (64, 64, 3, 3)), shape, x=(1, 16, 8, 8))
    assert texts(read_model(path)) == ["conv2d f32 n1 c64 h4 w4 k64 r3 s3 stride1 pad0"]


# ---- what a model leaves open ----


def test_an_open_batch_and_size_are_given(tmp_path: Path) -> None:
    nodes = [conv("x", "y", strides=[2, 2]), conv("y", "z", "v")]
    weights = (W3, ("v", (4, 8, 3, 3)))
    # What the model says of its values is of the sizes that it was exported with.
    old = [value("y", (1, 8, 111, 111))]
    path = save(tmp_path, nodes, *weights, x=("N", 3, "H", "W"), value_info=old)
    assert texts(read_model(path, batch=2, size=(9, 11))) == [
        "conv2d f32 n2 c3 h9 w11 k8 r3 s3 stride2 pad0",
        "conv2d f32 n2 c8 h4 w5 k4 r3 s3 stride1 pad0",
    ]
    for given, missing in (
        ({}, r"give the batch and the size \(--batch 1 --size 224,224\)"),
        ({"batch": 2}, r"give the size \(--size 224,224\)"),
        ({"size": (9, 9)}, r"give the batch \(--batch 1\)"),
    ):
        with pytest.raises(ProblemError, match=rf"conv_y; .*input x \(N, 3, H, W\).*{missing}$"):
            read_model(path, **given)


@pytest.mark.parametrize(
    ("x", "w", "text"),
    [
        (("N", "H", "W", 3), W3, "c3 h9 w11 k8 r3 s3"),  # channels last, then transposed
        ((None, 3, 48, None), W3, "c3 h48 w11 k8 r3 s3"),
        ((None, "C", None, None), W3, "c3 h9 w11 k8 r3 s3"),
        (("N", 3, "T"), ("w", (8, 3, 3)), "c3 h1 w11 k8 r1 s3"),
    ],
)
def test_which_dimension_is_which(
    x: tuple[Any, ...], w: tuple[str, Any], text: str, tmp_path: Path
) -> None:
    nodes = [conv("x", "y")]
    if x[-1] == 3:
        nodes = [helper.make_node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2]), conv("t", "y")]
    path = save(tmp_path, nodes, w, x=x)
    found = texts(read_model(path, batch=2, size=(9, 11)))
    assert found == [f"conv2d f32 n2 {text} stride1 pad0"]


def test_a_fixed_batch_is_multiplied(tmp_path: Path) -> None:
    """Also where a Reshape, whose constants state the old batch, has folded patches into it."""
    shape = helper.make_tensor("shape", onnx.TensorProto.INT64, [4], [8, 3, 4, 4])
    nodes = [
        conv("x", "y", "v"),
        helper.make_node("Reshape", ["x", "shape"], ["p"]),
        conv("p", "z"),
    ]
    path = save(tmp_path, nodes, W3, ("v", (4, 3, 1, 1)), shape, x=(2, 3, 8, 8))
    assert [e.problem.n for e in read_model(path)] == [2, 8]
    assert [e.problem.n for e in read_model(path, batch=16)] == [16, 64]
    with pytest.raises(ProblemError, match=r"a size was given, but .* x \(2, 3, 8, 8\)$"):
        read_model(path, size=(224, 224))
    with pytest.raises(ProblemError, match="the batch must be at least 1, got 0"):
        read_model(path, batch=0)
    with pytest.raises(ProblemError, match="the width must be at least 1, got -3"):
        read_model(path, size=(2, -3))


def test_inputs_with_different_batches_take_no_batch(tmp_path: Path) -> None:
    nodes = [conv("x", "y"), conv("u", "z")]
    path = save(tmp_path, nodes, W3, inputs=(value("u", (4, 3, 8, 8)),), outputs=("y", "z"))
    assert [e.problem.n for e in read_model(path)] == [1, 4]
    with pytest.raises(ProblemError, match=r"share none: x \(1, 3, 8, 9\), u \(4, 3, 8, 8\)$"):
        read_model(path, batch=2)


# ---- graphs in graphs ----


def test_convolutions_of_subgraphs_and_functions(tmp_path: Path) -> None:
    pads = {"pads": [1, 1, 1, 1]}
    then = helper.make_graph(
        [conv("x", "t0", **pads), helper.make_node("Relu", ["t0"], ["t"])],
        "then",
        [],
        [value("t", None)],
    )
    inner = helper.make_graph([conv("e0", "i", "v", **pads)], "inner", [], [value("i", None)])
    other = helper.make_graph([conv("e0", "j", "v")], "other", [], [value("j", None)])
    otherwise = helper.make_graph(
        [
            conv("x", "e0", **pads),
            helper.make_node("If", ["c"], ["e"], then_branch=inner, else_branch=other),
        ],
        "else",
        [],
        [value("e", None)],
    )
    function = helper.make_function(
        "mine", "Block", ["p", "q"], ["r"], [helper.make_node("Conv", ["p", "q"], ["r"])],
        [helper.make_opsetid("", 20)],
    )  # fmt: skip
    nodes = [
        helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=otherwise),
        helper.make_node("Block", ["x", "w"], ["z"], domain="mine"),
    ]
    path = save(
        tmp_path,
        nodes,
        W3,
        ("v", (8, 8, 3, 3)),
        inputs=(value("c", [], onnx.TensorProto.BOOL),),
        opsets=[helper.make_opsetid("mine", 1)],
        functions=[function],
    )
    found = {str(e.problem): e.count for e in read_model(path)}
    here = "h8 w9 k8 r3 s3 stride1"
    assert found == {
        f"conv2d f32 n1 c3 {here} pad1 act:relu": 1,
        f"conv2d f32 n1 c3 {here} pad1": 1,
        f"conv2d f32 n1 c8 {here} pad1": 1,
        f"conv2d f32 n1 c8 {here} pad0": 1,
        f"conv2d f32 n1 c3 {here} pad0": 1,
    }


def test_an_output_that_a_subgraph_takes_too_has_no_activation(tmp_path: Path) -> None:
    branches = [
        helper.make_graph([helper.make_node("Neg", ["y"], [n])], n, [], [value(n, None)])
        for n in "ab"
    ]
    nodes = [
        conv("x", "y"),
        helper.make_node("Relu", ["y"], ["r"]),
        helper.make_node("If", ["c"], ["z"], then_branch=branches[0], else_branch=branches[1]),
    ]
    condition = value("c", [], onnx.TensorProto.BOOL)
    (entry,) = read_model(save(tmp_path, nodes, W3, inputs=(condition,), outputs=("r", "z")))
    assert entry.problem.activation.name == "identity"


# ---- what is left out, and what is refused ----

W5 = ("w5", (8, 3, 3, 3, 3))
OTHERS = [
    (conv("u", "z", "w5"), ("u", (1, 3, 8, 8, 8)), "it has 3 spatial dimensions"),
    (conv("u", "z", "wd"), ("u", (1, 3, 8, 8), onnx.TensorProto.DOUBLE), "it computes in double"),
    (
        helper.make_node("ConvInteger", ["u", "wi"], ["z"], name="conv_z"),
        ("u", (1, 3, 8, 8), onnx.TensorProto.UINT8),
        "ConvInteger is another operator than Conv and ConvTranspose",
    ),
    (
        helper.make_node("FusedConv", ["u", "w"], ["z"], name="conv_z", domain="com.microsoft"),
        ("u", (1, 3, 8, 8)),
        "com.microsoft.FusedConv is another operator than Conv and ConvTranspose",
    ),
    (conv("u", "z", "u"), ("u", (1, 3, 8, 8)), "the kernel spans 8 pixels"),
]


@pytest.mark.parametrize(("node", "u", "reason"), OTHERS)
def test_what_is_left_out_is_told(node: Any, u: Any, reason: str, tmp_path: Path) -> None:
    weights = (
        W3,
        W5,
        weight("wd", W3[1], onnx.TensorProto.DOUBLE),
        helper.make_tensor("wi", onnx.TensorProto.UINT8, [1, 3, 1, 1], bytes(3), raw=True),
    )
    more = {"inputs": (value(*u),), "opsets": [helper.make_opsetid("com.microsoft", 1)]}
    path = save(tmp_path, [node], *weights, **more)
    if "spans" not in reason:
        with pytest.raises(ProblemError, match=rf"no convolution that .*: conv_z \({reason}\)$"):
            read_model(path)
        with pytest.warns(ModelWarning, match=rf"^net.onnx: left out conv_z \({reason}\)$"):
            found = read_model(save(tmp_path, [conv("x", "y"), node], *weights, **more))
        assert [entry.name for entry in found] == ["conv_y"]


def test_a_shape_that_only_a_run_would_tell(tmp_path: Path) -> None:
    nodes = [
        conv("x", "y"),
        helper.make_node("Reshape", ["y", "s"], ["r"]),
        *(conv("r", name) for name in "abcde"),
    ]
    shape = value("s", [4], onnx.TensorProto.INT64)
    with pytest.warns(ModelWarning) as caught:
        (entry,) = read_model(save(tmp_path, nodes, W3, inputs=(shape,)))
    assert entry.name == "conv_y"
    assert [str(w.message) for w in caught] == [
        "net.onnx: left out conv_a, conv_b, conv_c and 2 more "
        "(the input's shape is unknown before the model runs)"
    ]


@pytest.mark.parametrize(
    "attributes",
    [{"kernel_shape": [5, 5]}, {"strides": [2]}, {"strides": [0, 1], "auto_pad": "SAME_UPPER"}],
)
def test_attributes_that_do_not_fit(attributes: dict[str, Any], tmp_path: Path) -> None:
    path = save(tmp_path, [conv("x", "y", **attributes)], W3)
    name = next(iter(attributes))
    with pytest.raises(ProblemError, match=rf"conv_y \(an input .*{name}=.* do not fit"):
        read_model(path)


def test_a_model_without_convolutions(tmp_path: Path) -> None:
    path = save(tmp_path, [helper.make_node("Relu", ["x"], ["y"])])
    with pytest.raises(ProblemError, match=r"^net\.onnx has no convolution: no Conv and no Conv"):
        read_model(path)


@pytest.mark.parametrize(
    "data",
    [b"", b"conv2d f32 n1 c3\n", b"\x89PNG\r\n", b'{"ir": 1}'],
    ids=["", "txt", "png", "json"],
)
def test_a_file_that_is_no_model(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(
        ProblemError, match=r"model\.onnx' is no ONNX model, as torch\.onnx\.export and other"
    ):
        read_model(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"there is no model '.*gone\.onnx'$"):
        read_model(tmp_path / "gone.onnx")
    with pytest.raises(ProblemError, match=r"cannot be read: Is a directory$"):
        read_model(tmp_path)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"needs onnx .*pip install 'wgpuconv\[bench\]'$"):
        read_model(tmp_path / "net.onnx")


def test_a_cut_or_damaged_model_gives_a_sentence(tmp_path: Path) -> None:
    """Whatever bytes are lost or changed: entries, or one of our errors."""
    nodes = [
        conv("x", "y", pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Relu", ["y"], ["z"]),
    ]
    whole = save(tmp_path, nodes, ("w", (2, 3, 1, 1)), x=("N", 3, 8, 8)).read_bytes()
    path = tmp_path / "broken.onnx"
    rng = np.random.default_rng(0)
    outcomes = set()
    for _ in range(600):
        data = bytearray(whole)
        if rng.integers(2):
            data[rng.integers(len(data))] = rng.integers(256)
        else:
            del data[rng.integers(len(data)) :]
        path.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ModelWarning)
            try:
                outcomes.add(bool(read_model(path, batch=1)))
            except ProblemError:
                outcomes.add(False)
    assert outcomes == {True, False}
