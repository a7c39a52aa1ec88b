"""The step of a model that runs eagerly: whole, on every rank.

``run_eagerly=True`` leaves no graph that could be partitioned. Every rank has the whole
batch, and the random numbers of rank 0, so each computes what one process computes. On GPUs,
where the last bits of sums may differ, all apply rank 0's gradients.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.log import log
from collective.tensorflow_ops.repeated_rows import added_once
from collective.training import keras_compat
from collective.training.input.leaves import count_rows, first_leaf
from collective.training.model.record import record_of
from collective.training.process import host_random, interrupts
from collective.training.process.object_collectives import broadcast_object
from collective.training.step import finite
from collective.training.steps import report
from collective.training.steps.batch_function import Step, StepObserver, running
from collective.training.steps.settings import StepSettings

#: Makes a context around a step.
Around = Callable[[], contextlib.AbstractContextManager[None]]


def is_eager(model: keras.Model) -> bool:
    """Return whether the steps of a model run eagerly."""
    return model.run_eagerly or tf.config.functions_run_eagerly()


class WholeStep:
    """A step of Keras on whole batches, for Keras' own function.

    Args:
        method: The name of a method of the model.
        observers: Called around each step.
        around: Entered around each step.
    """

    def __init__(
        self,
        model: keras.Model,
        method: str,
        settings: StepSettings,
        observers: Sequence[StepObserver] = (),
        around: Around = contextlib.nullcontext,
    ):
        self._model, self._method, self._settings = model, method, settings
        self._step, self._backend = getattr(model, method), settings.backend
        self._observers, self._around = observers, around
        self._number = 0

    def __call__(self, data: Any) -> Any:
        """Run the step on a whole batch."""
        interrupts.check()
        if any([o.is_past(self._model, self._method) for o in self._observers]):
            return self._model.get_metrics_result()
        say(self._model, self._backend, self._settings.options.accumulate)
        for observer in self._observers:
            observer.before_whole_step(self._model, self._method, data)
        begin, clock = time.perf_counter(), time.time()
        with (
            self._around(),
            running(),
            keras_compat.tracing.applied_by(self._apply),
            keras_compat.tracing.loss_of_step(self._model) as losses,
        ):
            outputs = self._step(data)
        number, self._number = self._number, self._number + 1
        line = None
        if self._settings.reports:
            rows = count_rows(first_leaf(data))
            loss, now = report.loss(losses, outputs), time.time()
            line = report.line(loss, rows, (clock, now))
        done = time.perf_counter()
        step = Step(number, begin, begin, done, data, outputs, line)
        for observer in self._observers:
            observer.after_step(self._model, self._method, step)
        return outputs

    def _apply(
        self, optimizer: keras.Optimizer, gradients: Sequence[Any], variables: Any
    ) -> Any:
        """Apply gradients, which are checked before."""
        if not keras_compat.optimizers.expects_overflow(optimizer):
            pairs = zip(gradients, variables, strict=False)
            known = [(g, v.path) for g, v in pairs if g is not None]
            place = finite.first([tf.convert_to_tensor(g) for g, _ in known])
            paths = [path for _, path in known]
            finite.check_now(int(place), self._number, self._backend, paths)
        if self._backend.size > 1 and tf.config.list_logical_devices("GPU"):
            gradients = gradients_of_rank_zero(self._backend, gradients)
        return optimizer.apply(gradients, variables)


@contextlib.contextmanager
def as_rank_zero(
    backend: Backend, unit: Callable[[Callable[[], Any]], Any]
) -> Iterator[None]:
    """Have every rank draw the numbers that rank 0 draws.

    Args:
        unit: Runs a function that all ranks call together.
    """
    if backend.size > 1:
        state = keras_compat.eager_draws.eager_draws(), host_random.state()
        eager, host = unit(lambda: broadcast_object(backend, state))
        if backend.rank:
            keras_compat.eager_draws.set_eager_draws(eager)
            if (
                not host_random.is_read()
            ):  # else data may be drawing numbers of their own
                host_random.set_state(host)
    yield


def gradients_of_rank_zero(backend: Backend, gradients: Sequence[Any]) -> Sequence[Any]:
    """Return rank 0's gradients: GPUs may add them up in different orders.

    Rows that occur several times are added up first, because the optimizer would add them
    up in different orders, too.
    """
    gradients = [
        tf.IndexedSlices(*reversed(added_once(g.indices, g.values)), g.dense_shape)
        if isinstance(g, tf.IndexedSlices)
        else g
        for g in gradients
    ]
    tensors = tf.nest.flatten(list(gradients), expand_composites=True)
    arrays = [None if t is None else tf.convert_to_tensor(t).numpy() for t in tensors]
    sent = [
        None if array is None else tf.constant(array)
        for array in broadcast_object(backend, arrays)
    ]
    return tf.nest.pack_sequence_as(list(gradients), sent, expand_composites=True)


def say(model: keras.Model, backend: Backend, micro_batches: int = 1) -> None:
    """Warn once that the step saves no memory."""
    if backend.rank or not record_of(model).is_new("eager"):
        return
    if micro_batches > 1:
        log.warning(
            "model %r has run_eagerly=True: accumulate=%d saves no memory",
            model.name,
            micro_batches,
        )
    if backend.replicas > 1:
        log.warning(
            "model %r has run_eagerly=True: there is no graph to share out, so each of "
            "%d ranks computes whole batches, with the memory and in the time that one "
            "process takes",
            model.name,
            backend.replicas,
        )
