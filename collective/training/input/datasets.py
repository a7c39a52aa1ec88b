"""Data sets by name, and those in a file.

``load`` finds the data that ``--data`` names; sources read it.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from collective.errors import UsageError
from collective.training.input.arrays import Arrays
from collective.training.input.conversion import as_source
from collective.training.input.npz import npz_sources
from collective.training.input.permutation import permute
from collective.training.input.source import Source
from collective.training.input.synthetic import Synthetic
from collective.training.input.views import MappedX
from collective.training.process.lookup import call, lookup

_SYNTHETIC = re.compile(r"synthetic(?::(\d+(?:x\d+)*))?(?::(\d+))?")
_SYNTHETIC_ROWS = 2048


@dataclasses.dataclass(frozen=True)
class Data:
    """A data set, ready to train on."""

    name: str  # as the user named it
    train: Source  # rows to train on
    test: Source | None = None  # rows to test on, or None
    classes: int | None = None  # None if labels are not integers


def load(what: str, *, seed: int = 0) -> Data:
    """Load a data set.

    Args:
        what: ``digits``, ``synthetic[:HxWxC[:CLASSES]]``, a
            ``.npz`` file, or ``module:function``: called with
            ``seed`` if it accepts that; returns a Data, or an argument for
            ``as_source``. x of uint8 and shape ``[n, h, w]`` or
            ``[n, h, w, c]`` in a ``.npz`` file is read as images: float32 in [0, 1]
            with a channel.
        seed: Of synthetic data. Splits never depend on it.

    Raises:
        UsageError: The data does not exist, or cannot be read.
    """
    if match := _SYNTHETIC.fullmatch(what):
        return _synthetic(what, match[1] or "32x32x3", int(match[2] or 10), seed)
    if what == "digits":
        return _digits(what)
    path = Path(what).expanduser()
    # Before ``module:function``: an existing file takes precedence.
    if path.is_file() or path.suffix == ".npz":
        return _npz(what, path)
    if ":" in what:
        data = call(lookup(what), seed=seed)
        return data if isinstance(data, Data) else _data(what, as_source(data), None)
    raise UsageError(
        f"there is no data set {what!r}, nor a file of that name",
        hint="--data digits | synthetic | synthetic:224x224x3:1000 | FILE.npz | "
        "module:function",
    )


def _data(name: str, train: Source, test: Source | None) -> Data:
    """Count the classes: one more than the highest label."""
    ranges = [s.label_range() for s in (train, test) if s is not None]
    highest = [r[1] for r in ranges if r is not None]
    return Data(name, train, test, max(highest) + 1 if highest else None)


def _digits(name: str) -> Data:
    """Load 1,797 real images of 8x8 pixels, part of scikit-learn; 360 to test on."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UsageError(
            "the digits are a part of scikit-learn, which is not installed",
            hint="pip install scikit-learn",
        ) from None
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    # Shuffled, because the file is sorted by writer; with a fixed key, because the test
    # rows must be the same for every seed.
    order = permute(np.arange(len(x)), len(x), (0, 0))
    x, y = x[order], y.astype(np.int32)[order]
    tested = len(x) // 5 + 1
    return Data(
        name, Arrays(x[:-tested], y[:-tested]), Arrays(x[-tested:], y[-tested:]), 10
    )


def _npz(name: str, path: Path) -> Data:
    train, test = npz_sources(path)
    return _data(name, _scaled(train), None if test is None else _scaled(test))


def _scaled(arrays: Arrays) -> Source:
    """Return floats in [0, 1] with a channel, if x holds images as bytes."""
    x = arrays.spec[0]
    if not isinstance(x, tf.TensorSpec) or x.dtype != tf.uint8:
        return arrays
    if len(x.shape) not in (2, 3):
        return arrays

    def scale(pixels: Any) -> Any:
        pixels = tf.cast(pixels, tf.float32) / 255
        return pixels if len(x.shape) == 3 else pixels[..., tf.newaxis]

    return MappedX(arrays, scale)


def _synthetic(name: str, shape_text: str, classes: int, seed: int) -> Data:
    shape = tuple(int(size) for size in shape_text.split("x"))
    if not classes or 0 in shape:
        raise UsageError(
            f"{name} has an empty row or no class",
            hint="write synthetic:HEIGHTxWIDTHxCHANNELS:CLASSES, "
            "as in synthetic:224x224x3:1000",
        )
    rows, tested = _SYNTHETIC_ROWS, _SYNTHETIC_ROWS // 4
    return Data(
        name,
        Synthetic(shape, classes, rows, seed=seed),
        Synthetic(shape, classes, tested, seed=seed, first=rows),
        classes,
    )
