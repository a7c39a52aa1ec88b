"""Shared by several benchmarks: models, data, and contestants that take turns."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    import keras

Result = TypeVar("Result")

ROOT = Path(__file__).resolve().parents[1]
# Followed by the number of ranks and a command.
LAUNCH = [sys.executable, "-m", "collective.launch", "-np"]
CLASSES = 10
# The shape of a row.
SHAPES = {"resnet50": (64, 64, 3)} | dict.fromkeys(
    ("mlp", "cnn", "transformer"), (28, 28, 1)
)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help begins with a program's first line."""
    return argparse.ArgumentParser(description=(description or "").splitlines()[0])


def take_turns(
    contestants: dict[str, Callable[[], Result]], rounds: int
) -> dict[str, list[Result]]:
    """Return by contestant its results in each round."""
    found: dict[str, list[Result]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            found[name].append(run())
    return found


def random_rows(count: int, shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return data whose values do not matter: x ``[count, *shape]`` and y ``[count]``."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, *shape)).astype(np.float32)
    return x, rng.integers(0, CLASSES, count).astype(np.int32)


def compiled(
    name: str, optimizer: Any, shape: Sequence[int], **options: Any
) -> keras.Model:
    """Return a built-in model of ``collective.training.calls.models``; imports TensorFlow."""
    import keras

    from collective.training.calls import models

    model = models.build(name, input_shape=tuple(shape), classes=CLASSES)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **options)
    return model


def transformer(input_shape: tuple[int, ...], classes: int) -> keras.Model:
    """Return a transformer of 8 blocks of width 256, for ``train.py --model``."""
    from collective.training.calls.models import transformer

    return transformer(input_shape, classes, blocks=8, width=256, heads=8)


def training_step(name: str, backend: Any, plan: Any) -> Any:
    """Return what makes a step of ``collective.fit`` for a model of 8x8 images.

    Args:
        name: The model.
        backend: A backend of ``collective.backends``.
        plan: The input, from ``collective.training.input.pipeline``.

    Returns:
        A function of a ``Batch``.
    """
    import keras

    from collective.training import keras_compat
    from collective.training.steps.batch_function import BatchFunction
    from collective.training.steps.settings import StepSettings

    keras.utils.set_random_seed(0)
    with backend.scope():
        options = {"metrics": ["accuracy"], "jit_compile": False}
        model = compiled(name, "adam", (8, 8, 1), **options)
        keras_compat.model.build(model, plan.spec[:3])
    settings = StepSettings(backend)
    return BatchFunction(model, model.train_step, "train_step", settings).run


def print_pairs(
    names: tuple[str, str], seconds: Iterable[Sequence[float]], steps: int
) -> None:
    """Print the medians of two contestants, and of the ratio pair by pair.

    Args:
        names: Names of the contestants.
        seconds: Times of the blocks, for each contestant.
        steps: Steps of a block.
    """
    first, second = (np.array(times) for times in seconds)
    for name, times in zip(names, (first, second), strict=True):
        print(f"  {name:15} {1e3 * np.median(times) / steps:8.2f} ms a step (median)")
    low, middle, high = np.percentile(first / second, [25, 50, 75])
    print(f"  {'ratio':15} {middle:8.3f} (quartiles {low:.3f} to {high:.3f})")
