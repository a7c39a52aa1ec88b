"""Global batches that come ready made: batched data sets, generators, ``PyDataset``.

Keras' own adapters and epochs read them, so what is a batch, when an epoch ends and what
``steps_per_epoch`` does is as in ``keras.Model.fit``. Every process reads every batch,
and keeps its share of the rows. The number of rows is not known beforehand: the ranks
agree before each step that all have a batch, and the same one.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.input import leaves
from collective.training.input.feed import ENDLESS, Agreement, Feed
from collective.training.input.permutation import permute
from collective.training.input.pipeline import Batch
from collective.training.input.plan import share
from collective.training.variants.virtual.pieces import VirtualReplicas

# Batches at the begin of a pass that come whole, too: ``first_batches``.
_WHOLE = 2


class Batches(Feed):
    """The batches of a data set, for the replicas of this process.

    Without ``steps_per_epoch``, an epoch is one pass over the data.

    Attributes:
        spec: ``Batch`` of type specs, with an open number of rows.
        batch_size: Rows of a batch where the data set says it, else None.
        is_stacked: Whether what counts as rows are whole batches of several replicas.

    Raises:
        UsageError: A batch is not ``x``, ``(x, y)`` or ``(x, y, sample_weight)``, or
            the number of axes of a tensor is not known.
    """

    def __init__(
        self,
        data: keras_compat.DataAdapter,
        backend: Backend,
        steps_per_epoch: int | None = None,
        virtual: VirtualReplicas | None = None,
    ):
        self._backend = backend
        self._adapter = _Shares(data, backend, virtual)
        self._keras = keras_compat.EpochIterator(self._adapter, steps_per_epoch)
        self.spec = self._adapter.spec
        self.batch_size = self._adapter.rows
        self.is_stacked: bool = getattr(data, "is_stacked", False)
        self._begun = False
        self._ahead: Iterator[Any] | None = None  # an epoch that was begun to be read
        self._first: list[tuple[Any, Any, Any]] = []
        self._agreement = Agreement(backend)

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch, as far as known."""
        return self._keras.steps

    def start(
        self, step: int, last_step: int, local_replicas: range, replicas: int
    ) -> None:
        """As ``Feed.start``; from the beginning of the data."""
        self.reset()

    def first_batches(self) -> list[tuple[Any, Any, Any]]:
        """``(x, y, sample_weight)`` of the next two batches, with all of their rows.

        Before anything else is read; the next epoch still has them. Reads no more than
        that epoch would: what a generator or a seeded shuffle gives is not lost.
        """
        if self._ahead is None:
            epoch = self._keras.epoch()
            most = min(_WHOLE, self._keras.steps or _WHOLE)
            read = list(itertools.islice(epoch, most))
            self._ahead = itertools.chain(read, epoch)
            self._first = [whole for _, whole in read]
        return self._first

    def reset(self) -> None:
        """Begins from the start of the data."""
        if self._ahead is not None:  # it is at the start
            return
        self._adapter.close()
        self._keras.reset()

    def bounds(self, epoch: int, step: int) -> tuple[int, int]:
        """As ``Feed.bounds``: epochs begin where the training is.

        They end where Keras knows, at the latest after the first one.
        """
        steps = self._keras.steps
        return step, ENDLESS if steps is None else step + steps

    def epoch(self, steps: int) -> Iterator[Batch]:
        """As ``Feed.epoch``.

        Raises:
            UsageError: On every rank: the ranks have different batches, or the data
                have no rows at all.
        """
        batches = self._agreed()
        first = next(batches, None)
        if first is None and self._begun:  # a pass has just ended: begin the next
            batches = self._agreed()
            first = next(batches, None)
        if first is None:
            self._end()
            return
        self._begun = True
        yield first
        for _ in range(steps - 1):
            batch = next(batches, None)
            if batch is None:
                return
            yield batch
        if steps == self._keras.steps:
            next(batches, None)  # there is none, and Keras ends the epoch
        else:
            self._adapter.close()

    def close(self) -> None:
        """As ``Feed.close``."""
        self._ahead = None
        self._adapter.close()

    def _end(self) -> None:
        self.ended = True
        if not self._begun:
            raise UsageError(
                "the data set has no rows", hint="pass data with at least one row"
            )
        warnings.warn(
            "the data have ended: training ends with the epochs that are done. A "
            "generator gives its batches once; make it endless and give "
            "steps_per_epoch=, or pass a keras.utils.PyDataset or a tf.data.Dataset",
            stacklevel=2,
        )

    def _agreed(self) -> Iterator[Batch]:
        """The batches of an epoch, each one checked to be the same on every rank."""
        batches, self._ahead = self._ahead or self._keras.epoch(), None
        self._first = []
        for batch, _ in batches:
            batch = self._agreement.checked(batch)
            if int(batch.global_rows):
                yield batch
        self._agreement.check(-1, 0)


