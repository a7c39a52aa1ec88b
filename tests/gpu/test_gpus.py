"""Tests on GPUs, in one prepared run of eight minutes: the most doubtful first.

    make test-gpu

It prints as it runs, so that a run that is cut off has shown something. Tests that remain
after ``MINUTES`` are skipped. Tests for several GPUs are skipped by name if there is one.
Without a GPU the same tests run on processors, with two logical devices: that shows only
that the tests run.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from collective.backends.devices import gpus
from collective.backends.horovod import installed
from collective.environment.gpus import granted
from tests import launch
from tests.training.unedited import test_keras_programs as programs
from tests.training.unedited import test_loop_programs as loop_programs

pytestmark = launch.STARTS_RANKS

GPUS = len(granted())
COUNT = GPUS or 2  # devices; logical ones if there is no GPU
MINUTES = float(os.environ.get("MINUTES", "8"))
BEGAN = time.monotonic()
HERE = "tests/gpu"
SETTINGS = {
    "NVIDIA_TF32_OVERRIDE": "0",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    launch.ON_GPU: "1",
}
#: Faults of earlier runs on one GPU: two without an explanation, then corrected ones.
UNEXPLAINED = ["segmentation", "generator_input"]
FAULTS = [
    *("lstm_masking", "language_model", "text_classification"),
    *("multi_input_output", "transformer"),
]
several = pytest.mark.skipif(GPUS == 1, reason="wants two GPUs or more; here is one")


@pytest.fixture(autouse=True)
def in_time(request, monkeypatch):
    """Print when each begins and how long it took; skip tests that begin too late."""
    if left() < 10:
        pytest.skip(f"the {MINUTES:g} minutes were over")
    start = launch.run

    def until_the_end(words, env, seconds):
        return start(words, env | SETTINGS, min(seconds, left() / launch.PATIENCE))

    monkeypatch.setattr(launch, "run", until_the_end)
    began = time.monotonic()
    print(f"\n[{began - BEGAN:.0f} s] {request.node.name}", flush=True)
    yield
    print(f"   took {time.monotonic() - began:.0f} s", flush=True)


def left() -> float:
    """Return the remaining seconds."""
    return 60 * MINUTES - (time.monotonic() - BEGAN)


def run(words: list[str], shown: str = ".", **variables: str) -> str:
    """Run Python with these words; print and return its output.

    Args:
        shown: Pattern of the lines to print; if the run fails, the last lines are printed.
    """
    env = launch.environment(**variables)
    code, printed = launch.run([sys.executable, *words], env, 60 * MINUTES)
    lines = [line for line in printed.splitlines() if not NOISE.search(line)]
    if code == 0:
        lines = [line for line in lines if re.search(shown, line)]
    print("\n".join(f"   {line}" for line in lines[-60:]), flush=True)
    assert code is not None, "the time was over"
    assert code == 0, f"exit code {code}"
    return printed


NOISE = re.compile(r"WARNING: All log|^[IWE]0000|oneDNN|rebuild TensorFlow|TF-TRT")


def on_ranks(
    backend: str, ranks: int, words: list[str], shown: str = ".", **variables: str
) -> str:
    start = launch.command(backend, ranks)
    start = start[1:] if start[0] == sys.executable else ["-c", EXEC, *start]
    return run([*start, sys.executable, *words], shown, **variables)


EXEC = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"


def device(*words: str, shown: str = ".") -> str:
    return run([f"{HERE}/device.py", *words], shown)


# --- the faults of earlier runs -------------------------------------------------------


def test_tensorflow_sees_the_gpus_that_the_driver_has():
    print(f"   {GPUS} GPUs" if GPUS else f"   no GPU: {COUNT} logical devices")
    assert gpus() == GPUS


def compared(names: list[str], folder, *options: str) -> None:
    """Compare programs on two ranks of one GPU with stock Keras, which trains in parallel."""
    precision, stock, ours = "float64", folder / "stock", folder / "ours"
    stock.mkdir()
    ours.mkdir()
    with ThreadPoolExecutor(2) as pool:
        words = [sys.executable, programs.DRIVER, str(stock), *names]
        first = pool.submit(programs.run, words, stock, precision, len(names))
        second = pool.submit(
            programs.train, ours, "native", 2, precision, names, options
        )
        printed = first.result(), second.result()
    wrong = {
        name: text
        for name in names
        for rank in range(2)
        if (text := programs.differences(ours, stock, name, rank, precision))
    }
    for name in names:
        print(f"   {name}: {wrong.get(name, 'equal')}", flush=True)
    assert not wrong, printed[1][-2000:]


def test_unexplained_programs(tmp_path):
    """The distance between two trainings by stock Keras limits the test of ranks."""
    device("noise", *UNEXPLAINED, shown="^stock")
    compared(UNEXPLAINED, tmp_path)


def test_recurrent_layers_by_rows():
    device("recurrent")


def test_programs_that_showed_faults(tmp_path):
    compared(FAULTS, tmp_path)


# --- the partition's rules ------------------------------------------------------------


def test_rules_of_the_partition():
    """All rules run on GPUs, also with replicas without rows; a few run elsewhere."""
    words = ["tests/training/partition"] if GPUS else [FEW_RULES]
    workers = ["-n", str(min(6, os.cpu_count() or 1))] if GPUS else []

    def with_floats(precision: str) -> None:
        pytest_ = ["-m", "pytest", "-q", "--tb=short", *workers, *words]
        run(pytest_, "passed", FLOATX=precision)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(with_floats, ["float64", "float32"]))


FEW_RULES = "tests/training/partition/test_by_rows.py::test_images"


def test_draws_have_the_order_of_the_host():
    device("draws")


def test_orders_of_sums(tmp_path):
    """Operations whose bits differ between ranks are those that one rank computes for all."""
    files = [tmp_path / str(rank) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda file: device("orders", str(file)), files))
    first, second = (json.loads(file.read_text()) for file in files)
    from collective.training.partition import atomics

    apart = {name for name in first if first[name] != second.get(name)}
    print(f"   other bits on two ranks: {sorted(apart) or 'none'}")
    assert apart <= atomics._CHEAP | atomics._DEAR


# --- examples -------------------------------------------------------------------------


def test_examples_of_loops(tmp_path):
    names = loop_programs.NAMES
    compared(names if GPUS else names[:2], tmp_path, "--loops")


def test_examples_of_strategies(tmp_path):
    script = "tests/training/distribute/run_programs.py"
    few = [] if GPUS else ["loop", "embedding"]
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    stock.mkdir()
    ours.mkdir()
    run([script, "stock", str(stock), *few], "^---", FLOATX="float64")
    words = [script, "native:unedited", str(ours), *few]
    on_ranks("native", 2, words, "^$", FLOATX="float64")
    worst = {}
    for file in sorted(stock.glob("*.npz")):
        for rank in range(2):
            expected = np.load(file)
            found = np.load(ours / f"{file.stem.rpartition('.')[0]}.{rank}.npz")
            for key in expected.files:
                a, b = expected[key], found[key]
                scale = max(1e-3, np.abs(a).max(initial=0))
                apart = np.abs(a - b).max(initial=0) / scale
                worst[file.stem] = max(apart, worst.get(file.stem, 0))
    print("\n".join(f"   {name}: {apart:.1e}" for name, apart in worst.items()))
    assert max(worst.values()) < 1e-10


BACKENDS = [("native", 2), ("mpi", 2), ("horovod", 2), ("tf-multiworker", 2)]


def trained(backend: str, ranks: int, path, *more: str) -> dict:
    """Return the summary of a training of the built-in CNN."""
    file = path / f"{backend}.json"
    options = ["--model", "cnn", "--steps", "30", "--seed", "1", "--json", str(file)]
    words = ["train.py", "--backend", backend, *options, *more]
    shown = "samples per|time per"
    _ = on_ranks(backend, ranks, words, shown) if ranks > 1 else run(words, shown)
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return trained("single", 1, tmp_path_factory.mktemp("single"))["losses"]


@pytest.mark.parametrize("backend, ranks", BACKENDS)
def test_every_backend_trains_what_one_device_trains(
    backend, ranks, reference, tmp_path
):
    if backend == "horovod" and installed.misfit():
        pytest.skip("no Horovod")
    found = trained(backend, ranks, tmp_path)
    assert found["losses"] == pytest.approx(reference, rel=1e-3)


# --- time and memory ------------------------------------------------------------------


def test_memory():
    device("memory", *(["cnn", "resnet50"] if GPUS else ["cnn"]))


@pytest.mark.parametrize("model", ["mlp", "cnn", "resnet50"] if GPUS else ["mlp"])
def test_a_step_beside_that_of_stock_keras(model):
    """Stock Keras uses ``jit_compile`` by default on a GPU."""
    words = ["benchmarks/fit_overhead.py", model, "--pairs", "4"]
    for more in ([], ["--jit-compile"]) if model != "resnet50" else ([],):
        run([*words, *more], "a step|ratio|XLA")


@pytest.mark.parametrize("backend", ["native", "mpi"])
def test_buckets_on_the_way_to_the_host(backend, tmp_path):
    """One message a step is compared with one for each 16 MiB of the backward pass."""
    model = ["--model", "resnet50", "--data", "synthetic:64x64x3:10"] if GPUS else []
    for size in ([], ["--bucket-bytes", str(16 << 20)]):
        print(f"   {' '.join(size) or 'one message'}")
        trained(backend, 2, tmp_path, *model, *size)


def test_the_rest_of_the_examples(tmp_path):
    """They take longest, so they run after all other tests of one GPU."""
    known = {*UNEXPLAINED, *FAULTS}
    names = [name for name in programs.NAMES if name not in known]
    compared(names if GPUS else names[:1], tmp_path)


# --- several GPUs ---------------------------------------------------------------------

VISIBLE = """
import os, tensorflow as tf
tf.config.set_visible_devices(tf.config.list_physical_devices("GPU")[:1], "GPU")
place = os.environ.get("CUDA_VISIBLE_DEVICES")
print(f"devices {place} {len(tf.config.list_logical_devices('GPU'))}")
"""


@several
def test_ranks_of_an_unedited_script_have_gpus_of_their_own(tmp_path):
    script = tmp_path / "visible.py"
    script.write_text(VISIBLE)
    words = ["-m", "collective.launch", "-np", "2", "--keras", "--output", "all"]
    printed = run([*words, str(script)])
    half = GPUS // 2
    for names in (granted()[:half], granted()[half : 2 * half]) if GPUS else ():
        assert f"devices {','.join(names)} 1" in printed


@several
@pytest.mark.parametrize("communication", ["nccl", "ring"] if GPUS else ["ring"])
def test_a_rank_on_each_device(communication, reference, tmp_path):
    more = ["--communication", communication]
    found = trained("tf-multiworker", COUNT, tmp_path, *more)
    assert found["losses"] == pytest.approx(reference, rel=1e-3)


@several
def test_one_process_with_all_devices(reference, tmp_path):
    found = trained("tf-mirrored", 1, tmp_path, "--devices", str(COUNT))
    assert found["losses"] == pytest.approx(reference, rel=1e-3)


def number(printed: str, what: str) -> float:
    return float(re.findall(rf"{what}: ([\d.]+)", printed)[-1])


@several
def test_speeds_beside_stock_strategies():
    """ResNet-50 on all GPUs: images per second, scaling, and the hidden part of NCCL."""
    speeds = f"{HERE}/speeds.py"
    alone = number(run([speeds, "ours", "single"]), "images/s")
    stock = number(run([speeds, "mirrored", "1"]), "images/s")
    table = [("single, ours", 1, alone), ("MirroredStrategy, stock", 1, stock)]
    runs = {
        "MirroredStrategy, stock": lambda: run([speeds, "mirrored", str(COUNT)]),
        "MultiWorkerMirroredStrategy, stock": lambda: by_workers(speeds),
        "tf-mirrored": lambda: run([speeds, "ours", f"tf-mirrored:{COUNT}"]),
        **{
            name: lambda name=name: on_ranks(name, COUNT, [speeds, "ours", name])
            for name in ("tf-multiworker", "native", "mpi")
        },
    }
    for name, start in runs.items():
        table.append((name, COUNT, number(start(), "images/s")))
    print("   images/s  scaling")
    for name, count, speed in table:
        of = stock if name.endswith("stock") else alone
        print(f"   {speed:8.1f}  {speed / (count * of):7.2f}  {name}, {count} devices")
    sums = number(
        on_ranks("tf-multiworker", COUNT, [speeds, "nccl", "tf-multiworker"]),
        "milliseconds",
    )
    speed = dict((name, s) for name, _, s in table)["tf-multiworker"]
    rows = 64 if GPUS else 8
    grown = 1e3 * rows * (COUNT / speed - 1 / alone)
    print(f"   the sum alone {sums:.2f} ms; a step grew by {grown:.2f} ms")


def by_workers(speeds: str) -> str:
    """Run a process on each device, as TensorFlow's launcher does; return the output."""
    ports = [free_port() for _ in range(COUNT)]
    workers = [f"localhost:{port}" for port in ports]

    def start(index: int) -> str:
        task = {
            "cluster": {"worker": workers},
            "task": {"type": "worker", "index": index},
        }
        shown = {"CUDA_VISIBLE_DEVICES": granted()[index]} if GPUS else {}
        return run([speeds, "multiworker"], TF_CONFIG=json.dumps(task), **shown)

    with ThreadPoolExecutor(COUNT) as pool:
        printed, *_ = pool.map(start, range(COUNT))
    return printed


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])
