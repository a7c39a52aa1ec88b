"""The items of a ``PyDataset`` in an order that every rank knows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from collective.training.input.permutation import permute


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