class _Shares(keras_compat.DataAdapter):
    """An adapter whose batches have the rows of this process.

    With a checksum of the whole batch, unless there is one process.
    """

    def __init__(
        self,
        data: keras_compat.DataAdapter,
        backend: Backend,
        virtual: VirtualReplicas | None,
    ):
        self._data = data
        self._within_epoch = False
        replicas, local = backend.replicas, backend.local_replicas
        if virtual is not None:
            replicas, local = virtual.count, virtual.pieces(local, replicas)
        low, high = local[0], local[-1]
        alone = backend.size == 1
        self.rows: int | None = None

        @tf.autograph.experimental.do_not_convert
        def cut(number: tf.Tensor, element: Any) -> tuple[Batch, Any]:
            whole = keras_compat.unpack(element)
            leaf = leaves.first_leaf(whole[0])
            _check_axes(whole)
            rows = leaves.count_rows(leaf)
            self.rows = leaf.shape[0]
            start, _ = share(rows, low, replicas)
            _, stop = share(rows, high, replicas)
            x, y, weight = _rows(whole, start, stop)
            mark = None if alone else leaves.checksum(whole)
            kept = tf.where(number < _WHOLE, rows, 0)
            return Batch(x, y, weight, rows, checksum=mark), _rows(whole, 0, kept)

        self._dataset = data.get_tf_dataset().enumerate().map(cut).prefetch(2)
        spec: Batch = tf.nest.map_structure(
            lambda s: None if _absent(s) else leaves.open_rows(s),
            self._dataset.element_spec[0],
        )
        number = tf.TensorSpec([], tf.int64)
        self.spec = spec._replace(global_rows=number, checksum=None)

    def get_tf_dataset(self) -> tf.data.Dataset:
        return self._dataset

    @property
    def num_batches(self) -> int | None:
        return self._data.num_batches

    @property
    def batch_size(self) -> int | None:
        return self._data.batch_size

    @property
    def has_partial_batch(self) -> bool | None:
        return self._data.has_partial_batch

    @property
    def partial_batch_size(self) -> int | None:
        return self._data.partial_batch_size

    def on_epoch_begin(self) -> None:
        """Has workers start, where the data have any."""
        self._within_epoch = True
        self._data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Has workers stop."""
        self._within_epoch = False
        self._data.on_epoch_end()

    def close(self) -> None:
        """Has workers stop, if they run."""
        if self._within_epoch:
            self.on_epoch_end()


def _rows(tree: Any, start: Any, stop: Any) -> Any:
    """Rows of each tensor. None is not a leaf for tf.nest: it stays."""
    return tf.nest.map_structure(
        lambda t: None if t is None else leaves.slice_leaf(t, start, stop), tree
    )


def _absent(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, tf.NoneTensorSpec)


def _check_axes(batch: Any) -> None:
    for leaf in leaves.present(batch):
        if leaf.shape.rank is None:
            raise UsageError(
                f"the data set gives {leaf.name or leaf} of {leaf.dtype.name}, of which "
                "not even the number of axes is known",
                hint="fix it with tf.ensure_shape(tensor, [None, ...]), None for the "
                "rows of a batch",
            )
        if leaf.shape.rank == 0:
            raise UsageError(
                "the data set gives a number without axes in place of a batch: its "
                "elements are single rows",
                hint="batch it: dataset.batch(32); or pass global_batch_size=32, which "
                "takes a tf.data.Dataset of single rows",
            )


class ShuffledItems(keras.utils.PyDataset):
    """The items of a ``PyDataset`` in an order that follows from seed and epoch alone.

    Keras draws the order from a global generator, which differs between ranks. The
    data set must be of known length.
    """

    def __init__(self, items: keras.utils.PyDataset, seed: int):
        super().__init__(items.workers, items.use_multiprocessing, items.max_queue_size)
        self._items = items
        self._seed = seed
        self._epoch = 0

    @property
    def num_batches(self) -> int | None:
        """As the data set's."""
        return self._items.num_batches

    def __getitem__(self, index: int) -> Any:
        count = self._items.num_batches
        place = permute(np.array([index]), count, (self._seed, self._epoch))
        return self._items[int(place[0])]

    def on_epoch_begin(self) -> None:
        """Of the data set."""
        self._items.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Of the data set; the next epoch has another order."""
        self._epoch += 1
        self._items.on_epoch_end()
