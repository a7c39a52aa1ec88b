"""The input plan: which rows make up global batch s, and which of them are ours.

Both follow from (seed, rows, global batch size, step) by arithmetic alone, so nobody
asks anybody, any number of workers sees the same global batches, and training resumes
at any step. ``tf.data`` does the reading, ahead of the step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from collective.errors import UsageError
from collective.training.input.plan import Plan, share
from collective.training.input.source import Source, as_source

# Rows permuted at a time: a thousand small batches cost one call into Python.
_BLOCK_ROWS = 1 << 16
# More threads than this read no faster, and take cores from the step.
_MAX_THREADS = 8


class Batch(NamedTuple):
    """The rows of one step that this process holds.

    Attributes:
        x, y: Trees of tensors ``[n, ...]``; n may be 0.
        sample_weight: Tree of tensors ``[n, ...]``, or None.
        global_rows: int64 scalar: rows of the whole global batch, over all processes.
        read: int64 ``[n, 2]``: place in the global batch, and row number, of each row
            that was read; None unless they are to be told.
    """

    x: Any
    y: Any
    sample_weight: Any
    global_rows: Any
    read: Any = None


class Input:
    """Global batches of a source.

    Every row comes exactly once an epoch; the last batch of an epoch is shorter when
    the size does not divide: nothing is padded, nothing dropped.

    Args:
        source: A Source, or what ``as_source`` takes.
        global_batch_size: Rows of a step, over all replicas.
        seed: Decides the order of rows.
        shuffle: A new order each epoch; False keeps the source's. A source without
            random access always keeps its own.
        tell_rows: Whether batches tell which rows they hold (``Batch.read``).

    Attributes:
        plan: Which rows make which batch.
        rows: Rows of an epoch.
        steps_per_epoch: Steps of an epoch, the short one included.

    Raises:
        UsageError: If there are no rows, or the batch size is below 1.
    """

    def __init__(
        self,
        source: Any,
        global_batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        tell_rows: bool = False,
    ):
        self.source: Source = as_source(source)
        self.global_batch_size = global_batch_size
        self.rows = len(self.source)
        self.tell_rows = tell_rows
        if global_batch_size < 1:
            raise UsageError(
                f"a global batch of {global_batch_size} rows cannot be trained on",
                hint="pass --global-batch-size 64, or any number from 1 up",
            )
        if not self.rows:
            raise UsageError(
                "the data set has no rows", hint="pass data with at least one row"
            )
        shuffle = shuffle and self.source.random_access
        self.plan = Plan(self.rows, global_batch_size, seed, shuffle)
        self.steps_per_epoch = self.plan.steps_per_epoch

    @property
    def spec(self) -> Batch:
        """What ``dataset`` yields: ``tf.TensorSpec``, the number of rows left open."""

        def open_rows(leaf: tf.TensorSpec) -> tf.TensorSpec:
            return tf.TensorSpec([None, *leaf.shape], leaf.dtype)

        x, y, sample_weight = (
            None if part is None else tf.nest.map_structure(open_rows, part)
            for part in self.source.spec
        )
        read = tf.TensorSpec([None, 2], tf.int64) if self.tell_rows else None
        return Batch(x, y, sample_weight, tf.TensorSpec([], tf.int64), read)

    def global_rows(self, step: int) -> int:
        """Number of rows in global batch ``step``."""
        return self.plan.global_rows(step)

    def global_batch(self, step: int) -> np.ndarray:
        """Row numbers of global batch ``step``: int64 ``[global_rows(step)]``.

        A pure function of (seed, rows, global batch size, step). For a source without
        random access, these are positions in its own order.
        """
        return self.plan.row_numbers(step, step + 1)

    def dataset(
        self, first_step: int, last_step: int, local_replicas: range, replicas: int
    ) -> tf.data.Dataset:
        """This process' part of a range of steps, read ahead of use.

        Args:
            first_step: First step; steps count on over epochs.
            last_step: Step to stop before.
            local_replicas: The replicas in this process, consecutive numbers.
            replicas: Number of replicas in the job.

        Returns:
            One ``Batch`` a step, in order, also when this process has no row in it.
            All shapes but the leading dimension are static.
        """
        own = local_replicas[0], local_replicas[-1], replicas
        batches = self._batches(first_step, last_step, *own)
        # Told, for whoever asks: it cannot be seen through the blocks of the plan.
        length = tf.data.experimental.assert_cardinality(last_step - first_step)
        return _ahead(batches.apply(length))

    def moving(self) -> Callable[[int, int, range, int], Iterator[Batch]]:
        """Makes a function that is ``iter(dataset(...))`` and quick from its second call.

        Where ranks die, the others go on with other parts of the same data; to build a
        pipeline anew would take them longer than all the rest.
        """
        if not self.source.random_access:
            return lambda *place: iter(self.dataset(*place))
        with tf.device("CPU"):
            place = tf.Variable([0] * 5, trainable=False, dtype=tf.int64)
        whole = tf.data.Dataset.from_tensors(0).flat_map(
            lambda _: self._batches(*tf.unstack(place.read_value()))
        )
        dataset = _ahead(whole)

        def batches(
            first_step: int, last_step: int, local_replicas: range, replicas: int
        ) -> Iterator[Batch]:
            own = local_replicas[0], local_replicas[-1], replicas
            place.assign([first_step, last_step, *own])
            return iter(dataset)

        return batches

    def _batches(
        self, first_step: Any, last_step: Any, low: Any, high: Any, replicas: Any
    ) -> tf.data.Dataset:
        """The batches of ``dataset``; all arguments are numbers or tensors."""

        def own(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            """Where our rows start and stop in a global batch, and its size."""
            size = tf.constant(self.global_batch_size, tf.int64)
            rows = tf.minimum(size, self.rows - step % self.steps_per_epoch * size)
            start, _ = share(rows, low, replicas)
            _, stop = share(rows, high, replicas)
            return start, stop, rows

        def told(start: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor | None:
            """Places and numbers of the rows read, where somebody keeps a ledger."""
            if not self.tell_rows:
                return None
            places = start + tf.range(tf.shape(numbers, tf.int64)[0])
            return tf.stack([places, numbers], axis=1)

        @tf.autograph.experimental.do_not_convert
        def read(step: tf.Tensor, numbers: tf.Tensor) -> Batch:
            start, stop, rows = own(step)
            mine = numbers[start:stop]
            x, y, weight = self.source.read(mine)
            return Batch(x, y, weight, rows, told(start, mine))

        @tf.autograph.experimental.do_not_convert
        def cut(step: tf.Tensor, batch: Any) -> Batch:
            start, stop, rows = own(step)
            x, y, weight = tf.nest.map_structure(
                lambda t: None if t is None else t[start:stop], batch
            )
            size = self.global_batch_size
            first = step % self.steps_per_epoch * size + start
            mine = first + tf.range(tf.shape(tf.nest.flatten(x)[0], tf.int64)[0])
            return Batch(x, y, weight, rows, told(start, mine))

        if self.source.random_access:
            return self._plan(first_step, last_step).map(
                read, num_parallel_calls=_threads(), deterministic=True
            )
        steps = tf.data.Dataset.range(first_step, last_step)
        whole = self.source.in_order(self.global_batch_size, first_step, last_step)
        return tf.data.Dataset.zip((steps, whole)).map(cut)

    def _plan(self, first_step: Any, last_step: Any) -> tf.data.Dataset:
        """``(step, row numbers of its global batch)`` for a range of steps.

        Computed a block of steps at a time, the next one ahead of use; no block
        reaches over the end of an epoch.
        """
        length = max(1, _BLOCK_ROWS // self.global_batch_size)
        of_epoch = -(-self.steps_per_epoch // length)

        def block(step: Any) -> Any:
            epoch, within = step // self.steps_per_epoch, step % self.steps_per_epoch
            return epoch * of_epoch + within // length

        def compute(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            epoch, within = number // of_epoch, number % of_epoch * length
            end = tf.minimum(within + length, self.steps_per_epoch)
            start, stop = (
                tf.clip_by_value(
                    epoch * self.steps_per_epoch + step, first_step, last_step
                )
                for step in (within, end)
            )
            numbers = tf.numpy_function(
                self.plan.row_numbers, [start, stop], tf.int64, stateful=False
            )
            numbers.set_shape([None])
            return start, stop, numbers

        def batches(
            start: tf.Tensor, stop: tf.Tensor, numbers: tf.Tensor
        ) -> tf.data.Dataset:
            def one(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                first = (step - start) * self.global_batch_size
                return step, numbers[first : first + self.global_batch_size]

            return tf.data.Dataset.range(start, stop).map(one)

        first, last = tf.cast(first_step, tf.int64), tf.cast(last_step, tf.int64)
        some = tf.cast(last > first, tf.int64)  # of no steps, no block
        blocks = tf.data.Dataset.range(block(first), some * (block(last - 1) + 1))
        return blocks.map(compute).prefetch(1).flat_map(batches)


def _ahead(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Read ahead of use."""
    options = tf.data.Options()
    options.deterministic = True
    # Own threads: reading that blocks must not hold up the training step.
    options.threading.private_threadpool_size = _threads()
    # The sizes are set by hand: the tuner's thread costs more than it finds.
    options.autotune.enabled = False
    return batches.prefetch(2).with_options(options)


def _threads() -> int:
    """Threads that read."""
    return min(_MAX_THREADS, _cores())


def _cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
