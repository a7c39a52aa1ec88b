"""Horovod's examples on two ranks, and with ranks that join and are killed."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image

from tests.horovod_conformance.launch import EVENTS, Ended, Job, ended, run, started

# MobileNet instead of ResNet50, and small batches, so that two cores need minutes.
_SMALL = ("--model", "MobileNet", "--no-cuda", "--batch-size", "2")
_SMALL += ("--num-batches-per-iter", "2", "--num-iters", "3")
_WARM = (*_SMALL, "--num-warmup-batches", "1")
_IMAGES = ("--train-dir", "train", "--val-dir", "val", "--batch-size", "2")
_IMAGES += ("--val-batch-size", "2", "--epochs")
_ELASTIC = "elastic/tensorflow2/"
_WAIT_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class Example:
    """A way to run one of Horovod's examples.

    Attributes:
        file: Its path below ``examples``.
        arguments: Its command line.
        how: ``ranks`` on two ranks; ``alone`` without a launcher, because it starts its own
            job; ``grows`` from one rank to two and three, of which the last one, or with
            ``loses first`` rank 0, is killed and replaced; ``shrinks`` from two ranks to
            one.
    """

    file: str
    arguments: tuple[str, ...] = ()
    how: str = "ranks"

    def __str__(self) -> str:
        name = self.file.removesuffix(".py").replace("tensorflow2_", "")
        if self.how == "ranks":
            more = self.arguments if "imagenet" in name else ()
            return " ".join([name, *more[-2:]])
        return " ".join([f"{name}:", self.how, *self.arguments[:3]])


EXAMPLES = (
    Example("tensorflow2/tensorflow2_keras_mnist.py"),
    Example("tensorflow2/tensorflow2_keras_mnist.py", ("2", "localhost:2", "gloo"), "alone"),
    Example("tensorflow2/tensorflow2_mnist.py"),
    Example("tensorflow2/tensorflow2_mnist.py", ("2", "localhost:2", "mpi"), "alone"),
    Example("tensorflow2/tensorflow2_keras_synthetic_benchmark.py", _SMALL),
    Example("tensorflow2/tensorflow2_synthetic_benchmark.py", _WARM),
    Example("keras/keras_mnist.py"),
    Example("keras/keras_mnist_advanced.py", ("--epochs", "3")),
    Example("keras/keras_imagenet_resnet50.py", (*_IMAGES, "1")),
    Example("keras/keras_imagenet_resnet50.py", (*_IMAGES, "2")),  # it trains from epoch 1
    Example(f"{_ELASTIC}tensorflow2_keras_mnist_elastic.py", (), "grows"),
    Example(f"{_ELASTIC}tensorflow2_keras_mnist_elastic.py", (), "grows, loses first"),
    Example(f"{_ELASTIC}tensorflow2_mnist_elastic.py", (), "grows"),
    Example(f"{_ELASTIC}tensorflow2_mnist_elastic.py", (), "grows, loses first"),
    Example(f"{_ELASTIC}tensorflow2_mnist_elastic.py", ("2", "1", "2", "localhost:2"), "alone"),
    # It reduces gradients before it has state; a newcomer does this alone.
    Example(f"{_ELASTIC}tensorflow2_synthetic_benchmark_elastic.py", _WARM, "shrinks"),
)  # fmt: skip


def result(copy: Path, job: Job, example: Example) -> tuple[str, str]:
    """Run it; return its outcome, and its last lines after a failure."""
    folder = (copy / "examples" / example.file).parent
    if "imagenet" in example.file:
        _draw(folder)
    command = [sys.executable, "-c", "import example; example.main()"]
    command += [Path(example.file).name, *example.arguments]
    path = [str(copy / "tools")]
    if example.how == "shrinks":
        end = _elastic(command, 2, 2, 1, folder, job, path)
    elif example.how.startswith("grows"):
        victim = 0 if "loses" in example.how else 2
        end = _elastic(command, 1, 3, victim, folder, job, path)
    else:
        words = job.words if example.how == "ranks" else ()
        end = run([*words, *command], folder, job, path)
    same = re.findall(r"rank \d+ of (\d+): same weights", end.stdout)
    if end.code == 0 and same and set(same) == {str(len(same))}:
        return f"same weights on {len(same)} ranks", ""
    return "no end" if end.code is None else f"exit code {end.code}", end.tail


def _elastic(
    command: list[str],
    first: int,
    most: int,
    victim: int,
    folder: Path,
    job: Job,
    path: list[str],
) -> Ended:
    """Grow from ``first`` to ``most`` ranks, one by one; then kill rank ``victim``.

    It is replaced, unless there were never more ranks than at first.
    """
    events = folder / f"events-{time.monotonic_ns()}"
    events.mkdir()
    slots = events / "slots.sh"

    def offer(number: int) -> None:
        part = events / "part"
        part.write_text(f"#!/bin/sh\necho localhost:{number}\n")
        part.chmod(0o755)
        part.rename(slots)

    def ranks(number: int, without: int = 0) -> dict[int, int]:
        """Return process ids by rank, once so many work together."""
        until = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < until and process.poll() is None:
            found = {
                int(rank): int(file.name)
                for file in events.iterdir()
                if file.name.isdigit() and _lives(int(file.name))
                for rank, size in [file.read_text().split()]
                if size == str(number)
            }
            if len(found) == number and without not in found.values():
                return found
            time.sleep(0.2)
        raise TimeoutError(f"{number} ranks have not come together")

    offer(first)
    grows = most > first
    elastic = [*job.launcher, "-np", str(first), "--min-np", "1"]
    if grows:
        elastic += ["--max-np", str(most), "--host-discovery-script", str(slots)]
    with started(
        [*elastic, *command], folder, job, path, {EVENTS: str(events)}
    ) as process:
        problem = ""
        try:
            together = ranks(first)
            for number in range(first + 1, most + 1):
                offer(number)
                together = ranks(number)
            os.kill(together[victim], signal.SIGKILL)
            ranks(most if grows else most - 1, without=together[victim])
        except TimeoutError as error:
            problem = f"{error}\n"
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        (events / "done").touch()
        end = ended(process)
        end.stderr += problem
        end.code = end.code or int(bool(problem))
        return end


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _draw(folder: Path) -> None:
    """Write a few random pictures in place of ImageNet's, of a thousand classes."""
    random = np.random.default_rng(0)
    for kind in ("train", "val"):
        for number in range(1000):
            label = folder / kind / f"{number:03d}"
            label.mkdir(parents=True, exist_ok=True)
            if number < 8:
                pixels = random.integers(0, 256, (64, 64, 3), np.uint8)
                Image.fromarray(pixels).save(label / "0.png")
