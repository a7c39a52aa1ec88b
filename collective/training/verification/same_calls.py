"""Finds ranks that call Keras with other data or weights than rank 0, at the batch.

Every rank reads whole batches, which must be the same. Each rank hashes its batches. The
hashes are compared before the first batch of a call, before the 2nd, 4th, 8th and so on,
before a model is saved, and at its end. Batches that a script gives one by one
(``train_on_batch``) are compared likewise, from one call to the next or to the end of the
script. Weights that differ at the first batch are replaced by rank 0's.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.model.variables import all_variables
from collective.training.process.object_collectives import gather_few
from collective.training.steps.batch_function import BatchFunction, StepObserver
from collective.training.steps.leaves import Leaves
from collective.training.steps.program import Program
from collective.training.verification.ranks import (
    compare,
    compare_graphs,
    compare_models,
)

#: The names of a call's rows in an error.
_ROWS = {
    "train_step": "training rows",
    "test_step": "evaluated rows",
    "predict_step": "predicted rows",
}
# A tensor of more bytes is hashed in part: so many stretches of it, of so many bytes.
_WHOLE_BYTES, _STRETCHES, _STRETCH_BYTES = 1 << 16, 64, 1 << 10
_WEIGHT_BYTES = 1 << 12


class SameCalls(StepObserver):
    """Compares the batches, models and weights of the ranks.

    Args:
        unit: Runs a function that all ranks call together, and repeats it if one of them
            has died.

    Attributes:
        compared: A model that the ranks have compared already: rank 0 may have read a
            state into it since.
    """

    def __init__(self, backend: Backend, unit: Callable[[Callable[[], Any]], Any]):
        self._backend, self._unit = backend, unit
        self.compared: keras.Model | None = None
        self._mark, self._count, self._compared = 0, 0, 0
        self._names: dict[str, None] = {}  # of the rows read since the last comparison

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Compare the batches of a call of Keras, also at its end."""
        self.compare_rows()  # of batches that the script gave before, one by one
        self.restart()
        try:
            yield
            self.compare_rows()
        finally:
            self.restart()

    def restart(self) -> None:
        """Begin to compare from the next batch on, for ranks that have read no other."""
        self._mark = self._count = self._compared = 0
        self._names.clear()

    def traced(self, function: BatchFunction, program: Program) -> None:
        """Compare models and the constants of their graphs."""
        self._unit(lambda: self._compare_programs(function, program))

    def _compare_programs(self, function: BatchFunction, program: Program) -> None:
        # A model that predicts may not be compiled.
        if function.name != "predict_step" and function.model is not self.compared:
            compare_models(self._backend, function.model)
        compare_graphs(self._backend, program.source.graph)

    def before_step(
        self, function: BatchFunction, program: Program, tensors: Sequence[tf.Tensor]
    ) -> None:
        """Hash the batch, and compare the hashes of all ranks now and then."""
        # Of own rows only their number in all ranks is alike.
        alike = tensors[-1:] if program.kind.is_read_cut else tensors
        self._note(function.name, alike)
        if self._count == 1:
            share_weights(program.variables, self._backend, self._unit)

    def before_whole_step(self, model: keras.Model, method: str, data: Any) -> None:
        """Hash the batch of a step that runs eagerly; see ``before_step``."""
        self._note(method, Leaves.of(data).tensors)
        if self._count == 1:
            kept = map(keras_compat.model.tf_variable, all_variables(model))
            share_weights([*kept], self._backend, self._unit)

    def _note(self, method: str, tensors: Sequence[tf.Tensor]) -> None:
        self._mark = mark_of(tensors, self._mark)
        self._count += 1
        self._names[_ROWS[method]] = None
        if self._count & (self._count - 1) == 0:
            self.compare_rows()

    def compare_rows(self) -> None:
        """Compare the batches that were read since the last comparison."""
        if self._compared != self._count:
            self._compared = self._count
            try:
                self._unit(self._compare_marks)
            except UsageError:
                self.restart()  # the script may catch it, on every rank
                raise
            self._names.clear()

    def _compare_marks(self) -> None:
        marks = gather_few(self._backend, [self._mark, self._count])
        if (marks != marks[0]).any():
            names = " and the ".join(self._names)
            compare(self._backend, {names: f"{self._mark} {self._count}"})


def share_weights(
    variables: Sequence[tf.Variable],
    backend: Backend,
    unit: Callable[[Callable[[], Any]], Any],
) -> None:
    """Give every rank rank 0's variables if they differ; every rank calls it.

    Args:
        variables: TensorFlow variables, in the same order on every rank.
        unit: Runs a function that all ranks call together, and repeats it if one of them
            has died. It returns the same on every rank, so variables are assigned after it.
    """
    mark = 0
    for variable in variables:
        mark = _hash_array(np.asarray(variable.read_value()), mark, _WEIGHT_BYTES)
    marks = unit(lambda: gather_few(backend, [mark]))
    if (marks == marks[0]).all():
        return
    values = unit(
        lambda: [backend.broadcast_array(v.read_value().numpy()) for v in variables]
    )
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def mark_of(tensors: Sequence[tf.Tensor], mark: int = 0) -> int:
    """Return a CRC-32 of the tensors of a batch.

    Args:
        mark: That of what came before.
    """
    for tensor in tensors:
        if tensor.dtype not in (tf.resource, tf.variant):
            mark = _hash_array(tensor.numpy(), mark, _WHOLE_BYTES)
    return mark


def _hash_array(value: Any, mark: int, most: int) -> int:
    """Return a CRC-32 of an array, or of parts of it if it is large."""
    array = np.asarray(value)
    if array.dtype == object:  # text
        flat = array.reshape(-1)
        some = flat[:: max(1, len(flat) // 1024)]
        return zlib.crc32(b"\0".join(map(bytes, some)), mark)
    mark = zlib.crc32(repr(array.shape).encode(), mark)
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if data.size <= most:
        return zlib.crc32(data.data, mark)
    stretch = min(_STRETCH_BYTES, most // _STRETCHES)
    for begin in np.linspace(0, data.size - stretch, _STRETCHES, dtype=np.int64):
        mark = zlib.crc32(data[begin : begin + stretch].data, mark)
    return mark
