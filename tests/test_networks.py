"""Whole networks, chained: each layer's result stays on the device and is the next one's input.

Two checks. Every layer, given what really came in, is within its rigorous bound; and the end of
the chain is as near to the float64 chain as the layers' rounding allows: with weights that keep
the norm (He et al. 2015) and activations that stretch no distance, relative errors add up, each
layer's being at most gamma of its reduction.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference

import wgpuconv
from wgpuconv import Device, Tensor
from wgpuconv.problem import ConvProblem

SUITES = Path(__file__).parent.parent / "bench" / "problems"


class Chain:
    """Runs layers on the device and in float64 side by side; a value is (tensor, float64)."""

    def __init__(self, device: Device, seed: int, *, divide: int) -> None:
        self.device = device
        self.rng = np.random.default_rng(seed)
        self.divide = divide
        """Divides the channels between layers, for a driver that is slow."""
        self.problems: list[ConvProblem] = []
        self.tolerance = 0.0

    def given(self, channels: int, size: int) -> tuple[Tensor, np.ndarray]:
        x = self.rng.standard_normal((1, channels, size, size), np.float32)
        return wgpuconv.tensor(x, self.device), x.astype(np.float64)

    def channels(self, full: int) -> int:
        return max(full // self.divide, 2) if full > 3 else full

    def layer(self, value: tuple[Tensor, np.ndarray], k: int, r: int, **options: Any) -> Any:
        """A convolution with random weights and a bias, as of a folded batch norm."""
        x, _ = value
        k, transposed = self.channels(k), options.pop("transposed", False)
        shape = (x.shape[1], k, r, r) if transposed else (k, x.shape[1], r, r)
        # Taps that reach an output: of a transposed convolution, one phase's.
        fan_in = x.shape[1] * r * r / (options["stride"] ** 2 if transposed else 1)
        w = self.rng.standard_normal(shape, np.float32) * np.float32((2 / fan_in) ** 0.5)
        b = self.rng.standard_normal(k, np.float32) * np.float32(0.1)
        op = "conv_transpose2d" if transposed else "conv2d"
        return self.apply(op, value, w, b, **options)

    def pool(self, value: tuple[Tensor, np.ndarray]) -> Any:
        """2x2 average pooling, as a depthwise convolution, scaled to keep the norm."""
        c = value[0].shape[1]
        w = np.full((c, 1, 2, 2), 0.5, np.float32)
        return self.apply("conv2d", value, w, None, stride=2, groups=c)

    def double(self, value: tuple[Tensor, np.ndarray]) -> Any:
        """Bilinear upsampling by two, as a depthwise transposed convolution."""
        c = value[0].shape[1]
        ramp = np.float32([0.25, 0.75, 0.75, 0.25])
        w = np.broadcast_to(np.outer(ramp, ramp), (c, 1, 4, 4)).copy()
        return self.apply("conv_transpose2d", value, w, None, stride=2, padding=1, groups=c)

    def apply(self, op: str, value: Any, w: np.ndarray, b: Any, **options: Any) -> Any:
        x, exact = value
        problem = ConvProblem.from_call(
            op,  # type: ignore[arg-type]
            x.shape,
            w.shape,
            bias_shape=None if b is None else b.shape,
            **options,
        )
        self.problems.append(problem)
        self.tolerance += reference.gamma(problem.reduction + 1)
        on_device = [None if a is None else wgpuconv.tensor(a, self.device) for a in (w, b)]
        y = getattr(wgpuconv, op)(x, *on_device, **options)
        assert isinstance(y, Tensor)
        reference.check(problem, y.numpy(), x.numpy(), w, b)
        return y, reference.convolve(problem, exact, w, b)

    def join(self, *values: tuple[Tensor, np.ndarray]) -> tuple[Tensor, np.ndarray]:
        """Channels one after another, copied on the device."""
        shape = (1, sum(t.shape[1] for t, _ in values), *values[0][0].shape[2:])
        joined = Tensor.empty(shape, np.float32, self.device)
        gpu, at = self.device.backend.gpu_device, 0
        encoder = gpu.create_command_encoder()
        for part, _ in values:
            encoder.copy_buffer_to_buffer(part.buffer, 0, joined.buffer, at, part.nbytes)
            at += part.nbytes
        gpu.queue.submit([encoder.finish()])
        return joined, np.concatenate([exact for _, exact in values], axis=1)

    def end(self, value: tuple[Tensor, np.ndarray]) -> None:
        y, exact = value
        error = np.linalg.norm(y.numpy() - exact) / np.linalg.norm(exact)
        assert np.linalg.norm(exact) > 1e-3 * exact.size**0.5, "the signal has faded"
        assert error <= self.tolerance


def craft(chain: Chain, size: int) -> None:
    """CRAFT (Baek et al. 2019): VGG16-BN, and a decoder. Pooling and resizing are stand-ins."""
    relu = {"activation": "relu"}

    def conv3(value: Any, k: int) -> Any:
        return chain.layer(value, k, 3, padding=1, **relu)

    x = conv3(conv3(chain.given(3, size), 64), 64)
    half = conv3(conv3(chain.pool(x), 128), 128)
    x = conv3(conv3(chain.pool(half), 256), 256)
    quarter = x
    x = conv3(conv3(chain.pool(conv3(x, 256)), 512), 512)
    eighth = x
    x = conv3(conv3(chain.pool(conv3(x, 512)), 512), 512)
    sixteenth = x
    x = chain.layer(x, 1024, 3, padding=6, dilation=6)
    x = chain.layer(x, 1024, 1)
    x = chain.join(x, sixteenth)
    for skip, k in ((eighth, 512), (quarter, 256), (half, 128), (None, 64)):
        x = conv3(chain.layer(x, k, 1, **relu), k // 2)
        if skip is not None:
            x = chain.join(chain.double(x), skip)
    x = conv3(conv3(conv3(x, 32), 32), 16)
    chain.end(chain.layer(chain.layer(x, 16, 1, **relu), 2, 1))


def decoder(chain: Chain, size: int) -> None:
    """The decoder of U-Net (Ronneberger et al. 2015), its encoder's features at random."""
    x = chain.given(chain.channels(1024), size)
    for k in (512, 256, 128, 64):
        x = chain.layer(x, k, 2, stride=2, transposed=True)
        skip = chain.given(chain.channels(k), x[0].shape[2])
        x = chain.join(x, skip)
        x = chain.layer(x, k, 3, activation="relu")
        x = chain.layer(x, k, 3, activation="relu")
    chain.end(chain.layer(x, 2, 1))


