"""The input plan: which rows make up global batch s, and which of them are ours.

Both follow from (seed, rows, global batch size, step) by arithmetic alone, so nobody
asks anybody, any number of workers sees the same global batches, and training resumes
at any step. ``tf.data`` does the reading, ahead of the step.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from collective.errors import UsageError
from training.permutation import permute
from training.sources import Source, as_source

Number = TypeVar("Number", int, tf.Tensor)

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
    """

    x: Any
    y: Any
    sample_weight: Any
    global_rows: Any


def share(rows: Number, replica: Number, replicas: int) -> tuple[Number, Number]:
    """The splitting rule: which rows of a global batch a replica gets.

    Contiguous, in order of replicas, sizes differ by one at most; empty for some
    where there are fewer rows than replicas. Works on integers and on tensors.

    Returns:
        ``(start, stop)``, half-open.
    """
    return replica * rows // replicas, (replica + 1) * rows // replicas


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

    Attributes:
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
    ):
        self.source: Source = as_source(source)
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.rows = len(self.source)
        self.shuffle = shuffle and self.source.random_access
        if global_batch_size < 1:
            raise UsageError(
                f"a global batch of {global_batch_size} rows cannot be trained on",
                hint="pass --global-batch-size 64, or any number from 1 up",
            )
        if not self.rows:
            raise UsageError(
                "the data set has no rows", hint="pass data with at least one row"
            )
        self.steps_per_epoch = -(-self.rows // global_batch_size)

    @property
    def spec(self) -> Batch:
        """What ``dataset`` yields: ``tf.TensorSpec``, the number of rows left open."""

        def open_rows(leaf: tf.TensorSpec) -> tf.TensorSpec:
            return tf.TensorSpec([None, *leaf.shape], leaf.dtype)

        x, y, sample_weight = (
            None if part is None else tf.nest.map_structure(open_rows, part)
            for part in self.source.spec
        )
        return Batch(x, y, sample_weight, tf.TensorSpec([], tf.int64))

    def global_rows(self, step: int) -> int:
        """Number of rows in global batch ``step``."""
        first = step % self.steps_per_epoch * self.global_batch_size
        return min(self.global_batch_size, self.rows - first)

    def global_batch(self, step: int) -> np.ndarray:
        """Row numbers of global batch ``step``: int64 ``[global_rows(step)]``.

        A pure function of (seed, rows, global batch size, step). For a source without
        random access, these are positions in its own order.
        """
        return self._order(step, step + 1)

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
        threads = min(_MAX_THREADS, _cores())

        def own(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            """Where our rows start and stop in a global batch, and its size."""
            size = tf.constant(self.global_batch_size, tf.int64)
            rows = tf.minimum(size, self.rows - step % self.steps_per_epoch * size)
            start, _ = share(rows, local_replicas[0], replicas)
            _, stop = share(rows, local_replicas[-1], replicas)
            return start, stop, rows

        @tf.autograph.experimental.do_not_convert
        def read(step: tf.Tensor, numbers: tf.Tensor) -> Batch:
            start, stop, rows = own(step)
            x, y, weight = self.source.read(numbers[start:stop])
            return Batch(x, y, weight, rows)

        @tf.autograph.experimental.do_not_convert
        def cut(step: tf.Tensor, batch: Any) -> Batch:
            start, stop, rows = own(step)
            x, y, weight = tf.nest.map_structure(
                lambda t: None if t is None else t[start:stop], batch
            )
            return Batch(x, y, weight, rows)

        if self.source.random_access:
            batches = self._plan(first_step, last_step).map(
                read, num_parallel_calls=threads, deterministic=True
            )
        else:
            steps = tf.data.Dataset.range(first_step, last_step)
            whole = self.source.in_order(self.global_batch_size, first_step, last_step)
            batches = tf.data.Dataset.zip((steps, whole)).map(cut)
        # Told, for whoever asks: it cannot be seen through the blocks of the plan.
        length = tf.data.experimental.assert_cardinality(last_step - first_step)
        options = tf.data.Options()
        options.deterministic = True
        # Own threads: reading that blocks must not hold up the training step.
        options.threading.private_threadpool_size = threads
        # The sizes are set by hand: the tuner's thread costs more than it finds.
        options.autotune.enabled = False
        return batches.apply(length).prefetch(2).with_options(options)

    def _order(self, first_step: int, last_step: int) -> np.ndarray:
        """Row numbers of successive steps of one epoch, one behind the other."""
        epoch, first = divmod(int(first_step), self.steps_per_epoch)
        start = first * self.global_batch_size
        stop = start + int(last_step - first_step) * self.global_batch_size
        positions = np.arange(start, min(stop, self.rows), dtype=np.int64)
        if not self.shuffle:
            return positions
        return permute(positions, self.rows, (self.seed, epoch))

    def _plan(self, first_step: int, last_step: int) -> tf.data.Dataset:
        """``(step, row numbers of its global batch)`` for a range of steps.

        Computed a block of steps at a time, the next one ahead of use; no block
        reaches over the end of an epoch.
        """
        length = max(1, _BLOCK_ROWS // self.global_batch_size)
        of_epoch = -(-self.steps_per_epoch // length)

        def block(step: int) -> int:
            epoch, within = divmod(step, self.steps_per_epoch)
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
                self._order, [start, stop], tf.int64, stateful=False
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

        blocks = tf.data.Dataset.range(
            block(first_step), block(last_step - 1) + 1 if last_step > first_step else 0
        )
        return blocks.map(compute).prefetch(1).flat_map(batches)


def _cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
