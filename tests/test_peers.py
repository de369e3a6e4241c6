"""Peers of the benchmark: the process that runs one, whatever it does, and each library's result.

A library that is not installed here, or has no device, skips its tests with the reason.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wgpuconv import ConvProblem
from wgpuconv.bench.accuracy import Judge
from wgpuconv.bench.peer import Refusal, Variant
from wgpuconv.bench.peer_process import PeerProcess, peer_names, peers_dir
from wgpuconv.dtypes import numpy_dtype
from wgpuconv.errors import BenchError
from wgpuconv.tuning.verify import Check

PEERS = peer_names()
SMALL = ConvProblem.parse("conv2d f32 n2 c4 h9 w8 k6 r3 s3 stride1 pad1 bias act:relu")
PLAIN = Variant("plain", "f32")
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")

# A peer that obeys: its options say what each method does.
FAKE = """
import os, signal, subprocess, sys, time
import numpy as np
print("noise before the first answer")
from wgpuconv.bench.peer import Peer, Refusal, Variant, serve


class Fake(Peer):
    name = "fake"
    pip = "fake-library"
    dtypes = ("f32", "bf16")
    data = {}

    def describe(self):
        if "FAKE_IMPORTS" in os.environ:
            __import__(os.environ["FAKE_IMPORTS"])
        if "FAKE_REFUSES" in os.environ:
            raise Refusal("no device")
        if "FAKE_DIES" in os.environ:
            os.abort()
        return {"fake": "1.2"}, "nothing"

    def variants(self, problem):
        if problem.groups > 1:
            raise Refusal(f"no groups, got {problem.groups}")
        return [Variant("plain", "f32"), Variant("odd", "tf32", same_work=False, prepared=True)]

    def load(self, problem, variant, data):
        self.data[variant.what] = problem, data

    def output(self, variant):
        problem, data = self.data[variant.what]
        if variant.options.get("shape"):
            return np.zeros(variant.options["shape"], np.float32)
        return np.full(problem.out_shape, data["bias"][0], np.float32)

    def time(self, variant, repeats):
        match variant.options.get("do"):
            case "print":
                print("x" * 100_000)
                os.system("echo from a child; cat")
                os.write(1, b"from C\\n")
            case "raise":
                raise RuntimeError("the device is on fire")
            case "refuse":
                raise Refusal("not today")
            case "exit":
                print("last words", file=sys.stderr)
                os._exit(7)
            case "abort":
                os.abort()
            case "hang":
                subprocess.Popen(["sleep", "1000"])
                print("hanging", file=sys.stderr, flush=True)
                time.sleep(1000)
            case "nan":
                return float("nan")
        return 0.25 / repeats

    def unload(self):
        self.data.clear()

    def call(self, variant):
        return 0.5

    def end_to_end(self, variant, data):
        return float(data["bias"][0])


serve(Fake())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "fake.py").write_text(FAKE, encoding="utf-8")
    return tmp_path


@pytest.fixture
def fake(folder: Path) -> Iterator[PeerProcess]:
    with PeerProcess("fake", folder=folder, timeout=60) as peer:
        yield peer


def doing(what: str) -> Variant:
    return Variant("plain", "f32", options={"do": what})


def whole(peer: PeerProcess, variant: Variant, problem: ConvProblem = SMALL) -> np.ndarray:
    """All elements of the output."""
    points = np.indices(problem.out_shape).reshape(4, -1)
    found = peer.output(variant, list(points)).reshape(problem.out_shape)
    return found.astype(numpy_dtype(problem.dtype))


def arrays(value: float = 2.0) -> dict[str, np.ndarray]:
    return {"bias": np.full(6, value, np.float32)}


