"""A folder of images, one sub-folder for each class."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from collective.errors import UsageError
from collective.training.input.source import Row, Source, numpy_rows

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png")


class ImageFolder(Source):
    """Images decoded and resized as they are read: float32 in [0, 1], int32 labels.

    Args:
        folder: Has one sub-folder for each class. Files without an image's suffix are
            ignored.
        image_size: ``(height, width)`` of all images after resizing; by default that of
            the first image.
        channels: 1 for grey, 3 for colour, 4 with transparency.
        classes: Names of the sub-folders in the order of labels; by default, sorted.

    Raises:
        UsageError: The folder does not exist or has no image, or one of its classes is
            not in ``classes``.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        image_size: tuple[int, int] | None = None,
        channels: int = 3,
        *,
        classes: Sequence[str] | None = None,
    ):
        folder = Path(folder)
        found = _images(folder)
        self.classes = tuple(sorted(found) if classes is None else classes)
        if unknown := sorted(found.keys() - set(self.classes)):
            raise UsageError(
                f"{folder / unknown[0]} is a class that the training images lack",
                hint=f"remove it; the classes are {', '.join(self.classes)}",
            )
        self._paths = [path for name in self.classes for path in found.get(name, [])]
        self._labels = np.repeat(
            np.arange(len(self.classes), dtype=np.int32),
            [len(found.get(name, [])) for name in self.classes],
        )
        self.channels = channels
        if image_size is None:
            with tf.device("CPU:0"):
                image_size = tuple(self._decode(self._paths[0]).shape[:2])
        self.image_size = image_size

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def spec(self) -> Row:
        """``[height, width, channels]`` float32 and a scalar int32."""
        image = tf.TensorSpec([*self.image_size, self.channels], tf.float32)
        return image, tf.TensorSpec([], tf.int32), None

    def read(self, rows: tf.Tensor) -> Row:
        """Reads and decodes images.

        In Python, with eager operations: an error inside a graph does not know the file.
        The operations release Python's lock.
        """
        x, y = numpy_rows(self._read, rows, self.spec[:2])
        return x, y, None

    def label_range(self) -> tuple[int, int] | None:
        """Labels are numbers of sub-folders."""
        return int(self._labels.min()), int(self._labels.max())

    def _read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        images = np.empty([len(rows), *self.image_size, self.channels], np.float32)
        # Not on an accelerator, which would wait for it.
        with tf.device("CPU:0"):
            for image, row in zip(images, rows, strict=True):
                decoded = self._decode(self._paths[row])
                if tuple(decoded.shape[:2]) != self.image_size:
                    decoded = tf.image.resize(decoded, self.image_size, antialias=True)
                np.divide(decoded, 255, out=image)
        return images, self._labels[rows]

    def _decode(self, path: str) -> tf.Tensor:
        """Pixels 0 to 255 as ``[height, width, channels]``."""
        try:
            return tf.io.decode_image(
                tf.io.read_file(path), self.channels, expand_animations=False
            )
        except tf.errors.OpError as error:
            # Without the names of TensorFlow's operation.
            reason = re.sub(r"\{\{.*?\}\}|\[Op:.*", "", error.message).strip()
            raise UsageError(
                f"{path} cannot be read as an image: {reason}",
                hint="replace or remove the file",
                everywhere=False,
            ) from None


def _images(folder: Path) -> dict[str, list[str]]:
    """Paths of the images of each class, sorted."""
    hint = f"make {folder}/CLASS/IMAGE.png, a sub-folder for each class"
    if not folder.is_dir():
        raise UsageError(f"folder {folder} does not exist", hint=hint)
    found = {
        child.name: sorted(
            str(file)
            for file in child.rglob("*")
            if file.suffix.lower() in _SUFFIXES and file.is_file()
        )
        for child in folder.iterdir()
        if child.is_dir() and not child.name.startswith(".")
    }
    found = {name: files for name, files in found.items() if files}
    if not found:
        raise UsageError(
            f"{folder} has no sub-folder with images ({', '.join(_SUFFIXES)})",
            hint=hint,
        )
    return found
