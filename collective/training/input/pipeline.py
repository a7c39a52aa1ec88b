"""Global batches as ``tf.data`` pipelines: each process reads its own rows, ahead.

``collective.training.input.plan`` says which rows these are, by arithmetic alone.
"""

from __future__ import annotations

import atexit
import os
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from collective.errors import UsageError
from collective.training.input import leaves
from collective.training.input.conversion import as_source
from collective.training.input.plan import RowPlan, share
from collective.training.input.source import Row, Source, weakly

# Rows permuted per call into Python: a call for each small batch would be slow.
_BLOCK_ROWS = 1 << 16
# More threads read no faster, and take cores from the step.
_MAX_THREADS = 8


class Batch(NamedTuple):
    """The rows of one step that this process holds."""

    # x, y: trees of tensors ``[n, ...]``; n may be 0.
    x: Any
    y: Any
    sample_weight: Any  # tree of tensors ``[n, ...]``, or None
    global_rows: Any  # int64 scalar: rows of the whole global batch, over all processes
    # int64 ``[n, 2]``: place in the global batch, and row number, of each row that was
    # read; None unless ``Input`` has ``with_rows_read``.
    rows_read: Any = None


class ReadAhead(Iterator[Batch]):
    """The batches of a data set, which threads read ahead of use until it is closed.

    These threads call functions of Python. While the interpreter ends they no longer get its
    lock, and the destructor of the data set's iterator would wait for them without end. So
    every one is closed before, also one that the traceback of an error refers to.
    """

    def __init__(self, dataset: tf.data.Dataset):
        self._batches: Iterator[Batch] = iter(dataset)
        _open.add(self)

    def __next__(self) -> Batch:
        """Return the next batch; after an error, close.

        Raises:
            StopIteration: There is none.
            tf.errors.OpError: It cannot be read.
        """
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except BaseException as error:
            self.close()
            link: BaseException | None = error
            while link is not None:  # frames of TensorFlow that refer to the iterator
                traceback.clear_frames(link.__traceback__)
                link = link.__context__
            raise

    def close(self) -> None:
        """End the threads. May be called twice; there are no more batches then."""
        self._batches = iter(())


_open: weakref.WeakSet[ReadAhead] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for batches in list(_open):
        batches.close()


