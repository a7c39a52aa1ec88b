"""A piece's rows of the random numbers that one process draws for the global batch.

TensorFlow's stateless generator, Philox, counts: number i of a draw follows from the seed
and i alone. So the rows of a piece are drawn alone, from a counter that has been advanced
past the rows before them: bit-equal to those of the whole draw, for the price of its own
rows. Where an operation does not count like that, the draw of the global batch is made
whole and cut.

A draw belongs to the rows of the batch where its first axis has as many entries as there
are rows, or a multiple (an axis of patches or time steps folded into that of the rows, or
several batches one behind the other: ``blocks``). In a graph, an axis of rows is open; a
draw whose first axis has a fixed length, such as noise on a kernel, is the same on every
replica. Eagerly, lengths decide.

Source: J. K. Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.framework import tensor_util
from tensorflow.python.ops import (
    gen_random_index_shuffle_ops,
    gen_random_ops,
    gen_stateless_random_ops,
    gen_stateless_random_ops_v2,
)

from collective.log import log
from collective.replacements import replacing
from collective.training.keras_compat.blocks import blocks_of

#: How the message of an error begins that says that a draw is not one of rows.
NOT_ROWS = "collective: a random draw is not one of whole rows of the batch"

# Kernels that reject numbers keep so many 32-bit words of the stream for each of theirs,
# and Philox gives four words a count.
_RESERVED = 256 // 4
# Operations that ``tf.random.set_seed`` seeds.
_STATEFUL = (
    "random_uniform",
    "random_uniform_int",
    "random_standard_normal",
    "truncated_normal",
)


class Place(NamedTuple):
    """Which rows of the global batch a piece of it has."""

    first: Any  # int64 scalar, the place of its first row
    rows: Any  # int64 scalar, its rows; may be 0, where the pass runs on a made-up row
    total: Any  # int64 scalar, rows of the global batch


@contextlib.contextmanager
def draw_rows(place: Place, by_length: bool = False) -> Iterator[list[str]]:
    """Inside, TensorFlow's random operations draw the rows at a place.

    Args:
        by_length: Whether lengths decide in a graph, too: one of rows of a known number.

    Yields:
        What is drawn otherwise than in one process, a few words each; it grows.
    """
    rows = _Rows(place, by_length)
    with contextlib.ExitStack() as stack:
        for owner, name, make in rows.replaced():
            plain = getattr(owner, name)
            stack.enter_context(replacing(owner, name, make(plain)))
        yield rows.others


class _Rows:
    """The replaced operations of one piece."""

    def __init__(self, place: Place, by_length: bool = False):
        self.length = int(place.rows) if by_length else None
        self.first, rows, self.total = (tf.cast(n, tf.int64) for n in place)
        self.rows = tf.maximum(rows, 1)
        self.others: list[str] = []
        self._single: set[Any] = set()

    def replaced(self) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
        """Modules of operations, names in them, and what replaces each."""
        counted = gen_stateless_random_ops_v2
        for name in ("random_uniform", "random_uniform_int", "random_uniform_full_int"):
            yield counted, f"stateless_{name}_v2", self._counted
        yield counted, "stateless_random_normal_v2", self._counted
        yield counted, "stateless_truncated_normal_v2", self._rejecting
        yield counted, "stateless_random_gamma_v3", self._cut
        yield counted, "stateless_shuffle", self._shuffle
        yield gen_random_index_shuffle_ops, "random_index_shuffle", self._shuffle
        for name in ("binomial", "poisson"):
            yield gen_stateless_random_ops, f"stateless_random_{name}", self._cut
        yield gen_stateless_random_ops, "stateless_multinomial", self._by_logits
        for name in _STATEFUL:
            yield gen_random_ops, name, self._stateful
        yield gen_random_ops, "multinomial", self._by_logits
        yield gen_random_ops, "random_shuffle", self._shuffle

    def _counted(self, plain: Any, counts: int = 1) -> Any:
        """An operation whose number i follows from counter and i.

        Args:
            counts: By how many counts a group of numbers is from the next one.
        """
        cut = self._cut(plain)

        def draw(shape: Any, key: Any, counter: Any, alg: Any, *args: Any, **kw: Any):
            if self._blocks(shape) > 1:
                return cut(shape, key, counter, alg, *args, **kw)
            shape, of_rows = self._shape(shape)
            if not of_rows:
                return plain(shape, key, counter, alg, *args, **kw)
            bounds = [*args, kw.get("minval")]
            dtype = tf.as_dtype(
                kw.get("dtype") or getattr(bounds[0], "dtype", tf.float32)
            )
            group = 4 if dtype.size <= 4 else 2  # numbers of one count
            per_row, known = self._per_row(shape)
            begin = self.first * per_row
            skipped = begin // group * (counts * group // 4 if counts > 1 else 1)
            counter = _advanced(counter, skipped)
            if known is not None and known % group == 0:
                return plain(shape, key, counter, alg, *args, **kw)
            size = tf.cast(tf.reduce_prod(shape), tf.int64)
            flat = plain((size + group - 1)[None], key, counter, alg, *args, **kw)
            return tf.reshape(tf.slice(flat, (begin % group)[None], size[None]), shape)

        return draw

    def _rejecting(self, plain: Any) -> Any:
        """As ``_counted``, of an operation that draws until a number is accepted."""
        return self._counted(plain, counts=4 * _RESERVED)

    def _cut(self, plain: Any) -> Any:
        """An operation that draws the global batch whole, of which rows are kept."""

        def draw(shape: Any, *args: Any, **kwargs: Any) -> Any:
            blocks = self._blocks(shape)
            shape, of_rows = self._shape(shape)
            if not of_rows:
                return plain(shape, *args, **kwargs)
            fold = self._fold(shape)
            whole = tf.concat([(self.total * fold)[None], shape[1:]], 0)
            rank = shape.shape[0]
            kwargs = {
                name: self._among_all(value, fold)
                if name in ("alpha", "counts", "probs", "lam") and _rank(value) == rank
                else value
                for name, value in kwargs.items()
            }
            return self._kept(plain(whole, *args, **kwargs), fold, shape[0], blocks)

        return draw

    def _stateful(self, plain: Any) -> Any:
        """As ``_cut``, of an operation whose numbers depend on all that it drew before.

        A replica without rows has drawn less, and micro-batches draw more often.
        """
        cut = self._cut(plain)

        def draw(shape: Any, *args: Any, **kwargs: Any) -> Any:
            self.others.append("draws of tf.random that keep a state of their own")
            return cut(shape, *args, **kwargs)

        return draw

    def _by_logits(self, plain: Any) -> Any:
        """An operation that draws a row for each row of its first argument."""

        def draw(logits: Any, *args: Any, **kwargs: Any) -> Any:
            logits = tf.convert_to_tensor(logits)
            shape, of_rows = self._shape(tf.shape(logits, tf.int64))
            if not of_rows:
                return plain(logits, *args, **kwargs)
            fold = self._fold(shape)
            whole = self._among_all(logits, fold)
            return self._kept(plain(whole, *args, **kwargs), fold, shape[0])

        return draw

    def _shuffle(self, plain: Any) -> Any:
        """An operation that mixes the rows of the batch: each piece mixes its own."""

        def shuffle(value: Any, *args: Any, **kwargs: Any) -> Any:
            if _static(tf.shape(value))[:1] == [None]:
                self.others.append("a shuffle of the rows of a batch")
            return plain(value, *args, **kwargs)

        return shuffle

    def _blocks(self, shape: Any) -> int:
        """How many batches stand in a draw; eagerly and for plain numbers one."""
        eager = isinstance(shape, tf.__internal__.EagerTensor)
        in_graph = tf.is_tensor(shape) and not eager
        return blocks_of(shape, self._single) if in_graph else 1

    def _shape(self, shape: Any) -> tuple[tf.Tensor, bool]:
        """The shape, int64, and whether its first axis is that of the rows."""
        shape = tf.convert_to_tensor(shape)
        sizes = _static(shape)
        shape = tf.cast(shape, tf.int64)
        if tf.executing_eagerly():
            length, rows = (sizes[0] if sizes else None) or 0, int(self.rows)
            times = length // rows if length % rows == 0 else 0
            if times > 1 and not int(self.first):
                _warn_of_multiple(times)
            return shape, times == 1
        if sizes[:1] == [None] or (sizes and sizes[0] == self.length):
            return shape, True
        if None in sizes and sizes[0] != 1:
            self.others.append(
                f"a draw of shape {tuple(sizes)}, whose rows are not first"
            )
        return shape, False

    def _fold(self, shape: tf.Tensor) -> tf.Tensor:
        """How many entries of the first axis a row has."""
        whole = tf.equal(shape[0] % self.rows, 0)
        check = tf.debugging.Assert(whole, [NOT_ROWS, shape, self.rows])
        with tf.control_dependencies([] if check is None else [check]):
            return shape[0] // self.rows

    def _per_row(self, shape: tf.Tensor) -> tuple[tf.Tensor, int | None]:
        """Numbers of a row; and what they are a multiple of, if that is known."""
        sizes = [size for size in _static(shape)[1:] if size is not None]
        known = math.prod(sizes) if len(sizes) + 1 == shape.shape[0] else None
        return self._fold(shape) * tf.reduce_prod(shape[1:]), known

    def _among_all(self, values: Any, fold: tf.Tensor) -> tf.Tensor:
        """Rows in their place in the global batch; the others are of ones."""
        values = tf.convert_to_tensor(values)
        before = self.first * fold
        count = tf.shape(values, tf.int64)[0]
        after = tf.maximum((self.total - self.rows) * fold - before, 0)
        rest = [[0, 0]] * (len(values.shape) - 1)
        padded = tf.pad(values, [[before, after], *rest], constant_values=1)
        return padded[: tf.maximum(self.total * fold, before + count)]

    def _kept(
        self, whole: tf.Tensor, fold: tf.Tensor, count: tf.Tensor, blocks: int = 1
    ) -> tf.Tensor:
        """The rows of this piece, of each batch that stands in the draw."""
        if blocks == 1:
            begin = tf.minimum(self.first * fold, self.total * fold - count)
            return whole[begin : begin + count]
        # Not where batches that stood one behind the other have been taken apart.
        number = tf.where(tf.equal(fold % blocks, 0), tf.cast(blocks, tf.int64), 1)
        rest = tf.shape(whole, tf.int64)[1:]
        each = tf.reshape(whole, tf.concat([[number, -1], rest], 0))
        begin = tf.minimum(self.first, self.total - self.rows) * (fold // number)
        mine = each[:, begin : begin + count // number]
        return tf.reshape(mine, tf.concat([[count], rest], 0))


@functools.cache
def _warn_of_multiple(times: int) -> None:
    """Once: no graph tells what stands in the draw."""
    log.warning(
        "a random draw of %d times the rows of the batch, in a step that runs eagerly: its "
        "numbers are not those of one process. HINT: compile(run_eagerly=False)",
        times,
    )


def _static(shape: Any) -> list[int | None]:
    """The sizes that are known; of an unknown number of axes, one that is open."""
    sizes = tensor_util.constant_value_as_shape(tf.convert_to_tensor(shape))
    return [None] if sizes.rank is None else sizes.as_list()


def _rank(value: Any) -> int | None:
    return tf.convert_to_tensor(value).shape.rank


def _advanced(counter: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
    """A Philox counter after so many counts: uint64 ``[2]``, the low word first.

    In int64, for which every device has kernels.
    """
    low, high = tf.unstack(tf.bitcast(counter, tf.int64), num=2)
    after = low + counts
    lowest = tf.constant(tf.int64.min, tf.int64)  # of unsigned order
    carry = (after + lowest) < (low + lowest)
    words = tf.stack([after, high + tf.cast(carry, tf.int64)])
    return tf.bitcast(words, tf.uint64)
