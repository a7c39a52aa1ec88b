"""``collective.evaluate`` and ``predict`` by Keras' own, and what ``fit`` shares with them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective import recorder
from collective.backends.base import Backend
from collective.backends.capabilities import LocalDevices, Serving
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.calls.opening import open_inputs
from collective.training.calls.planned_data import PlannedCall, has_rows_by_number
from collective.training.calls.scoped_models import as_one_process
from collective.training.input.data import as_data
from collective.training.input.distributed_datasets import original
from collective.training.input.pipeline import Input
from collective.training.input.replica_batches import stack_arguments
from collective.training.input.source import Source
from collective.training.loop.callbacks import Callbacks
from collective.training.loop.progress import verbosity
from collective.training.loop.rank_zero import OnRankZero
from collective.training.observers.elastic.fit_units import FitUnits, units_of
from collective.training.process import interrupts
from collective.training.process.failure import guarded
from collective.training.sharding.held import backend_of_rows
from collective.training.steps.batch_function import StepObserver
from collective.training.steps.distributed import distributed_call
from collective.training.steps.own_batches import trained_with
from collective.training.steps.settings import StepSettings
from collective.training.steps.whole import as_rank_zero, is_eager
from collective.training.verification import compare_data, compare_settings
from collective.training.verification.same_calls import SameCalls

_DATA = ("x", "y", "sample_weight")
_STEPS = {"evaluate": "test_step", "predict": "predict_step"}


def call(
    method: str,
    model: keras.Model,
    arguments: dict[str, Any],
    callbacks: Callbacks,
    backend: Backend,
) -> Any:
    """Evaluate or predict by a model; see ``collective.evaluate``. Every rank calls it.

    Args:
        method: ``evaluate`` or ``predict``.
        arguments: Those of the method of ``keras.Model``, without the callbacks.

    Raises:
        UsageError: It is not a model, or not one that can be evaluated.
    """
    _check_model(method, model)
    stock, units = getattr(keras.Model, method), units_of(backend)
    verbose = verbosity(arguments["verbose"])
    has_bar = isinstance(callbacks, keras.callbacks.CallbackList)
    settings = with_announcements(StepSettings(backend), units)
    observers: list[StepObserver] = [units]
    planned = PlannedCall(
        backend_of_rows(model, backend),
        not settings.is_distributed or is_eager(model),
    )
    arguments = dict(arguments)
    data = {name: arguments[name] for name in _DATA if name in arguments}
    with contextlib.ExitStack() as inside:
        inside.enter_context(guarded(backend))
        inside.enter_context(as_one_process(model))
        inside.enter_context(on_devices(model, backend))
        inside.enter_context(units.serving())
        units.run(lambda: compare_settings(backend))
        if has_rows_by_number(data):
            inputs = _rows(data, arguments, backend, units)
            planned.pass_over(_STEPS[method], inputs, arguments)
        inside.enter_context(contextlib.closing(planned))
        if method == "evaluate" and trained_with(model) == "batch":
            stack_arguments(arguments, backend.most_replicas)
        if has_others(backend):
            same = SameCalls(backend, units.run)
            observers.append(same)
            inside.enter_context(same.call())
            inside.enter_context(reading_alike())
        inside.enter_context(
            distributed_call(
                model,
                settings,
                observers,
                units.run_step,
                reads=planned.reads,
                around_eager_step=lambda: as_rank_zero(backend, units.run),
            )
        )
        inside.enter_context(interrupts.between_steps())
        inside.enter_context(recorder.span(recorder.OTHER, method))
        bridge = OnRankZero(callbacks, model, backend, arguments["verbose"], units.run)
        arguments |= {name: as_read(arguments[name]) for name in data}
        arguments |= {
            "callbacks": [bridge],
            "verbose": 0 if has_bar or backend.rank else verbose,
        }
        result = getattr(stock, "stock", stock)(model, **arguments)
        bridge.share_state()
        return result


def _check_model(method: str, model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise UsageError(
            f"a keras.Model was expected, not {type(model).__name__}",
            hint=f"collective.{method}(model, x)",
        )
    if method == "evaluate" and not model.compiled:
        raise UsageError(
            "evaluate needs a compiled keras.Model",
            hint="model.compile(optimizer=..., loss=...) before collective.evaluate",
        )


def _rows(
    data: Mapping[str, Any],
    arguments: Mapping[str, Any],
    backend: Backend,
    units: FitUnits,
) -> Input:
    """Return rows by number, which the ranks have compared."""
    source = as_data(**data)
    assert isinstance(source, Source)
    rows, steps = arguments["batch_size"], arguments["steps"]
    inputs = open_inputs(source, backend, rows, steps)
    units.run(lambda: compare_data(backend, inputs, None, {}))
    return inputs


def on_devices(
    model: keras.Model, backend: Backend
) -> contextlib.AbstractContextManager[None]:
    """Enter what lets Keras run a model of a strategy of TensorFlow's."""
    if isinstance(backend, LocalDevices | Serving):
        return keras_compat.one_copy.whole_batches(model)
    return contextlib.nullcontext()


def as_read(x: Any) -> Any:
    """Return data as Keras reads them: arrays of text become tensors."""

    def read(leaf: Any) -> Any:
        is_text = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "US"
        return tf.constant(leaf) if is_text else leaf

    x = original(x)
    if isinstance(x, np.ndarray | dict | list | tuple):
        return keras.tree.map_structure(read, x)
    return x


@contextlib.contextmanager
def reading_alike(passes: int = 1) -> Iterator[None]:
    """Inside, the ranks of a call read the same data, pass after pass.

    Args:
        passes: So many passes follow each other in the first data that are opened.
    """
    ahead = keras_compat.data.no_reading_ahead(passes)
    with ahead, keras_compat.random_pipelines.drawing_in_order():
        yield


def has_others(backend: Backend) -> bool:
    """Return whether there are other ranks, or may be."""
    return backend.size > 1 or backend.elastic


def with_announcements(settings: StepSettings, units: FitUnits) -> StepSettings:
    """Return settings with what the ranks of an elastic job say in each step."""
    if not settings.backend.elastic:
        return settings
    given = settings.attached

    def attached() -> list[tf.Tensor]:
        return [*units.announcement(), *(() if given is None else given())]

    return replace(settings, attached=attached, is_kept=True)
