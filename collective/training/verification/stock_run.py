"""``verify``: makes the first steps of a training by Keras' own step, too, on rank 0.

Both start from the same variables and get the same batches. Keras' own training has its own
values of all variables. They replace ours during its step, and are taken out again.
Differences are shown by step and by tensor.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.log import log
from collective.training import keras_compat
from collective.training.input.pipeline import Batch
from collective.training.loop.observer import FinishedStep, Observer
from collective.training.model.record import (
    record_of,
    state_variables,
    trainable_variables,
)
from collective.training.model.variables import (
    all_variables,
    is_in_parts,
    outside_variables,
)
from collective.training.process import host_random
from collective.training.process.object_collectives import broadcast_object
from collective.training.step.rows import BatchRows, packed
from collective.training.steps import report as of_step
from collective.training.verification import stock_run_table
from collective.training.verification.settings import products_of_float32
from collective.training.verification.stock_run_table import Step, norm, relative

VARIABLE = "COLLECTIVE_VERIFY"
RUN, STEPS = "run", 10
# The relative difference that rounding to a type may make.
_TOLERANCES = {
    "bfloat16": 0.08,
    "float16": 0.03,
    "tensorfloat32": 0.01,
    "float32": 1e-4,
    "float64": 1e-8,
}
_WHAT = "a step of Keras' own training"


def steps_beside(verify: bool | str, backend: Backend) -> int:
    """Return how many steps are also made by Keras' own step; every rank calls it.

    Args:
        verify: True, False, ``run`` or ``run:K``. The environment variable
            ``COLLECTIVE_VERIFY`` has precedence (0 for none). Rank 0's settings count.

    Raises:
        UsageError: It is something else; raised on every rank.
    """
    text = os.environ.get(VARIABLE) or (verify if isinstance(verify, str) else "")
    text = text or (RUN if verify else "0")
    if backend.size > 1:
        text = broadcast_object(backend, text)
    if text in ("0", "1"):
        return STEPS * int(text)
    word, _, number = text.partition(":")
    if word == RUN and (not number or (number.isdecimal() and int(number) > 0)):
        return int(number or STEPS)
    raise UsageError(
        f"verify={text!r} is neither True, False nor 'run'",
        hint=f"verify='run' or verify='run:{10 * STEPS}'",
    )


def can_run_beside(
    model: keras.Model, backend: Backend, in_parts: bool = False
) -> bool:
    """Return whether rank 0 can make a step alone; if not, warn and give the reason.

    Args:
        in_parts: Whether the ranks will hold variables in parts that are not made yet.
    """
    why = ""
    if not backend.synchronous:
        why = "there is no global batch"
    elif backend.elastic:
        why = "ranks may leave an elastic job"
    elif in_parts or is_in_parts(model):
        why = "each rank has a part of the model or of its optimizer"
    elif len(backend.local_replicas) > 1:
        why = "the model is on several devices"
    elif getattr(backend, "strategy", None) is not None:
        why = "its variables belong to a strategy of TensorFlow's"
    if why and backend.rank == 0:
        log.warning(f"no steps beside Keras' own: {why}")
    return not why


class StockRun(Observer):
    """Runs Keras' own step after each of the first steps, on the same global batch.

    Values that callbacks assign between steps are assigned in both trainings.
    """

    def __init__(
        self,
        model: keras.Model,
        backend: Backend,
        steps: int,
    ):
        self.model, self.backend = model, backend
        self.left = steps
        self.steps: list[Step] = []
        self._variables: list[tf.Variable | keras.Variable] = []
        self._stock: list[tf.Tensor] = []  # its values
        self._ours: list[tf.Tensor] = []  # ours after the last step

    def before_step(self, number: int) -> None:
        """Start Keras' own training, or assign the values that callbacks have assigned."""
        if self.backend.rank or not self.left:
            return
        if not self._variables:
            known = [*all_variables(self.model), *outside_variables(self.model)]
            self._variables = [keras_compat.model.tf_variable(v) for v in known]
            self._stock = _values(self._variables)
            return
        for i, value in enumerate(_values(self._variables)):
            if not _same(value, self._ours[i]):
                self._stock[i] = value

    def after_step(self, step: FinishedStep) -> None:
        """Make the step by Keras, too."""
        if not self.left:
            return
        self.left -= 1
        data = step.batch
        if isinstance(data, Batch):  # of this process
            data = packed(gathered(data, self.backend))
        if self.backend.rank == 0:
            with (
                self.backend.only_rank_zero(_WHAT),
                host_random.unchanged(),
                keras_compat.data.tensorflow_draws_unchanged(),
            ):
                self._compare(step, data)
        if not self.left:
            self.report()

    def end(self) -> None:
        """Show the steps of a training that was shorter."""
        if self.left:
            self.left = 0
            self.report()

    def report(self) -> None:
        """Print the tables on rank 0, and warn if the two trainings differ."""
        self._stock, self._ours = [], []
        if self.backend.rank or not self.steps:
            return
        allowed, hook = _tolerance(self.model), record_of(self.model).hook
        named = "" if hook is None else f"hook {hook.hook!r}"
        stock_run_table.show(self.steps, self.backend.replicas, allowed, hook=named)

    def _compare(self, step: FinishedStep, data: Any) -> None:
        self._ours = _values(self._variables)
        metrics = list(self.model.metrics_variables)
        shown_metrics = _values(metrics)
        try:
            _assign(self._variables, self._stock)
            self.model.reset_metrics()
            logs = self.model.train_step(data)
            self._stock = _values(self._variables)
        finally:
            _assign(self._variables, self._ours)
            _assign(metrics, shown_metrics)
        report = step.report.numpy()
        tensors, squares = {}, np.zeros(2)
        shown = [*trainable_variables(self.model), *state_variables(self.model)]
        for place, variable in enumerate(shown):  # the first of all_variables
            stock, ours = self._stock[place].numpy(), self._ours[place].numpy()
            if keras_compat.seeds.is_seed_state(variable):
                continue
            tensors[variable.path] = relative(stock, ours)
            squares += np.square([norm(ours - stock), norm(stock)])
        self.steps.append(
            Step(
                step.number + 1,
                int(report[of_step.ROWS]),
                (_loss(logs), float(report[of_step.LOSS])),
                float(np.sqrt(squares[0] / squares[1])) if squares[1] else 0.0,
                tensors,
            )
        )