class Input:
    """Global batches of a source.

    Every row is used exactly once an epoch. The last batch of an epoch is shorter where
    the batch size does not divide the rows: nothing is padded, nothing dropped.

    Args:
        source: A Source, or what ``as_source`` takes.
        global_batch_size: Rows of a step, over all replicas.
        seed: Decides the order of rows.
        shuffle: As ``RowPlan.shuffle``. A source without random access always keeps its
            own order.
        with_rows_read: Whether batches have ``Batch.rows_read``.

    Raises:
        UsageError: If there are not rows, or the batch size is below 1.
    """

    def __init__(
        self,
        source: Any,
        global_batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool | str = True,
        with_rows_read: bool = False,
    ):
        self.source: Source = as_source(source)
        self.global_batch_size = global_batch_size
        self.rows = len(self.source)  # rows of an epoch
        self.with_rows_read = with_rows_read
        if global_batch_size < 1:
            raise UsageError(
                f"a global batch of {global_batch_size} rows cannot be trained on",
                hint="pass --global-batch-size 32, or any number from 1 up",
            )
        if not self.rows:
            raise UsageError(
                "the data set has no rows", hint="pass data with at least one row"
            )
        shuffle = self.source.random_access and shuffle
        # Which rows make which batch.
        self.plan = RowPlan(self.rows, global_batch_size, seed, shuffle)
        # Steps of an epoch, the short one included.
        self.steps_per_epoch = self.plan.steps_per_epoch

    @property
    def spec(self) -> Batch:
        """Return the ``tf.TensorSpec`` of the batches of ``dataset``, rows open."""
        x, y, sample_weight = self.source.batch_spec
        rows_read = tf.TensorSpec([None, 2], tf.int64) if self.with_rows_read else None
        return Batch(x, y, sample_weight, tf.TensorSpec([], tf.int64), rows_read)

    def dataset(
        self, first_step: int, last_step: int, local_replicas: range, replicas: int
    ) -> tf.data.Dataset:
        """Return this process' part of a range of steps, read ahead of use.

        Args:
            first_step: First step, counted over all epochs.
            last_step: Step to stop before.
            local_replicas: The replicas in this process, consecutive numbers.

        Returns:
            One ``Batch`` for each step, in order, also where this process has no row.
            All shapes but the leading dimension are static.
        """
        own = local_replicas[0], local_replicas[-1], replicas
        batches = self._batches(first_step, last_step, *own)
        # TensorFlow cannot know it: the blocks of the plan have no known length.
        length = tf.data.experimental.assert_cardinality(last_step - first_step)
        return _read_ahead(batches.apply(length))

    def read_ahead(
        self, first_step: int, last_step: int, local_replicas: range, replicas: int
    ) -> ReadAhead:
        """Read what ``dataset`` yields."""
        return ReadAhead(self.dataset(first_step, last_step, local_replicas, replicas))

    def movable(self) -> Callable[[int, int, range, int], ReadAhead]:
        """Return a function equal to ``ReadAhead(dataset(...))``, fast from its second call.

        It keeps one pipeline that reads its range of steps and replicas from a
        variable. In an elastic job the ranks continue with other parts of the data, and
        building a new pipeline takes longer than the rest of the change.
        """
        if not self.source.random_access:
            return self.read_ahead
        with tf.device("CPU"):
            current = tf.Variable([0] * 5, trainable=False, dtype=tf.int64)
        batches_of_current = tf.data.Dataset.from_tensors(0).flat_map(
            lambda _: self._batches(*tf.unstack(current.read_value()))
        )
        dataset = _read_ahead(batches_of_current)

        def batches(
            first_step: int, last_step: int, local_replicas: range, replicas: int
        ) -> ReadAhead:
            own = local_replicas[0], local_replicas[-1], replicas
            current.assign([first_step, last_step, *own])
            return ReadAhead(dataset)

        return batches

    def _batches(
        self, first_step: Any, last_step: Any, low: Any, high: Any, replicas: Any
    ) -> tf.data.Dataset:
        """Return the batches of ``dataset``, for replicas ``low`` to ``high``, both included.

        All arguments are numbers or tensors.
        """

        def own(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            """Return where our rows start and stop in a global batch, and its rows."""
            rows = self.plan.rows_before(step + 1) - self.plan.rows_before(step)
            start, _ = share(rows, low, replicas)
            _, stop = share(rows, high, replicas)
            return start, stop, rows

        def batch(part: Row, start: Any, rows: Any, numbers: Any) -> Batch:
            """Return our part of a global batch, which begins at ``start``."""
            rows_read = None
            if self.with_rows_read:
                places = start + tf.range(tf.shape(numbers, tf.int64)[0])
                rows_read = tf.stack([places, numbers], axis=1)
            return Batch(*part, rows, rows_read)

        @tf.autograph.experimental.do_not_convert
        def read(step: tf.Tensor, numbers: tf.Tensor) -> Batch:
            start, stop, rows = own(step)
            mine = numbers[start:stop]
            return batch(self.source.read(mine), start, rows, mine)

        @tf.autograph.experimental.do_not_convert
        def cut(step: tf.Tensor, whole: Row) -> Batch:
            start, stop, rows = own(step)
            part = tf.nest.map_structure(
                lambda t: None if t is None else t[start:stop], whole
            )
            count = leaves.count_rows(leaves.first_leaf(part))
            numbers = self.plan.rows_before(step) % self.rows + start + tf.range(count)
            return batch(part, start, rows, numbers)

        if self.source.random_access:
            return self._planned(first_step, last_step).map(
                read, num_parallel_calls=_threads(), deterministic=True
            )
        steps = tf.data.Dataset.range(first_step, last_step)
        whole = self.source.in_order(self.global_batch_size, first_step, last_step)
        return tf.data.Dataset.zip((steps, whole)).map(cut)

    def _planned(self, first_step: Any, last_step: Any) -> tf.data.Dataset:
        """Return ``(step, row numbers of its global batch)`` for a range of steps.

        They are computed a block of steps at a time, the next block ahead of use.
        """
        before = self.plan.rows_before
        length = min(_BLOCK_ROWS // self.global_batch_size, self.steps_per_epoch)
        length = max(1, length)

        @tf.autograph.experimental.do_not_convert
        def compute(block: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            start = first_step + block * length
            stop = tf.minimum(start + length, last_step)
            numbers = tf.numpy_function(
                weakly(self.plan.row_numbers), [start, stop], tf.int64, stateful=False
            )
            numbers.set_shape([None])
            return start, stop, numbers

        @tf.autograph.experimental.do_not_convert
        def batches(
            start: tf.Tensor, stop: tf.Tensor, numbers: tf.Tensor
        ) -> tf.data.Dataset:
            @tf.autograph.experimental.do_not_convert
            def one(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                first, last = (before(s) - before(start) for s in (step, step + 1))
                return step, numbers[first:last]

            return tf.data.Dataset.range(start, stop).map(one)

        blocks = tf.data.Dataset.range(-((first_step - last_step) // length))
        return blocks.map(compute).prefetch(1).flat_map(batches)


def _read_ahead(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Return the batches, prefetched by threads of their own."""
    options = tf.data.Options()
    options.deterministic = True
    # Own threads: a read that blocks must not delay the training step.
    options.threading.private_threadpool_size = _threads()
    # Sizes are fixed: the autotuner's thread costs more than it gains.
    options.autotune.enabled = False
    return batches.prefetch(2).with_options(options)


def _threads() -> int:
    """Return the number of threads that read."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))
