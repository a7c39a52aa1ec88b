"""The data of a call of ``fit``: what Keras reads, and what each rank reads itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.calls.opening import open_inputs
from collective.training.calls.planned_data import PlannedCall, has_rows_by_number
from collective.training.input.data import (
    DataArguments,
    as_data,
    fit_data,
    is_array_data,
    plan_shuffle,
)
from collective.training.input.distributed_datasets import original
from collective.training.input.permutation_ops import permuted
from collective.training.input.pipeline import Input
from collective.training.input.ready_batches import ReadyBatches
from collective.training.input.shuffled_items import ShuffledItems
from collective.training.input.source import Source
from collective.training.observers.elastic.fit_units import FitUnits
from collective.training.process.object_collectives import broadcast_object
from collective.training.verification import compare_data


def open_data(
    planned: PlannedCall,
    given: DataArguments,
    arguments: dict[str, Any],
    backend: Backend,
    *,
    units: FitUnits,
    with_rows_read: bool,
    is_kept: bool,
) -> Input | ReadyBatches | None:
    """Open data of which each rank reads its own rows, and those of a checkpoint.

    Args:
        planned: Gets data of which each rank reads its own rows.
        given: The arguments of ``collective.fit`` that are about data.
        arguments: Of Keras' ``fit``; changed.
        with_rows_read: Whether batches have the numbers of their rows, for a ledger.
        is_kept: Whether there is a checkpoint, which describes the data.

    Returns:
        The training data, if they were opened.

    Raises:
        UsageError: The data cannot be read so.
    """
    validation = given.validation_data
    of_rows = given.data is not None or given.global_batch_size is not None
    is_planned = of_rows or with_rows_read
    is_planned |= has_rows_by_number((given.x, given.y, given.sample_weight))
    is_validated = has_rows_by_number(validation) or (
        of_rows and isinstance(validation, tuple | tf.data.Dataset)
    )
    opened: Input | ReadyBatches | None = None
    if not is_planned and not is_array_data(original(given.x)):
        if is_kept:
            read = original(given.x), given.steps_per_epoch
            opened, arguments["x"] = ReadyBatches.of(*read)
    elif is_planned or is_kept:
        chosen = given if is_validated else replace(given, validation_data=None)
        opened, validated = _open_rows(chosen, backend, with_rows_read)
        units.run(lambda: compare_data(backend, opened, validated, {}))
        if is_planned:
            planned.train(opened, arguments)
        if validated is not None and (is_planned or is_validated):
            planned.validate(validated, arguments)
        return opened
    if is_validated:
        several = isinstance(validation, tuple | list)
        source = as_data(*validation) if several else as_data(validation)
        assert isinstance(source, Source)
        size = given.validation_batch_size or given.batch_size
        inputs = open_inputs(source, backend, size, given.validation_steps)
        planned.validate(inputs, arguments)
    return opened


def _open_rows(
    given: DataArguments, backend: Backend, with_rows_read: bool
) -> tuple[Input, Input | None]:
    """Return rows to train on, and to validate with if there are such."""
    data = fit_data(given)
    if not isinstance(data.train, Source):
        raise UsageError(
            "a ledger has the numbers of the rows of each step, and rows of batches "
            "that are not known beforehand have none",
            hint="drop --ledger; or pass arrays, or dataset.unbatch() of known length, "
            "with global_batch_size=",
        )
    shuffle, seed = plan_shuffle(data.train, given.shuffle, given.seed, backend)
    inputs = Input(
        data.train,
        data.batch_size,
        seed=seed,
        shuffle=shuffle,
        with_rows_read=with_rows_read,
    )
    if not isinstance(data.validation, Source):
        return inputs, None
    size, most = data.validation_batch_size, given.validation_steps
    return inputs, open_inputs(data.validation, backend, size, most)


@contextlib.contextmanager
def same_order(
    arguments: dict[str, Any], seed: int | None, backend: Backend
) -> Iterator[Callable[[], None]]:
    """Inside, every rank reads shuffled data in one order.

    It is Keras' own if the script has set a seed, that of rank 0; else one that follows
    from ``seed`` alone: that of a ``RowPlan``.

    Yields:
        What has the next pass over arrays be the first.
    """
    of_script = keras_compat.data.tensorflow_seed()
    if backend.size > 1 and not backend.elastic:  # others may join later
        of_script = broadcast_object(backend, of_script)
    if seed is None and of_script is not None:
        with keras_compat.data.seeded(of_script):
            yield lambda: None
        return
    x = arguments["x"]
    is_mixed = isinstance(x, keras.utils.PyDataset) and arguments["shuffle"]
    if is_mixed and x.num_batches is not None:
        arguments |= {"x": ShuffledItems(x, seed or 0), "shuffle": False}
    arguments["shuffle"] = bool(arguments["shuffle"])

    def order(indices: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        return permuted(indices.shape[0], seed or 0, number)

    with keras_compat.data.shuffled_by(lambda: order) as begin:
        yield begin
