"""A context in which Keras' own loops share each batch out over the replicas of a backend."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from collective.backends.capabilities import Serving
from collective.replacements import replacing
from collective.training import keras_compat
from collective.training.keras_compat import batch_functions
from collective.training.model.kept import kept_as_compiled
from collective.training.sharding.held import check_whole
from collective.training.step import finite
from collective.training.steps import own_batches
from collective.training.steps.batch_function import (
    BatchFunction,
    PredictFunction,
    RunStep,
    StepObserver,
)
from collective.training.steps.planned_batches import PlannedBatches
from collective.training.steps.program import Program
from collective.training.steps.settings import StepSettings
from collective.training.steps.whole import Around, WholeStep, is_eager


@contextlib.contextmanager
def distributed(
    settings: StepSettings,
    observers: Sequence[StepObserver] = (),
    run_step: RunStep | None = None,
    around_eager_step: Around = contextlib.nullcontext,
    expects_nan: bool = False,
    made_before: Callable[[keras.Model, str], Any] = lambda model, method: None,
    reads: Mapping[str, PlannedBatches] = MappingProxyType({}),
) -> Iterator[None]:
    """Inside, models get functions that share the rows of each batch out.

    Args:
        settings: The backend and the options of the training.
        observers: Called around each step.
        run_step: See ``BatchFunction``.
        around_eager_step: Entered around each step of a model that runs eagerly.
        expects_nan: Whether a callback of the user's ends the training at a loss that is
            not finite, so that no warning is needed.
        made_before: Returns a ``BatchFunction`` of a model's method that may be used
            again, or None.
        reads: By a method of models: what reads the batches of its function.
    """
    backend = settings.backend
    watch = finite.Watch(backend, settings.options.terminate_on_nan, expects_nan)
    observers = [_Named(watch), *observers]

    def make(model: keras.Model, method: str) -> Any:
        if not settings.is_distributed:
            return None
        if is_eager(model):
            check_whole(model, "runs eagerly", "compile it without run_eagerly")
            whole = WholeStep(model, method, settings, observers, around_eager_step)
            return batch_functions.Eager(whole)
        if method == "predict_step" and not backend.synchronous:
            return None  # rank 0 predicts
        function = made_before(model, method) or function_of(model, method)
        function.serve(observers, reads.get(method))
        return function

    def function_of(model: keras.Model, method: str) -> BatchFunction:
        step = getattr(model, method)
        if method != "predict_step":
            return BatchFunction(model, step, method, settings, run_step)
        # It sums nothing: what is attached would be a message of its own.
        attached = settings.attached if settings.is_kept else None
        mine = dataclasses.replace(settings, attached=attached)
        return PredictFunction(model, step, method, mine, run_step)

    waiting: Any = contextlib.nullcontext()
    if isinstance(backend, Serving):
        waiting = keras_compat.model.before_metrics(backend.join)
    with watch.tracing(), batch_functions.made_by(make), waiting:
        yield


class _Named(StepObserver):
    """Has a warning of a value that is not finite name the variable."""

    def __init__(self, watch: finite.Watch):
        self._watch = watch

    def before_step(
        self, function: BatchFunction, program: Program, tensors: Sequence[tf.Tensor]
    ) -> None:
        """Note the program of a training step."""
        if function.name == "train_step":
            self._watch.paths = lambda: program.paths


@contextlib.contextmanager
def distributed_call(
    model: keras.Model,
    settings: StepSettings,
    observers: Sequence[StepObserver] = (),
    run_step: RunStep | None = None,
    expects_nan: bool = False,
    reads: Mapping[str, PlannedBatches] = MappingProxyType({}),
    around_eager_step: Around = contextlib.nullcontext,
) -> Iterator[None]:
    """Inside, one call of Keras for a model shares its batches out.

    The functions that the model had before are its own again afterwards. What was traced
    is kept for later calls with the same settings.
    """
    if not settings.is_distributed:  # Keras' own functions serve, which the model keeps
        with distributed(settings, observers, run_step, expects_nan=expects_nan):
            yield
        return
    kept: dict[str, Any] = {}
    backend, options = settings.backend, settings.options
    key = (
        *(backend, options.accumulate, options.virtual_replicas),
        *(settings.reports, options.terminate_on_nan, expects_nan),
        *(options.per_replica, own_batches.trained_with(model)),
    )

    def made_before(of: keras.Model, method: str) -> Any:
        nonlocal kept
        # The state of a hook begins anew, and so does what is attached.
        if (
            of is not model
            or settings.hook is not None
            or settings.attached is not None
        ):
            return None
        kept = kept_as_compiled(model, "functions").setdefault(key, {})
        return kept.get(method)

    with contextlib.ExitStack() as inside:
        for attribute in batch_functions.FUNCTIONS:
            inside.enter_context(replacing(model, attribute, None))
        inside.enter_context(
            distributed(
                settings,
                observers,
                run_step,
                around_eager_step,
                expects_nan,
                made_before,
                reads,
            )
        )
        try:
            yield
        finally:
            for attribute, method in batch_functions.FUNCTIONS.items():
                function = getattr(model, attribute, None)
                if isinstance(function, BatchFunction):
                    function.serve(())
                    kept[method] = function
