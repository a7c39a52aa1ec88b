"""On a machine with GPUs: each rank on its own, every backend equal, and how fast.

make test-gpu
"""

from __future__ import annotations

import json
import sys

import pytest

from collective.backends.devices import gpus
from collective.environment.gpus import granted
from tests import launch
from tests.training.unedited.test_keras_programs import check
from tests.training.unedited.test_keras_programs import stock as stock  # a fixture

pytestmark = [
    *launch.STARTS_RANKS,
    pytest.mark.skipif(not granted(), reason="this machine has no GPU"),
]
STEPS = 30
# NCCL takes one rank on each GPU; the others may share them.
BACKENDS = [
    ("tf-mirrored", 1), ("tf-multiworker", len(granted())),
    ("native", 2), ("mpi", 2), ("horovod", 2),
]  # fmt: skip
# What a GPU does otherwise than a processor: look-ups that repeat, cuDNN's masks, XLA for
# what is gathered, float16.
PROGRAMS = [
    "language_model", "text_classification", "lstm_masking", "multi_input_output",
    "transformer", "mixed_precision", "segmentation",
]  # fmt: skip
VISIBLE = """
import os, tensorflow as tf
tf.config.set_visible_devices(tf.config.list_physical_devices("GPU")[0], "GPU")
place = os.environ["CUDA_VISIBLE_DEVICES"]
print(f"devices {place} {len(tf.config.list_logical_devices('GPU'))}")
"""


def run(command: list[str], seconds: float = 300, **variables: str) -> str:
    code, printed = launch.run(command, launch.environment(**variables), seconds)
    assert code == 0, printed
    return printed


def trained(backend: str, ranks: int, path, tf32: str = "0") -> dict:
    """The summary of a training of the built-in CNN on GPUs, without TensorFloat-32."""
    start = launch.command(backend, ranks) if ranks > 1 else []
    options = ["--model", "cnn", "--steps", str(STEPS), "--seed", "1"]
    json_file = ["--json", str(path / f"{backend}.json")]
    program = [sys.executable, "train.py", "--backend", backend, *options, *json_file]
    run([*start, *program], NVIDIA_TF32_OVERRIDE=tf32)
    return json.loads((path / f"{backend}.json").read_text())


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return trained("single", 1, tmp_path_factory.mktemp("single"))


def test_tensorflow_sees_the_gpus_that_the_driver_has():
    assert gpus() == len(granted())


def test_ranks_of_an_unedited_script_have_gpus_of_their_own(tmp_path):
    if len(granted()) < 2:
        pytest.skip("one GPU only")
    script = tmp_path / "visible.py"
    script.write_text(VISIBLE)
    words = ["-m", "collective.launch", "-np", "2", "--keras", "--output", "all"]
    printed = run([sys.executable, *words, str(script)])
    half = len(granted()) // 2
    for names in (granted()[:half], granted()[half : 2 * half]):
        assert f"devices {','.join(names)} 1" in printed


@pytest.mark.parametrize("backend, ranks", BACKENDS)
def test_every_backend_trains_what_one_gpu_trains(backend, ranks, reference, tmp_path):
    if backend == "horovod":
        pytest.importorskip("horovod")
    if backend == "tf-multiworker" and ranks < 2:
        pytest.skip("one GPU only")
    found = trained(backend, ranks, tmp_path)
    assert found["losses"] == pytest.approx(reference["losses"], rel=1e-3)


def test_a_step_proves_itself_where_tensorfloat32_trains_it(tmp_path):
    assert trained("native", 2, tmp_path, tf32="1")["losses"][-1] < 1


def test_programs_train_what_one_gpu_trains(tmp_path, stock, monkeypatch):
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # of stock Keras
    check(tmp_path, stock, "native", 2, "float64", PROGRAMS)


def test_speed(tmp_path):
    """Prints a table; asserts nothing of it."""
    compare = [sys.executable, "compare.py", "-np", str(max(2, len(granted())))]
    print(run([*compare, "--steps", "50", "--output", str(tmp_path)], 900))
