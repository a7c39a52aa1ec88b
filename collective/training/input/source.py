"""The interface of data sources; each kind of data has a file of its own.

A source knows how many rows it has, the shapes and dtypes of one row, and how to read
rows by number. ``collective.training.input.pipeline`` decides which rows make a batch and
which replica reads them.
"""

from __future__ import annotations

import abc
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from collective.errors import UsageError
from collective.training.input.leaves import checksum

Row = tuple[Any, Any, Any]
"""``(x, y, sample_weight)``: trees of tensors; sample_weight may be None."""

_USAGE_ERROR = re.compile(r"UsageError: (.*)\nHINT: (.*)")
# The message of assert_cardinality for a data set with more or fewer rows.
_WRONG_LENGTH = re.compile(
    r"expected to contain \d+ elements but contained .*\d+ elements"
)


class Source(abc.ABC):
    """Rows of a data set.

    Attributes:
        random_access: Whether ``read`` takes rows in any order. If not, the rows can
            only be read in the order of the data: ``in_order`` replaces ``read``, and
            nothing is shuffled here.
        preview: Some first rows, of a source without random access.
    """

    random_access: ClassVar[bool] = True
    preview: Row | None = None

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @property
    @abc.abstractmethod
    def spec(self) -> Row:
        """``(x, y, sample_weight)`` of one row, as trees of ``tf.TensorSpec``.

        Shapes are fully known and have no batch dimension.
        """

    @property
    def batch_spec(self) -> Row:
        """``(x, y, sample_weight)`` of any number of rows, as trees of type specs."""

        def open_rows(leaf: tf.TensorSpec) -> tf.TensorSpec:
            return tf.TensorSpec([None, *leaf.shape], leaf.dtype)

        x, y, sample_weight = (
            None if part is None else tf.nest.map_structure(open_rows, part)
            for part in self.spec
        )
        return x, y, sample_weight

    @abc.abstractmethod
    def read(self, rows: tf.Tensor) -> Row:
        """Read rows by number; called while ``tf.data`` traces its map function.

        Args:
            rows: int64 ``[n]``, in any order; n may be 0. Row i is always the same
                example.

        Returns:
            Trees of tensors ``[n, ...]`` in the structure of ``spec``.
        """

    def in_order(
        self, batch_size: int, first_step: int, last_step: int
    ) -> tf.data.Dataset:
        """Return whole global batches in the order of the data, without random access.

        Args:
            batch_size: Rows of a global batch; the last of an epoch may have fewer.
            first_step: First step, counted over all epochs.
            last_step: Step to stop before.

        Returns:
            A data set of ``last_step - first_step`` elements ``(x, y, sample_weight)``.
        """
        raise NotImplementedError(f"{type(self).__name__} reads rows by number")

    def label_range(self) -> tuple[int, int] | None:
        """Return the smallest and largest label, or None if y is not integer or large."""
        return None

    def fingerprint(self) -> int:
        """Return a checksum of the first row, to detect ranks with different data."""
        return int(checksum(self.read(tf.zeros([min(1, len(self))], tf.int64))))


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method, and does not keep its object.

    TensorFlow keeps every Python function of a data set as long as the process lives; the
    arrays of a training must not stay with it. The data set keeps the object.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        found = reference()
        assert found is not None, "the source of these rows was dropped"
        return found(*args)

    return call


def numpy_rows(
    method: Callable[[np.ndarray], Sequence[np.ndarray]],
    rows: tf.Tensor,
    specs: Sequence[tf.TensorSpec],
) -> list[tf.Tensor]:
    """Return what a method of a source returns for row numbers: ``[n, *shape]`` for each spec."""
    dtypes = [spec.dtype for spec in specs]
    tensors = tf.numpy_function(weakly(method), [rows], dtypes, stateful=False)
    for tensor, spec in zip(tensors, specs, strict=True):
        tensor.set_shape([rows.shape[0], *spec.shape])
    return tensors


def row_spec(element: Any, where: str) -> Row:
    """Return ``(x, y, sample_weight)`` of one element of a user's data set or parser.

    Raises:
        UsageError: It is not such a tuple, or a shape is not fully known.
    """
    if not isinstance(element, tuple) or len(element) not in (2, 3):
        raise UsageError(
            f"{where} gives {described(element)} for a row, not (x, y) or "
            "(x, y, sample_weight)",
            hint="return a tuple (x, y); several inputs go into x as a dict or tuple",
        )
    leaves = tf.nest.flatten(element)
    if all(isinstance(s, tf.TensorSpec) and _is_open(s) for s in leaves):
        raise UsageError(
            f"{where} gives {leaves[0]} for a row, a shape that is not fully known: "
            "its elements are batches",
            hint="leave global_batch_size= out, and its batches are used; or unbatch() "
            "it (and assert_cardinality) to have single rows",
        )
    for leaf in leaves:
        if not isinstance(leaf, tf.TensorSpec) or not leaf.shape.is_fully_defined():
            raise UsageError(
                f"{where} gives {leaf} for a row: a shape that is not fully known",
                hint="fix it with tf.ensure_shape(tensor, shape), and pad or resize "
                "rows that differ",
            )
    return (*element, None) if len(element) == 2 else element


def _is_open(spec: tf.TensorSpec) -> bool:
    """Return whether nothing is known of the first axis, as of the rows of a batch."""
    return bool(spec.shape.rank) and spec.shape[0] is None


def described(element: Any) -> str:
    """Return the kind of a value, for messages."""
    if isinstance(element, tuple):
        return f"a tuple of {len(element)}"
    return f"a {type(element).__name__}"


def explain(error: tf.errors.OpError) -> UsageError | None:
    """Return the source's own error that caused one of TensorFlow, or None.

    Threads of ``tf.data`` read the rows: an error raised there reaches the training
    loop with its message in one of many lines. It is the error of this rank: other
    ranks may have read their rows.
    """
    if found := _USAGE_ERROR.search(error.message):
        return UsageError(found[1], hint=found[2], everywhere=False)
    if found := _WRONG_LENGTH.search(error.message):
        return UsageError(
            f"the data set has not as many rows as declared: {found[0]}",
            hint="give assert_cardinality the actual number of rows, on every rank",
            everywhere=False,
        )
    return None
