"""Rows in TFRecord files, read by number.

A TFRecord file has no index, but every record starts with its length. One pass over the
lengths, skipping the data, finds the offset of each record. Then a process reads only its
own records.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from collective.errors import UsageError
from collective.training.input.source import Row, Source, numpy_rows, row_spec

# A record: uint64 length, uint32 CRC of it, data, uint32 CRC of the data.
_HEAD, _TAIL = 12, 4
_COMPRESSED = (b"\x1f\x8b", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")


class TFRecords(Source):
    """The records of uncompressed TFRecord files, in the order of the files.

    Args:
        files: Paths, or one path.
        parse: TensorFlow function from one serialized record (a scalar string) to
            ``(x, y)`` or ``(x, y, sample_weight)``, of static shapes.

    Raises:
        UsageError: A file is missing, compressed, truncated or not a TFRecord file, or
            ``parse`` does not return a row.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        parse: Callable[[tf.Tensor], Any],
    ):
        if isinstance(files, (str, os.PathLike)):
            files = [files]
        self._files = [str(file) for file in files]
        if not self._files:
            raise UsageError(
                "there are no TFRecord files to read",
                hint="pass at least one path; sorted(glob.glob('data/*.tfrecord')) "
                "finds them",
            )
        indices = [_index(path) for path in self._files]
        self._offsets = np.concatenate([offsets for offsets, _ in indices])
        self._lengths = np.concatenate([lengths for _, lengths in indices])
        # Where each file's records end in the list of all.
        self._ends = np.cumsum([len(offsets) for offsets, _ in indices])
        # A tf.function: AutoGraph converts the user's Python conditions.
        self._parse = tf.function(parse)
        parsed = tf.data.Dataset.from_tensors("").map(self._parse)
        self._spec = row_spec(parsed.element_spec, "the parse function")

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def spec(self) -> Row:
        """``(x, y, sample_weight)`` as ``parse`` returns them."""
        return self._spec

    def read(self, rows: tf.Tensor) -> Row:
        """Reads records and parses them one by one."""
        (records,) = numpy_rows(self._records, rows, [tf.TensorSpec([], tf.string)])
        weighted = self._spec[2] is not None
        signature = self._spec if weighted else self._spec[:2]
        parsed = tf.map_fn(self._parse, records, fn_output_signature=signature)
        return parsed if weighted else (*parsed, None)

    def _records(self, rows: np.ndarray) -> list[np.ndarray]:
        """Serialized records: one array of objects ``[n]``."""
        records = np.empty(len(rows), object)
        files = np.searchsorted(self._ends, rows, side="right")
        # Files are opened for each batch: there may be thousands, too many to keep open.
        for number in np.unique(files):
            with open(self._files[number], "rb") as file:
                for place in np.flatnonzero(files == number):
                    file.seek(self._offsets[rows[place]])
                    records[place] = file.read(self._lengths[rows[place]])
        return [records]


def _index(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and lengths of the data of each record: int64 ``[records]`` each."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            if not size:
                return np.empty(0, np.int64), np.empty(0, np.int64)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _check_kind(path, data)
                return _walk(path, data, size)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}",
            hint=f"check the path: ls -l {Path(path).parent}",
        ) from None


def _check_kind(path: str, data: mmap.mmap) -> None:
    """Refuses compressed files and other formats, by their first record.

    TensorFlow checks the CRC of the first length, which no other format passes.
    """
    first = next(iter(tf.data.TFRecordDataset(path).take(1).ignore_errors()), None)
    if first is not None:
        return
    if data[:2] in _COMPRESSED:
        raise UsageError(
            f"{path} is compressed: its records cannot be read by number",
            hint=f"decompress it (gzip -d), or pass tf.data.TFRecordDataset({path!r}, "
            "'GZIP').map(parse) with tf.data.experimental.assert_cardinality(n)",
        )
    raise UsageError(
        f"{path} is not a TFRecord file, or its first record is damaged",
        hint="write it again with tf.io.TFRecordWriter",
    )


def _walk(path: str, data: mmap.mmap, size: int) -> tuple[np.ndarray, np.ndarray]:
    # Arrays take eight bytes per record, lists of integers forty.
    offsets, lengths = array("q"), array("q")
    position = 0
    while position < size:
        length = size
        if position + _HEAD <= size:
            (length,) = struct.unpack_from("<Q", data, position)
        following = position + _HEAD + length + _TAIL
        if following > size:
            raise UsageError(
                f"{path} ends within record {len(offsets)}, at byte {size}",
                hint="it is truncated: copy it again, or remove it from the list",
            )
        offsets.append(position + _HEAD)
        lengths.append(length)
        position = following
    return np.frombuffer(offsets, np.int64), np.frombuffer(lengths, np.int64)
