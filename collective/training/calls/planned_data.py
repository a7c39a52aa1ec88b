"""Data of rows by number as arguments of Keras' methods: each rank reads its own rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.training.input.data import is_array_data
from collective.training.input.distributed_datasets import original
from collective.training.input.pipeline import Input
from collective.training.input.plan import ENDLESS
from collective.training.input.source import Source
from collective.training.steps.planned_batches import PlannedBatches
from collective.training.virtual.pieces import VirtualReplicas


def has_rows_by_number(data: Any) -> bool:
    """Return whether a tree of arguments has data of which a rank reads its own rows."""
    return any(isinstance(leaf, Source | np.memmap) for leaf in _leaves(data))


def _leaves(data: Any) -> Iterator[Any]:
    """Yield what the trees of arguments of Keras are made of."""
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, list | tuple):
        for part in data[:100]:  # a list may be an array written out in numbers
            yield from _leaves(part)
    else:
        yield data


class PlannedCall:
    """The data of one call of Keras of which each rank reads its own rows.

    Args:
        is_whole: Whether Keras' own functions read the batches, which are then whole.

    Attributes:
        reads: By a method of models: what reads the batches of its function.
    """

    def __init__(
        self,
        backend: Backend,
        is_whole: bool = False,
        virtual: VirtualReplicas | None = None,
    ):
        self._backend, self._is_whole, self._virtual = backend, is_whole, virtual
        self.reads: dict[str, PlannedBatches] = {}

    def close(self) -> None:
        """End what reads ahead."""
        for reads in self.reads.values():
            reads.close()

    def train(self, inputs: Input, arguments: dict[str, Any]) -> None:
        """Have ``fit`` train on these data.

        Args:
            arguments: Of ``keras.Model.fit``; changed.
        """
        if self._is_whole and not arguments["steps_per_epoch"]:
            arguments["steps_per_epoch"] = inputs.steps_per_epoch
        arguments |= dict.fromkeys(("y", "sample_weight", "batch_size", "class_weight"))
        arguments |= {"validation_split": 0.0, "shuffle": False}
        arguments["x"] = self._read("train_step", inputs, None)

    def validate(self, inputs: Input, arguments: dict[str, Any]) -> None:
        """Have ``fit`` validate with these data; see ``train``."""
        steps = arguments["validation_steps"]
        arguments["validation_data"] = self._read("test_step", inputs, steps or ENDLESS)
        arguments["validation_batch_size"] = None

    def pass_over(self, method: str, inputs: Input, arguments: dict[str, Any]) -> None:
        """Have ``evaluate`` or ``predict`` read these data.

        Args:
            method: ``test_step`` or ``predict_step``.
            arguments: Of the method of ``keras.Model``; changed.
        """
        replaced = {"y", "sample_weight", "batch_size"} & arguments.keys()
        arguments |= dict.fromkeys(replaced)
        arguments["x"] = self._read(method, inputs, arguments["steps"] or ENDLESS)

    def may_draw(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether data may draw from the generators of Python and NumPy.

        Args:
            arguments: Of ``keras.Model.fit``.
        """
        of_step = {"train_step": "x", "test_step": "validation_data"}
        read = [
            arguments[name] for step, name in of_step.items() if step not in self.reads
        ]
        return any(x is not None and not is_array_data(original(x)) for x in read)

    def _read(self, method: str, inputs: Input, most: int | None) -> tf.data.Dataset:
        """Return what Keras reads in place of some data."""
        reads = PlannedBatches(inputs, self._backend, self._virtual, most)
        if self._is_whole:
            return reads.whole()
        self.reads[method] = reads
        return reads.stand_ins()