def generator(chain: Chain, size: int) -> None:
    """The other ways to upsample by two that networks use: 4x4 taps, and 3x3 with one pixel."""
    x = chain.given(chain.channels(512), size)
    x = chain.layer(x, 256, 4, stride=2, padding=1, transposed=True, activation="relu")
    x = chain.layer(
        x, 128, 3, stride=2, padding=1, output_padding=1, transposed=True, activation="relu"
    )
    chain.end(chain.layer(x, 3, 5, stride=2, padding=2, output_padding=1, transposed=True))


@pytest.mark.parametrize(
    ("network", "size", "divide"),
    [
        pytest.param(*case, marks=pytest.mark.xdist_group("networks"), id=case[0].__name__)
        # Few channels and pixels keep to few tiles, of which each takes seconds to compile.
        for case in ((craft, 32, 8), (decoder, 5, 16), (generator, 5, 8))
    ],
)
def test_a_network_with_a_part_of_its_channels(
    device: Device, network: Any, size: int, divide: int
) -> None:
    network(Chain(device, 1, divide=divide), size)


@pytest.mark.gpu
@pytest.mark.parametrize(("network", "size"), [(craft, 128), (decoder, 12), (generator, 16)])
def test_a_network_with_all_its_channels(device: Device, network: Any, size: int) -> None:
    network(Chain(device, 1, divide=1), size)


class Outline(Chain):
    """Collects a network's problems without computing them."""

    def __init__(self, *, divide: int) -> None:
        self.rng = np.random.default_rng(1)
        self.divide = divide
        self.problems = []

    def given(self, channels: int, size: int) -> Any:
        return _Shape((1, channels, size, size)), None

    def apply(self, op: str, value: Any, w: np.ndarray, b: Any, **options: Any) -> Any:
        shape = None if b is None else b.shape
        problem = ConvProblem.from_call(
            op,  # type: ignore[arg-type]
            value[0].shape,
            w.shape,
            bias_shape=shape,
            **options,
        )
        self.problems.append(problem)
        return _Shape(problem.out_shape), None

    def join(self, *values: Any) -> Any:
        channels = sum(shape.shape[1] for shape, _ in values)
        return _Shape((1, channels, *values[0][0].shape[2:])), None

    def end(self, value: Any) -> None:
        pass


class _Shape:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


@pytest.mark.parametrize(
    ("network", "suite", "op"),
    [(craft, "craft", "conv2d"), (decoder, "unet", "conv_transpose2d")],
)
def test_the_networks_are_those_of_the_suites(network: Any, suite: str, op: str) -> None:
    """All layers of the published networks are there, but for the size of the image."""

    def kind(p: ConvProblem) -> str:
        return str(p.with_(h=64, w=64))

    outline = Outline(divide=1)
    network(outline, 64)
    lines = (SUITES / f"{suite}.txt").read_text(encoding="utf-8").splitlines()
    texts = [
        line.partition(":")[2].split(" x")[0] for line in lines if " h" in line and ":" in line
    ]
    listed = {
        kind(p) for p in (ConvProblem.parse(t) for t in texts if t.split()[0] == op) if p.bias
    }
    assert len(listed) > 3
    ours = {kind(p) for p in outline.problems if p.op == op and p.groups == 1}
    assert ours == listed