def alive(group: int) -> bool:
    """Whether a process of that group runs; one that ended and was not waited for does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(its_group) == group and state != "Z":
            return True
    return False


# ---- the process ----


def test_a_peer_is_asked_and_answers(fake: PeerProcess) -> None:
    facts = fake.describe()
    assert (facts.versions, facts.device, facts.absent) == ({"fake": "1.2"}, "nothing", None)
    plain, odd = fake.variants(SMALL)
    assert plain == PLAIN
    assert odd == Variant("odd", "tf32", prepared=True, same_work=False)
    fake.load(SMALL, plain, arrays(3.0))
    fake.load(SMALL, odd, arrays(4.0))
    assert np.array_equal(whole(fake, plain), np.full(SMALL.out_shape, 3, np.float32))
    assert np.array_equal(whole(fake, odd), np.full(SMALL.out_shape, 4, np.float32))
    assert fake.time(plain, 5) == 0.05
    assert fake.call(plain) == 0.5
    assert fake.end_to_end(plain, arrays(0.125)) == 0.125
    assert fake.workspace(plain) is None
    fake.unload()
    with pytest.raises(BenchError, match=r"fake has not loaded 'plain'$"):
        fake.time(plain, 5)


def test_the_same_arrays_are_written_once_and_others_anew(fake: PeerProcess) -> None:
    data = arrays(1.0)
    fake.load(SMALL, PLAIN, data)
    (written,) = Path(fake._arrays.name).glob("*.npy")
    stamp = written.stat().st_mtime_ns
    fake.load(SMALL, PLAIN, data)
    assert written.stat().st_mtime_ns == stamp
    fake.load(SMALL, PLAIN, arrays(5.0))
    assert whole(fake, PLAIN).flat[0] == 5
    fake.unload()
    assert not any(Path(fake._arrays.name).iterdir())
    fake.load(SMALL, PLAIN, data)  # written again, though it is the same array
    assert whole(fake, PLAIN).flat[0] == 1


def test_others_are_told_apart_where_times_of_files_are_coarse(
    fake: PeerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = np.save

    def at_one_time(path: Path, array: np.ndarray, **options: Any) -> None:
        save(path, array, **options)
        os.utime(path, (0, 0))

    monkeypatch.setattr(np, "save", at_one_time)
    for value in (1.0, 5.0, 3.0):
        fake.load(SMALL, PLAIN, arrays(value))
        assert whole(fake, PLAIN).flat[0] == value
        assert fake.end_to_end(PLAIN, arrays(value / 2)) == value / 2
    (last,) = Path(fake._arrays.name).glob("*.npy")
    assert last.name == "bias-6.npy", "those that were replaced are gone"


def test_dtypes(fake: PeerProcess) -> None:
    """Arrays in bfloat16 arrive as such; what a peer has not got is refused before it is asked."""
    bf16, f16 = SMALL.with_(dtype="bf16"), SMALL.with_(dtype="f16")
    assert fake.variants(bf16)
    fake.load(bf16, PLAIN, {"bias": np.full(6, 1.5, numpy_dtype("bf16"))})
    assert np.array_equal(whole(fake, PLAIN, bf16), np.full(SMALL.out_shape, 1.5, np.float32))
    with pytest.raises(Refusal, match="fake is compared in f32, bf16, got f16"):
        fake.variants(f16)


def test_torch_takes_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    sys.path.insert(0, str(peers_dir()))
    try:
        peer = importlib.import_module("torch_cpu").TorchCpu()
    finally:
        sys.path.remove(str(peers_dir()))
    problem = ConvProblem.parse("conv2d bf16 n2 c4 h9 w8 k6 r3 s3 pad1 bias nhwc")
    judge = Judge(Check(problem))
    for variant in peer.variants(problem):
        peer.load(problem, variant, judge.check.data)
        assert peer.find(variant).tensors["input"].dtype == torch.bfloat16
        judge.error(peer.output(variant)[judge.points], "bf16", bias=variant.same_work)


def test_a_refusal_arrives_as_one(fake: PeerProcess) -> None:
    with pytest.raises(Refusal, match=r"^no groups, got 2$"):
        fake.variants(ConvProblem.parse("conv2d n1 c4 h9 w8 k6 r3 s3 groups2"))
    fake.load(SMALL, PLAIN, arrays())
    with pytest.raises(Refusal, match=r"^not today$"):
        fake.time(doing("refuse"), 1)
    assert fake.time(PLAIN, 1) == 0.25


def test_what_a_peer_prints_is_no_answer(fake: PeerProcess) -> None:
    fake.load(SMALL, PLAIN, arrays())
    assert fake.time(doing("print"), 2) == 0.125
    assert fake.time(PLAIN, 1) == 0.25


def test_an_exception_arrives_as_its_text_and_the_peer_goes_on(fake: PeerProcess) -> None:
    fake.load(SMALL, PLAIN, arrays())
    with pytest.raises(BenchError, match=r"^fake: RuntimeError: the device is on fire$"):
        fake.time(doing("raise"), 1)
    assert fake.time(PLAIN, 1) == 0.25


def test_a_time_that_is_none_is_an_error(fake: PeerProcess) -> None:
    fake.load(SMALL, PLAIN, arrays())
    with pytest.raises(BenchError, match="fake plain gave the time nan"):
        fake.time(doing("nan"), 1)
    with pytest.raises(BenchError, match=r"gave the time 0.0"):
        fake.end_to_end(PLAIN, arrays(0.0))


def test_a_result_of_another_shape_is_an_error(fake: PeerProcess) -> None:
    fake.load(SMALL, PLAIN, arrays())
    with pytest.raises(BenchError, match=r"shape \(2, 3\), expected \(2, 6, 9, 8\)"):
        whole(fake, Variant("plain", "f32", options={"shape": [2, 3]}))


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("exit", "fake ended with exit status 7 during 'time'; it wrote: .*last words"),
        ("abort", "fake was ended by SIGABRT during 'time'"),
    ],
)
def test_a_crash_is_one_sentence_and_the_next_load_starts_anew(
    fake: PeerProcess, how: str, text: str
) -> None:
    fake.load(SMALL, PLAIN, arrays())
    with pytest.raises(BenchError, match=text):
        fake.time(doing(how), 1)
    with pytest.raises(BenchError, match=r"has not loaded 'plain' \(before, fake .* during 'time'"):
        whole(fake, PLAIN)
    fake.load(SMALL, PLAIN, arrays(3.0))
    assert whole(fake, PLAIN).flat[0] == 3


@needs_proc
def test_a_peer_that_hangs_is_ended_with_its_children(folder: Path) -> None:
    with PeerProcess("fake", folder=folder, timeout=60) as peer:
        peer.load(SMALL, PLAIN, arrays())
        assert peer._child is not None
        group = peer._child._process.pid
        assert alive(group)
        peer.timeout = 1.0
        text = "fake did not answer within 1 s during 'time'; it wrote: .*hanging"
        with pytest.raises(BenchError, match=text):
            peer.time(doing("hang"), 1)
        until = time.monotonic() + 10  # a busy system takes a while to end what was killed
        while alive(group) and time.monotonic() < until:
            time.sleep(0.05)
        assert not alive(group)


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("FAKE_IMPORTS", "no_such_library", "No module named 'no_such_library'; pip install fake"),
        ("FAKE_REFUSES", "1", "no device"),
        ("FAKE_DIES", "1", "fake was ended by SIGABRT during 'describe'"),
        ("WGPUCONV_PYTHON_FAKE", "/no/such/python", "fake cannot be started"),
    ],
)
def test_an_absent_library_is_a_fact(
    fake: PeerProcess, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(variable, value)
    facts = fake.describe()
    assert facts.absent is not None
    assert facts.absent.startswith(reason)
    assert not facts.versions


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("raise SystemExit('not a peer')", "ended with exit status 1 .*it wrote: not a peer"),
        ("syntax error", "ended with exit status 1 .*SyntaxError"),
        ("print('hello')", "ended with exit status 0"),
        ("""print('{"done": "ready"}\\n{not json', flush=True); input()""", "'{not json'"),
        ("""print('{"done": "ready"}\\n[1]', flush=True); input()""", r"'\[1\]', which is no"),
        ("""print('{"done": "ready"}\\n{"x": 1}', flush=True); input()""", "'{\"x\": 1}'"),
        ("""print('{"done": "ready"}', flush=True)""", "ended with exit status 0"),
    ],
)
def test_a_script_that_is_no_peer_is_absent(tmp_path: Path, script: str, reason: str) -> None:
    (tmp_path / "other.py").write_text(script, encoding="utf-8")
    with PeerProcess("other", folder=tmp_path, timeout=60) as peer:
        facts = peer.describe()
        assert facts.absent is not None
        with pytest.raises(BenchError):
            peer.variants(SMALL)
    assert re.search(reason, facts.absent), facts.absent


def test_a_script_does_not_hide_a_library_of_its_name(tmp_path: Path) -> None:
    script = FAKE.replace("import numpy as np", "import numpy as np; import colorsys")
    (tmp_path / "colorsys.py").write_text(script + "raise SystemExit", encoding="utf-8")
    with PeerProcess("colorsys", folder=tmp_path, timeout=60) as peer:
        assert peer.describe().absent is None


def test_closing_leaves_nothing_behind(folder: Path) -> None:
    peer = PeerProcess("fake", folder=folder, timeout=60)
    peer.load(SMALL, PLAIN, arrays())
    arrays_folder, child = Path(peer._arrays.name), peer._child
    assert child is not None
    peer.close()
    peer.close()
    assert child._process.returncode is not None
    assert not arrays_folder.exists()
    assert not any(reader.is_alive() for reader in child._readers)


@needs_proc
def test_a_peer_ends_with_a_runner_that_was_killed(folder: Path) -> None:
    code = (
        "import os, signal, sys, threading\n"
        "from pathlib import Path\n"
        "from wgpuconv import ConvProblem\n"
        "from wgpuconv.bench.peer import Variant\n"
        "from wgpuconv.bench.peer_process import PeerProcess\n"
        "peer = PeerProcess('fake', folder=Path(sys.argv[1]))\n"
        f"problem = ConvProblem.parse({str(SMALL)!r})\n"
        "peer.load(problem, Variant('plain', 'f32'), {})\n"
        "print(peer._child._process.pid, peer._arrays.name, flush=True)\n"
        "threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        "peer.time(Variant('plain', 'f32', options={'do': 'hang'}), 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60
    )
    pid, temporary = done.stdout.split()
    deadline = time.monotonic() + 10
    while Path(temporary).exists() or alive(int(pid)):
        assert time.monotonic() < deadline, "the peer outlived its runner"
        time.sleep(0.05)


def test_an_unknown_peer_is_named_with_the_known_ones() -> None:
    with pytest.raises(BenchError, match=r"no peer is named 'cudnn'; the peers are .*torch-cuda"):
        PeerProcess("cudnn")


# ---- the libraries ----

PROBLEMS = [
    "conv2d f32 n2 c4 h9 w8 k6 r3 s3 stride1 pad1 bias act:relu",
    "conv2d f32 n1 c6 h13 w11 k9 r5 s3 stride2,1 pad2,1 dil1,2 groups3 bias",
    "conv2d f32 n2 c8 h7 w9 k8 r3 s3 pad1 groups8 act:clip,0,6",
    "conv2d f32 n1 c5 h6 w7 k3 r1 s1 nhwc bias act:leaky_relu,0.2",
    "conv2d f32 n1 c5 h6 w7 k3 r2 s2 pad0,1,1,0 bias act:sigmoid",
    "conv2d f32 n1 c3 h8 w8 k4 r3 s3 act:gelu",
    "conv2d f32 n1 c3 h8 w8 k4 r3 s3 bias act:silu",
    "conv2d f32 n1 c3 h8 w8 k4 r3 s3 act:tanh",
    "conv_transpose2d f32 n2 c6 h5 w6 k4 r4 s3 stride2 pad1 outpad1,0 groups2 bias act:relu",
    "conv_transpose2d f32 n1 c4 h5 w6 k4 r3 s3 stride2 pad1 dil2,1 nhwc",
    "conv2d f32 n2 c4 h9 w8 k6 r3 s3 pad1 bias residual act:relu nhwc",
    "conv2d f16 n2 c4 h9 w8 k6 r3 s3 stride1 pad1 bias act:relu",
]


@pytest.fixture(scope="module", params=PEERS)
def peer(request: pytest.FixtureRequest) -> Iterator[PeerProcess]:
    with PeerProcess(request.param, timeout=120) as process:
        facts = process.describe()
        if facts.absent is not None:
            pytest.skip(f"{facts.name}: {facts.absent}")
        assert facts.versions
        assert facts.device
        yield process


def bound(problem: ConvProblem, precision: str) -> float:
    """Of the error in units of the largest output, which is above one.

    The arguments of TF32 have 11 bits, as the sums in f16 have, where a library adds so: each
    product is rounded as often as it is added. Products are at most 1.75**2 / sqrt(m).
    """
    m = problem.reduction
    sizes = m * 1.75**2 / m**0.5 + 1.75
    unit = 2.0**-24 if precision == "f32" else 2.0**-11
    roundings = 3 if precision == "tf32" else m + 3
    return float(roundings * unit * sizes)


@pytest.mark.parametrize("text", PROBLEMS)
def test_every_variant_of_a_peer_is_right(peer: PeerProcess, text: str) -> None:
    problem = ConvProblem.parse(text)
    try:
        variants = peer.variants(problem)
    except Refusal as refusal:
        pytest.skip(f"{peer.name}: {refusal}")
    assert len({variant.what for variant in variants}) == len(variants)
    check = Check(problem)
    for variant in variants:
        peer.load(problem, variant, check.data)
    for variant in variants:
        output = whole(peer, variant, problem)
        if not variant.same_work:
            assert check.fault(output), f"{variant.what} does all that the problem says"
        elif variant.precision == "f32":
            assert check.fault(output) is None, f"{variant.what}: {check.fault(output)}"
        else:
            assert check.error(output) < bound(problem, variant.precision), variant.what
        assert 0 < peer.time(variant, 2) < 10
    peer.unload()


def test_the_other_measures_of_a_peer(peer: PeerProcess) -> None:
    check = Check(SMALL)
    variant = peer.variants(SMALL)[0]
    peer.load(SMALL, variant, check.data)
    call, end_to_end = peer.call(variant), peer.end_to_end(variant, check.data)
    assert call is None or 0 < call < 10
    assert end_to_end is None or 0 < end_to_end < 10
    assert (peer.workspace(variant) or 0) >= 0
    assert check.fault(whole(peer, variant)) is None
    peer.unload()


# ---- torch-cuda, with a stand-in for the parts of torch.cuda that need a device ----


class FakeCuda:
    """Runs on the CPU; its clock says that each call of a convolution takes a millisecond."""

    def __init__(self) -> None:
        self.calls = 0
        self.recording: FakeGraph | None = None

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch = pytest.importorskip("torch")
        fakes = {
            "is_available": lambda: True,
            "get_device_name": lambda: "a stand-in",
            "get_device_capability": lambda: (9, 0),
            "synchronize": lambda: None,
            "empty_cache": lambda: None,
            "current_stream": FakeStream,
            "Stream": FakeStream,
            "stream": contextlib.nullcontext,
            "Event": lambda enable_timing: FakeEvent(self),
            "CUDAGraph": FakeGraph,
            "graph": self.graph,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch, "set_grad_enabled", lambda enabled: None)  # for all tests

    @contextlib.contextmanager
    def graph(self, graph: FakeGraph) -> Iterator[None]:
        self.recording = graph
        yield
        self.recording = None

    def counted(self, run: Callable[[], Any]) -> Callable[[], Any]:
        def counting() -> Any:
            self.calls += 1
            result = run()
            if self.recording is not None:
                self.recording.runs.append((counting, result))
            return result

        return counting


class FakeStream:
    def wait_stream(self, other: FakeStream) -> None:
        pass


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record(self) -> None:
        self.at = self.cuda.calls

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: FakeEvent) -> float:
        return float(other.at - self.at)


class FakeGraph:
    """Runs anew what ran while it was recorded, into the tensors of then."""

    def __init__(self) -> None:
        self.runs: list[tuple[Callable[[], Any], Any]] = []

    def replay(self) -> None:
        for run, result in self.runs:
            result.copy_(run())


@pytest.mark.parametrize("text", [PROBLEMS[0], PROBLEMS[3], PROBLEMS[-1]])
def test_torch_cuda_times_and_checks_its_graph(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    cuda = FakeCuda()
    cuda.patch(monkeypatch)
    monkeypatch.syspath_prepend(peers_dir())
    script = importlib.import_module("torch_cuda")
    monkeypatch.setattr(script.TorchCuda, "device", "cpu")
    prepare = script.TorchCuda.prepare

    def counting(self: Any, loaded: Any) -> Any:
        loaded.run = cuda.counted(loaded.run)
        return prepare(self, loaded)

    monkeypatch.setattr(script.TorchCuda, "prepare", counting)
    peer = script.TorchCuda()
    versions, device = peer.describe()
    assert {"torch", "cuda", "cudnn"} == versions.keys()
    assert device == "a stand-in"
    problem = ConvProblem.parse(text)
    check = Check(problem)
    variants = peer.variants(problem)
    assert {v.precision for v in variants} == (
        {"f32", "tf32"} if problem.dtype == "f32" else {"f16"}
    )
    for variant in variants:
        peer.load(problem, variant, check.data)
        assert len(peer._loaded[variant.what].graph.runs) == 2  # two milliseconds of calls
        for repeats in (1, 2, 7):
            assert peer.time(variant, repeats) == pytest.approx(1e-3)
        output = peer.output(variant)
        assert np.isfinite(output).all()
        if variant.same_work:
            assert check.error(output) < bound(problem, problem.dtype)
    peer.unload()
    assert not peer._loaded