def gathered(batch: Batch, backend: Backend) -> BatchRows:
    """Return the rows of all ranks, in their order; every rank calls it.

    Args:
        batch: This rank's batch, with trees of dense, ragged or sparse tensors.
    """
    mine = BatchRows(*(() if part is None else part for part in batch[:3]))
    if backend.size == 1:
        return mine
    arrays = [t.numpy() for t in tf.nest.flatten(mine, expand_composites=True)]
    parts = []
    for rank in range(backend.size):
        found = map(tf.constant, broadcast_object(backend, arrays, rank))
        part = tf.nest.pack_sequence_as(mine, list(found), expand_composites=True)
        parts.append(part)
    return tf.nest.map_structure(_joined, *parts)


def _joined(*leaves: Any) -> Any:
    if isinstance(leaves[0], tf.SparseTensor):
        return tf.sparse.concat(0, leaves)
    return tf.concat(leaves, 0)


def _tolerance(model: keras.Model) -> float:
    """Return the relative difference that rounding may make in a model."""
    dtypes = {str(layer.compute_dtype) for layer in keras_compat.model.layers_of(model)}
    dtypes |= {str(v.dtype) for v in model.variables}
    if "float32" in dtypes:
        dtypes.add(products_of_float32())
    return max(_TOLERANCES.get(dtype, _TOLERANCES["float64"]) for dtype in dtypes)


def _loss(logs: Any) -> float:
    """Return the ``loss`` of a step's logs; NaN if they have none."""
    found = logs.get("loss") if isinstance(logs, dict) else logs
    return float("nan") if found is None else float(np.mean(np.asarray(found)))


def _values(variables: Sequence[tf.Variable | keras.Variable]) -> list[tf.Tensor]:
    return [tf.identity(v) for v in variables]


def _assign(
    variables: Sequence[tf.Variable | keras.Variable], values: Sequence[tf.Tensor]
) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _same(one: object, other: object) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    return one.tobytes() == other.tobytes()
