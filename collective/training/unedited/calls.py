"""Calls of ``keras.Model`` in an unedited script: Keras' own, made by all ranks together.

Each rank runs Keras' ``fit``, ``evaluate`` and ``predict`` with all their hooks; the step
of each batch is shared out (``collective.training.steps``). Around each call the ranks
compare what they were given.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

import collective
from collective.backends.base import Backend
from collective.distribute.scoped_models import strategy_of
from collective.fit_options import FitOptions
from collective.training import interrupts, keras_compat
from collective.training.failure import guarded
from collective.training.observers.desync import DesyncWatch
from collective.training.partition.method import supports
from collective.training.steps.batch_function import StepObserver
from collective.training.steps.distributed import distributed
from collective.training.steps.settings import StepSettings
from collective.training.unedited.agreement import agreeing
from collective.training.unedited.keras_calls import (
    check_keras,
    fit_seed,
    is_unseeded,
)
from collective.training.unedited.keras_distribution.job_devices import check_current
from collective.training.unedited.keras_distribution.model_parallel import backend_for
from collective.training.unedited.script_job import EVALUATE, FIT, PREDICT, ScriptJob
from collective.training.unedited.tracking import records
from collective.training.verification.ranks import compare
from collective.training.verification.same_calls import SameCalls
from collective.training.verification.settings import describe_settings

_CALLS = {"fit": FIT, "evaluate": EVALUATE, "predict": PREDICT}
# Arguments that are not compared: data are, batch by batch.
_NOT_COMPARED = {
    *("self", "x", "y", "sample_weight", "validation_data", "callbacks"),
    *("verbose", "kwargs"),
}
# Keras' fit validates by evaluate with this argument.
_FROM_KERAS_FIT = "_use_cached_eval_dataset"


# Options of ``collective.fit`` that the function of a batch knows.
_KNOWN = {"accumulate", "jit_compile", "terminate_on_nan", "check_every"}


def is_known(backend: Backend, options: Mapping[str, Any]) -> bool:
    """Return whether Keras' own loops can run with these options on a backend."""
    default = FitOptions()
    asked = {name for name, v in options.items() if v != getattr(default, name, None)}
    return asked <= _KNOWN and supports(backend) and not hasattr(backend, "strategy")


def distribute_calls(job: ScriptJob, options: Mapping[str, Any]) -> None:
    """Have Keras' own loops share the rows of each batch out over the ranks.

    Args:
        options: Of ``collective.fit``.
    """
    backend, units = job.backend, job.recovery
    attached = units.announcement if backend.elastic else None
    settings = StepSettings(backend, FitOptions(**options), attached=attached)
    same = SameCalls(backend, units.run)
    repeats = (units.run_step, units.end_eager_step) if backend.elastic else ()
    observers: list[StepObserver] = []
    if backend.size > 1:
        observers = [
            *([units] if backend.elastic else []),
            same,
            DesyncWatch(backend, settings.options.check_every, units.run),
        ]
    job.enter(distributed(settings, observers, *repeats))
    for name, call in _CALLS.items():
        stock = getattr(keras.Model, name)
        job.replace(keras.Model, name, _together(job, call, stock, same))


def _together(
    job: ScriptJob, call: str, stock: Callable[..., Any], same: SameCalls
) -> Callable[..., Any]:
    """Return a method of Keras that all ranks call together."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def method(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if job.inside or _FROM_KERAS_FIT in kwargs:
            return stock(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)  # a TypeError as Keras' own
        backend = backend_for(job, self)
        # Ranks hold parts of its layers, or it was made in a strategy's scope.
        if backend is not job.backend or strategy_of(self) is not None:
            ours = getattr(collective, stock.__name__)
            with job.calling(call):
                return ours(self, *args, **kwargs, backend=backend)
        check_keras()
        check_current(job)
        with (
            guarded(job.backend),
            interrupts.between_steps(),
            contextlib.ExitStack() as inside,
        ):
            job.meet(call)
            if call == FIT and is_unseeded(job):
                order = keras_compat.data.other_order_each_epoch(fit_seed(self))
                inside.enter_context(order)
            if job.backend.size > 1:
                _compare(job, {"run_eagerly": self.run_eagerly, **bound.arguments})
                inside.enter_context(same.call())
                inside.enter_context(_agreeing(job, bound.arguments))
            return stock(*bound.args, **bound.kwargs)

    method.stock = stock  # type: ignore[attr-defined]
    return method


@contextlib.contextmanager
def _agreeing(job: ScriptJob, arguments: dict[str, Any]) -> Iterator[None]:
    """Inside, the callbacks among the arguments agree with rank 0."""
    given = arguments.get("callbacks")
    if not given or isinstance(given, keras.callbacks.CallbackList):
        yield
        return
    callbacks = keras.tree.flatten(given)
    if job.backend.rank:
        callbacks = [c for c in callbacks if not records(c)]
    with agreeing(callbacks, job.backend, job.recovery.run) as followed:
        arguments["callbacks"] = followed
        yield


def _compare(job: ScriptJob, arguments: Mapping[str, Any]) -> None:
    """Refuse a call that other ranks make with other arguments or settings."""
    plain = {
        f"{name}=": repr(value)
        for name, value in arguments.items()
        if name not in _NOT_COMPARED and _is_plain(value)
    }
    mine = describe_settings() | plain
    job.recovery.run(lambda: compare(job.backend, mine))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) < 100 and all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
