"""Keras' own step on the rows of each replica, which are a batch of their own.

tf.distribute and Horovod do this with any model; here it is done if it is asked for
(``own_batches``). Gradients are averaged, weighted by rows, when an optimizer gets them, and
so are the values that the step writes and returns. Metrics count from zero in each step, and
are added up.

Workers of parameter servers have this step, too: each is the only replica of its batch.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.input.plan import share
from collective.training.input.replica_batches import Stack, first_of
from collective.training.keras_compat.traced import traced
from collective.training.model.variables import captured_variables, written_variables
from collective.training.partition import devices
from collective.training.step import finite, layer_state
from collective.training.step.clock import now
from collective.training.step.rows import at_least_one_row
from collective.training.steps import report
from collective.training.steps.leaves import COMPOSITE_SPECS
from collective.training.steps.program import KerasStep, Kind, Program
from collective.training.steps.settings import StepSettings


class OwnRowsProgram(Program):
    """Keras' step for one kind of batch, of which each replica has a batch of its own.

    Args:
        step: Keras' step, with the model bound.
        model: Its model.
        kind: The batches that it serves; of a ``Stack``, a replica has one whole batch.
        settings: The backend and the options of the training.
        trains: Whether it is the step of a training.
        checks: Whether a sum that is not finite is told, or ends the step.
        reports: Whether the step also returns its report.
    """

    def __init__(
        self,
        step: KerasStep,
        model: keras.Model,
        kind: Kind,
        settings: StepSettings,
        *,
        trains: bool,
        checks: bool,
        reports: bool,
    ):
        super().__init__(kind, settings, reports)
        self._step, self._model, self._checks = step, model, checks
        self._counts_alone = trains and not settings.backend.synchronous
        # The ids of variables that an optimizer writes, the same on every replica.
        self._updated: set[int] = set()
        self._paths: list[str] = []
        self._state: list[tf.Variable] = []  # other variables that are written
        self._structure: Any = None  # of what the step returns
        self.source = self._built()
        self._metrics = [
            keras_compat.model.tf_variable(v) for v in model.metrics_variables
        ]
        signature = [*kind.specs(), tf.TensorSpec([], tf.int64)]
        found = traced(self._on_process, input_signature=signature)
        function = found.get_concrete_function()
        self._graph = function.graph
        known = self._updated | {id(v) for v in self._metrics}
        if settings.backend.synchronous:  # else each worker writes by itself
            self._state = [v for v in self.written if id(v) not in known]
        if not self._state:  # else the step has to sum it, too
            self._runs[None] = function

    def _built(self) -> Any:
        """Return Keras' step, traced for whole batches; it makes the model's variables."""

        def whole(*tensors: tf.Tensor) -> None:
            self._step(self._data(tensors))

        model, backend = self._model, self.settings.backend
        is_one = len(backend.local_replicas) == 1
        around = backend.scope() if is_one else devices.on_first(model, backend)
        with around, keras_compat.tracing.only_builds():
            return traced(whole).get_concrete_function(*self.kind.whole_specs())

    def _data(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Return the ``data`` of Keras' step."""
        data = self.kind.packed(tensors)
        return first_of(data.batches) if isinstance(data, Stack) else data

    @property
    def paths(self) -> Sequence[str]:
        """Return the paths of the variables with a gradient."""
        return self._paths

    @property
    def variables(self) -> list[tf.Variable]:
        """Return the variables that the step uses."""
        return captured_variables(self._graph)

    @property
    def written(self) -> list[tf.Variable]:
        """Return the variables that the step writes."""
        return written_variables(self._graph)

    def _received(self, result: Any) -> Any:
        if self.settings.backend.synchronous:
            return super()._received(result)
        count = len(tf.nest.flatten(self._structure))
        self.report = _Later(result, 2, 0) if self._reports else None
        return self._packed([_Later(result, 0, index) for index in range(count)])

    def _packed(self, tensors: Sequence[Any]) -> Any:
        return tf.nest.pack_sequence_as(self._structure, list(tensors))

    def _on_process(self, *arguments: tf.Tensor) -> Any:
        """Compute the step with the rows of this process; see ``Program``."""
        *tensors, number = arguments
        total = tensors.pop() if self.kind.is_read_cut else self._total(tensors)
        return self.settings.backend.run(self._replica_step, (tensors, total, number))

    def _replica_step(
        self, tensors: list[tf.Tensor], total: tf.Tensor, number: tf.Tensor
    ) -> Any:
        """Run the step of one replica inside ``Backend.run``; see ``_on_process``."""
        settings, backend, model = self.settings, self.settings.backend, self._model
        own, count = self._own(tensors, total)
        attached = [] if settings.attached is None else settings.attached()
        weight = tf.cast(count, tf.float64) / tf.cast(total, tf.float64)
        update = _Update(self, weight, number)
        before = [tf.identity(variable) for variable in self._state]
        with contextlib.ExitStack() as inside:
            inside.enter_context(keras_compat.tracing.applied_by(update))
            inside.enter_context(
                keras_compat.replica_draws.draw_as_replica(backend.rank)
            )
            if self._counts_alone:
                optimizer = model.optimizer
                inside.enter_context(
                    keras_compat.optimizers.count_atomically(optimizer)
                )
            scope = inside.enter_context(keras_compat.tracing.counted_metrics(model))
            losses = inside.enter_context(keras_compat.tracing.loss_of_step(model))
            outputs = self._step(self._data(own))
        loss = report.loss(losses, outputs)
        after = [tf.identity(variable) for variable in self._state]
        changes = [
            layer_state.contribution(*pair, weight)
            for pair in zip(before, after, strict=True)
        ]
        flat = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(outputs)]
        averaged = [t for t in flat if _is_number(t)]
        means = [
            _weighted(tf.cast(v, tf.float64), weight)
            for v in (tf.reduce_mean(loss), *averaged)
        ]
        counts = [
            _weighted(tf.cast(scope.get_current_value(v), tf.float64), count > 0)
            for v in model.metrics_variables
        ]
        sums = self._summed([changes, means, counts, attached])
        changes, (loss, *means), counts, attached = sums
        backend.assign(self._state, list(map(layer_state.updated, before, changes)))
        self._add_to_metrics(counts)
        mean = iter(means)
        flat = [_as(next(mean), t.dtype) if _is_number(t) else t for t in flat]
        outputs = tf.nest.pack_sequence_as(outputs, flat)
        self._structure = outputs = self._with_metrics(outputs)
        found = tf.nest.flatten(outputs)
        reports = []
        if self._reports:
            reports = [report.line(loss, total, (update.start, update.stop))]
        return found, attached, reports

    def _own(
        self, tensors: Sequence[tf.Tensor], total: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Return what a replica has of the batch, with one row at least, and its rows."""
        backend, cut = self.settings.backend, self.kind.cut
        replica = tf.cast(backend.replica(), tf.int64)
        replicas = tf.cast(backend.replica_count(), tf.int64)
        start, stop = share(total, replica, replicas)
        count = stop - start
        if backend.most_replicas == 1:
            return list(tensors), count
        if not any(cut) or any(
            isinstance(s, COMPOSITE_SPECS) for s in tf.nest.flatten(self.kind.spec)
        ):
            raise UsageError(
                "a replica may have no rows of a short batch, and rows of ragged or "
                "sparse tensors cannot be made up for it",
                hint="drop per_replica; or pass dense rows",
            )
        rows = list(itertools.compress(tensors, cut))
        if not self.kind.is_read_cut:
            rows = [tensor[start:stop] for tensor in rows]
        mine = iter(at_least_one_row(rows, count))
        pairs = zip(tensors, cut, strict=True)
        return [next(mine) if is_cut else tensor for tensor, is_cut in pairs], count

    def _with_metrics(self, outputs: Any) -> Any:
        """Return outputs, with what metrics have counted so far if the step returns it."""
        results = report.flat_logs(self._model.get_metrics_result())
        if not isinstance(outputs, Mapping) or set(report.flat_logs(outputs)) != set(
            results
        ):
            return outputs

        def named(logs: Mapping[str, Any]) -> dict[str, Any]:
            return {
                name: named(value) if isinstance(value, Mapping) else results[name]
                for name, value in logs.items()
            }

        return named(outputs)

    def _add_to_metrics(self, counts: Sequence[tf.Tensor]) -> None:
        """Add the counts of this step to the metrics."""
        backend = self.settings.backend
        pairs = [
            (v, tf.cast(c, v.dtype)) for v, c in zip(self._metrics, counts, strict=True)
        ]
        if backend.synchronous:
            backend.assign(
                self._metrics, [variable + count for variable, count in pairs]
            )
            return
        for variable, count in pairs:  # in one operation, because others write, too
            variable.assign_add(count)

    def _summed(self, tensors: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """Return the sums over replicas, in float64."""
        wide = [tf.cast(t, tf.float64) for t in tf.nest.flatten(tensors)]
        sums = self.settings.backend.all_reduce(wide) if wide else []
        found: list[list[tf.Tensor]] = tf.nest.pack_sequence_as(tensors, sums)
        return found

    def apply_mean(
        self,
        update: _Update,
        optimizer: keras.Optimizer,
        gradients: Any,
        variables: Any,
    ) -> Any:
        """Have an optimizer apply the mean of the gradients of all replicas."""
        backend = self.settings.backend
        mine = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
        known = [g for g in mine if g is not None]
        pairs = zip(mine, variables, strict=False)
        self._paths[:] = [v.path for g, v in pairs if g is not None]
        located = finite.at_replica(finite.first(known), backend)
        with tf.control_dependencies(known):
            update.start = now()
        weighted = [_weighted(g, update.weight) for g in known]
        *sums, places = backend.all_reduce([*weighted, located], range(len(known)))
        with tf.control_dependencies(sums):
            update.stop = now()
        checks = finite.check(places, update.number, backend) if self._checks else []
        with tf.control_dependencies(checks):
            means = iter([tf.identity(total) for total in sums])
        mean = [None if g is None else next(means) for g in mine]
        result = keras_compat.optimizers.apply(optimizer, mean, variables)
        written = [*variables, *optimizer.variables]
        self._updated.update(id(keras_compat.model.tf_variable(v)) for v in written)
        return result


class _Update:
    """Has an optimizer apply the mean of all replicas' gradients in place of its own.

    Args:
        weight: float64 scalar, the part of the rows that this replica has.
        number: The number of the step.

    Attributes:
        start, stop: When the exchange began and ended; see ``report``.
    """

    def __init__(self, program: OwnRowsProgram, weight: tf.Tensor, number: tf.Tensor):
        self._program, self.weight, self.number = program, weight, number
        self.start = self.stop = now()

    def __call__(
        self, optimizer: keras.Optimizer, gradients: Sequence[Any], variables: Any
    ) -> Any:
        """Apply the mean; called in place of ``optimizer.apply``."""
        return self._program.apply_mean(self, optimizer, gradients, variables)


class _Later:
    """A part of what a worker returns, for which its reader waits.

    Args:
        result: What ``Backend.call`` of an asynchronous backend has returned.
        path: The indices that lead to the part.
    """

    def __init__(self, result: Any, *path: int):
        self._result, self._path = result, path

    def numpy(self) -> np.ndarray:
        """Wait for the value."""
        value = self._result.fetch()
        for index in self._path:
            value = value[index]
        return np.asarray(value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.numpy().astype(dtype or self.numpy().dtype)

    def __float__(self) -> float:
        return float(self.numpy())


def _is_number(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_integer)


def _as(mean: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return a mean in the dtype of its values, unless these are integers."""
    return tf.cast(mean, dtype) if dtype.is_floating else mean


def _weighted(tensor: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Return the product; zero if the weight is zero, even if the tensor is not finite."""
    return tf.math.multiply_no_nan(tensor, tf.cast(weight, tensor.dtype))
