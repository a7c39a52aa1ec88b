"""Global batches that come ready made: batched data sets, generators, ``PyDataset``.

Keras' own adapters and epochs read them, so what is a batch, when an epoch ends and what
``steps_per_epoch`` does is as in ``keras.Model.fit``. Every process reads every batch,
and keeps its share of the rows. The number of rows is not known beforehand: the ranks
agree before each step that all have a batch, and the same one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from collective.training.input.tape import Place, Tape
from collective.training.process import host_random

if TYPE_CHECKING:
    from collective.training.virtual.pieces import VirtualReplicas

# How many of the last batches and ends of epochs are kept, to go back to them. In an
# elastic job a rank is one step, and one end of an epoch, ahead of others at most.
_KEPT, _KEPT_ELASTIC = 2, 4

_Read = tuple[Batch, Any]
"""A batch for this process, and ``(x, y, sample_weight)`` of all of its rows, if kept."""


@dataclass(frozen=True)
class BatchesPlan:
    """What a checkpoint knows of such batches."""

    batches_per_epoch: int | None  # None: one pass over the data


class Batches(Feed):
    """The batches of a data set, for the replicas of this process.

    Without ``steps_per_epoch``, an epoch is one pass over the data. In an elastic job,
    the last batches are kept whole, for a step that is made again by fewer ranks.

    Raises:
        UsageError: A batch is not ``x``, ``(x, y)`` or ``(x, y, sample_weight)``, or
            the number of axes of a tensor is not known.
    """

    def __init__(
        self,
        data: keras_compat.data.DataAdapter,
        backend: Backend,
        steps_per_epoch: int | None = None,
        virtual: VirtualReplicas | None = None,
    ):
        self._backend = backend
        self._virtual = virtual
        self._cut = _Cut(backend.local_replicas, backend.replicas, virtual)
        self._adapter = _Shares(data, self._cut, backend)
        self._keras = keras_compat.data.EpochIterator(self._adapter, steps_per_epoch)
        self.plan = BatchesPlan(steps_per_epoch)
        self._is_counted = data.num_batches is not None
        # ``Batch`` of type specs, with an open number of rows.
        self.spec = self._adapter.spec
        # The rows of a batch if the data set has them, or None.
        self.batch_size = self._adapter.rows
        # Whether what counts as rows are whole batches of several replicas.
        self.is_stacked: bool = getattr(data, "is_stacked", False)
        self._agreement = Agreement(backend)
        self._tape = self._new_tape()
        host_random.read_by(self)

    def begin_as_keras(self) -> None:
        """End an epoch before the first one, as ``fit`` and ``evaluate`` of Keras do.

        A ``PyDataset`` that shuffles in ``on_epoch_end`` so has its second order at first.
        """
        self._keras.reset()

    def _new_tape(self) -> Tape[_Read]:
        return Tape(self._read_epoch, _KEPT_ELASTIC if self._backend.elastic else _KEPT)

    def _read_epoch(self) -> Iterator[_Read]:
        return (read for read in self._keras.epoch() if int(read[0].global_rows))

    @property
    def steps_per_epoch(self) -> int | None:
        """Return the steps of an epoch, as far as known."""
        return self._keras.steps

    def start(
        self,
        place: Place,
        last_step: int,
        local_replicas: range,
        replicas: int,
    ) -> None:
        """See ``Feed.start``. Reads and drops the batches before the position if needed.

        Raises:
            UsageError: The data end before.
        """
        if self._backend.elastic:
            self._cut = _Cut(local_replicas, replicas, self._virtual)
            self._agreement = Agreement(self._backend)  # of these ranks
        if self._tape.seek(place):
            return
        self.reset()
        if not self._tape.seek(place):
            raise UsageError(
                f"the data have no step {place[1]} in epoch {place[0] + 1}, with which "
                "this training would continue",
                hint="pass the data and the steps_per_epoch= that it began with",
            )

    def reset(self) -> None:
        """Begin from the start of the data."""
        if self._tape.place == (0, 0):
            return
        self._adapter.close()
        self._keras.reset()
        self._tape = self._new_tape()

    def bounds(self, epoch: int, step: int) -> tuple[int, int]:
        """See ``Feed.bounds``. Keras knows where epochs end, at the latest after the first."""
        steps, first = self._keras.steps, self._tape.first
        return first, ENDLESS if steps is None else first + steps

    def epoch(self, steps: int) -> Iterator[Batch]:
        """As ``Feed.epoch``.

        Raises:
            UsageError: On every rank: the ranks have different batches, or the data
                have no rows at all.
        """
        self.overran = False
        of_epoch = self._keras.steps
        left = None if of_epoch is None else self._tape.first + of_epoch
        whole = left == self._tape.place[1] + steps
        for _ in range(steps):
            read = self._tape.next()
            if read is None:
                self._agreement.check(-1, 0)
                if self._tape.ended:
                    self._end()
                self.overran = not self._is_counted
                return
            yield self._share(*read)
        if whole:
            self._tape.next()  # there is none, and Keras ends the epoch
            self.overran = not (self._is_counted or self.plan.batches_per_epoch)
            self._agreement.check(-1, 0)
        else:
            self._adapter.close()

    def _share(self, batch: Batch, whole: Any) -> Batch:
        batch = self._agreement.checked(batch)
        if not self._backend.elastic:
            return batch
        x, y, weight = self._cut(whole, batch.global_rows)
        return Batch(x, y, weight, batch.global_rows)

    def close(self) -> None:
        """See ``Feed.close``."""
        host_random.closed(self)
        self._adapter.close()

    def _end(self) -> None:
        self.ended = True
        if self._tape.place == (0, 0):
            raise UsageError(
                "the data set has no rows", hint="pass data with at least one row"
            )
        warnings.warn(
            "the data have ended: training ends with the epochs that are done. A "
            "generator gives its batches once; make it endless and give "
            "steps_per_epoch=, or pass a keras.utils.PyDataset or a tf.data.Dataset",
            stacklevel=2,
        )


class _Cut:
    """Takes the rows of some replicas out of a batch."""

    def __init__(self, local: range, replicas: int, virtual: VirtualReplicas | None):
        if virtual is not None:
            local, replicas = virtual.pieces(local, replicas), virtual.count
        self._local, self._replicas = local, replicas

    def __call__(self, whole: Any, rows: Any) -> Any:
        start, _ = share(rows, self._local[0], self._replicas)
        _, stop = share(rows, self._local[-1], self._replicas)
        return _rows(whole, start, stop)


class _Shares(keras_compat.data.DataAdapter):
    """An adapter whose elements are ``_Read``: the rows of this process, and more.

    With a checksum of the whole batch, unless there is one process. In an elastic job
    batches are whole, and none is cut; else of the whole ones only the shapes are there.
    """

    def __init__(
        self, data: keras_compat.data.DataAdapter, share: _Cut, backend: Backend
    ):
        self._data = data
        self._within_epoch = False
        alone, elastic = backend.size == 1, backend.elastic
        self.rows: int | None = None

        @tf.autograph.experimental.do_not_convert
        def cut(_: tf.Tensor, element: Any) -> _Read:
            whole = keras_compat.data.unpack(element)
            leaf = leaves.first_leaf(whole[0])
            _check_axes(whole)
            rows = leaves.count_rows(leaf)
            self.rows = leaf.shape[0]
            mark = None if alone and not elastic else leaves.checksum(whole)
            if elastic:  # cut when it is known how many ranks there are
                return Batch(None, None, None, rows, checksum=mark), whole
            x, y, weight = share(whole, rows)
            return Batch(x, y, weight, rows, checksum=mark), _rows(whole, 0, 0)

        # Numbered, so that a tuple comes as one argument.
        self._dataset = data.get_tf_dataset().enumerate().map(cut).prefetch(2)
        x, y, weight = tf.nest.map_structure(
            lambda s: None if _absent(s) else leaves.open_rows(s),
            self._dataset.element_spec[1],
        )
        self.spec = Batch(x, y, weight, tf.TensorSpec([], tf.int64))

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
        """Have workers start, if the data have any."""
        self._within_epoch = True
        self._data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Have workers stop."""
        self._within_epoch = False
        self._data.on_epoch_end()

    def close(self) -> None:
        """Have workers stop, if they run."""
        if self._within_epoch:
            self.on_epoch_end()


def _rows(tree: Any, start: Any, stop: Any) -> Any:
    """Return the rows of each tensor. None is not a leaf for tf.nest: it stays."""
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
        """Return the number of batches of the data set."""
        return self._items.num_batches

    def __getitem__(self, index: int) -> Any:
        count = self._items.num_batches
        place = permute(np.array([index]), count, (self._seed, self._epoch))
        return self._items[int(place[0])]

    def on_epoch_begin(self) -> None:
        """See the data set's own method."""
        self._items.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """End the data set's epoch; the next one has a new order."""
        self._epoch += 1
        self._items.on_epoch_end()
