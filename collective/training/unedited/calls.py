"""Calls of ``keras.Model`` in an unedited script: Keras' own, made by all ranks together.

Each rank runs Keras' ``fit``, ``evaluate`` and ``predict`` with all their hooks; the step
of each batch is shared out (``collective.training.steps``). Around each call the ranks
compare what they were given.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

import collective
from collective.errors import UsageError
from collective.replacements import replacing
from collective.training import keras_compat
from collective.training.calls.scoped_models import strategy_of
from collective.training.calls.set_options import SetOptions
from collective.training.input.replica_batches import stack_arguments
from collective.training.observers.desync import DesyncWatch
from collective.training.observers.layout_report import LayoutReport
from collective.training.observers.model_axis import ModelAxis
from collective.training.preparation.prepare import ModelMisfit
from collective.training.process.failure import guarded
from collective.training.sharding.held import check_whole
from collective.training.steps.batch_function import StepObserver
from collective.training.steps.distributed import distributed
from collective.training.steps.own_batches import trained_with
from collective.training.unedited.agreement import METHODS, agreeing, overrides
from collective.training.unedited.dry_run import DryRun
from collective.training.unedited.keras_distribution.job_devices import check_current
from collective.training.unedited.script_job import EVALUATE, FIT, PREDICT, ScriptJob
from collective.training.unedited.seeds import fit_seed, is_unseeded
from collective.training.unedited.tracking import records, without_records
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
_OF_BATCHES = ("train_on_batch", "test_on_batch", "predict_on_batch")


def distribute_calls(
    job: ScriptJob, asked: Mapping[str, Any], dry_run: DryRun | None = None
) -> None:
    """Have Keras' own loops share the rows of each batch out over the ranks.

    Models of a strategy's scope, and all models where the backend is a strategy of
    TensorFlow's, are left to ``collective.fit`` and its sisters.

    Args:
        asked: Options of ``collective.fit``.
        dry_run: Ends the script before its first training step.

    Raises:
        UsageError: On every rank alike: the options do not work together, or not here.
    """
    backend, units = job.backend, job.units
    options = SetOptions(backend, asked, units.run)
    if options.options.timeline and backend.elastic:
        raise UsageError(
            "a timeline of an unedited script does not work with an elastic job "
            "(--min-np)",
            hint="drop --set timeline; or call collective.fit(timeline=) in the script",
        )
    attached = units.announcement if job.is_shared else None
    same = SameCalls(backend, units.run)
    repeats = (units.run_step, units.eager_step) if job.is_shared else ()
    observers: list[StepObserver] = [options]
    if job.is_shared:
        job.before_end.append(same.compare_rows)
        job.before_saves.append(same.compare_rows)
        watch = DesyncWatch(backend, options.options.check_every, units.run)
        observers = [*([units] if backend.elastic else []), same, watch, options]
    if job.placing is not None:
        observers += [ModelAxis(job.placing, False), LayoutReport(job.placing)]
    observers += [] if dry_run is None else [dry_run]
    if not job.by_strategy:
        is_kept = units.are_kept or dry_run is not None
        settings = options.of_steps(attached=attached, is_kept=is_kept)
        job.enter(distributed(settings, observers, *repeats))
    for name, call in _CALLS.items():
        stock = getattr(keras.Model, name)
        method = _method(
            job, stock, _by_keras(job, call, stock, same, options), options, dry_run
        )
        job.replace(keras.Model, name, method)
    if job.by_strategy and backend.size > 1:
        for name in _OF_BATCHES:
            job.replace(keras.Model, name, _noted(job, getattr(keras.Model, name)))


def route_scoped(job: ScriptJob) -> None:
    """Have ``collective.fit`` and its sisters serve models made in a strategy's scope."""
    for name in _CALLS:
        stock = getattr(keras.Model, name)
        job.replace(keras.Model, name, _method(job, stock, stock))


def are_replaced() -> bool:
    """Return whether Keras' methods are ours already."""
    return hasattr(keras.Model.fit, "stock")


def _method(
    job: ScriptJob,
    stock: Callable[..., Any],
    by_keras: Callable[..., Any],
    options: SetOptions | None = None,
    dry_run: DryRun | None = None,
) -> Callable[..., Any]:
    """Return a method with the signature of Keras' own, which chooses how it is run."""
    signature = inspect.signature(stock)
    ours = getattr(collective, stock.__name__)

    @functools.wraps(stock)
    def method(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if job.inside or _FROM_KERAS_FIT in kwargs:
            return stock(self, *args, **kwargs)
        signature.bind(self, *args, **kwargs)  # a TypeError as Keras' own
        check_keras()
        check_current(job)
        is_ours = strategy_of(self) is not None  # it was made in a strategy's scope
        more: dict[str, Any] = {}
        if options is not None:
            fits = stock.__name__ == "fit"
            is_ours |= job.by_strategy
            more = dict(options.given) if fits else {}
            if fits and is_unseeded(job):
                more = {"seed": fit_seed(job)} | more
        if dry_run is not None and stock.__name__ == "fit":
            dry_run.check(self, is_ours)
        if not is_ours:
            return by_keras(self, *args, **kwargs)
        check_whole(
            self,
            "is of a strategy's scope",
            "make the model outside of strategies' scopes",
        )
        with job.calling(_CALLS[stock.__name__]), _as_keras_raises():
            return ours(self, *args, **kwargs, **more, backend=job.backend)

    method.stock = stock  # type: ignore[attr-defined]
    return method


def _by_keras(
    job: ScriptJob,
    call: str,
    stock: Callable[..., Any],
    same: SameCalls,
    options: SetOptions,
) -> Callable[..., Any]:
    """Return a method of Keras that all ranks call together."""
    signature = inspect.signature(stock)

    def method(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        with (
            guarded(job.backend),
            contextlib.ExitStack() as inside,
        ):
            if job.is_shared:
                inside.enter_context(job.units.interrupts.call())
            job.meet(call)
            if call == FIT and is_unseeded(job):
                order = keras_compat.data.other_order_each_epoch(fit_seed(job))
                inside.enter_context(order)
            if job.is_shared:
                _compare(job, {"run_eagerly": self.run_eagerly, **bound.arguments})
                inside.enter_context(same.call())
                inside.enter_context(_agreeing(job, bound.arguments))
            if call == FIT:
                more = inside.enter_context(options.fitting(self, bound.arguments))
                _add_callbacks(bound.arguments, more)
            if call == EVALUATE and trained_with(self) == "batch":
                stack_arguments(bound.arguments, job.backend.most_replicas)
            if job.is_shared:
                passes = _passes(bound.arguments) if call == FIT else 1
                inside.enter_context(keras_compat.data.no_reading_ahead(passes))
            result = stock(*bound.args, **bound.kwargs)
            if job.is_shared:
                job.units.ask_for_interrupts()
            return result

    return method


def _passes(arguments: Mapping[str, Any]) -> int:
    """Return how often ``fit`` passes over its data."""
    epochs: int = arguments.get("epochs", 1)
    return max(epochs - (arguments.get("initial_epoch") or 0), 0)


def _add_callbacks(
    arguments: dict[str, Any], more: Sequence[keras.callbacks.Callback]
) -> None:
    """Add callbacks to those of a call."""
    if not more:
        return
    given = arguments.get("callbacks")
    if isinstance(given, keras.callbacks.CallbackList):
        for callback in more:
            given.append(callback)
    else:
        arguments["callbacks"] = [*keras.tree.flatten(given or []), *more]


@contextlib.contextmanager
def _as_keras_raises() -> Iterator[None]:
    """Raise what Keras or the script's own layers raised, for the script to catch."""
    try:
        yield
    except ModelMisfit as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


def _noted(job: ScriptJob, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return Keras' own method, which says once that it is not distributed."""

    @functools.wraps(stock)
    def method(*args: Any, **kwargs: Any) -> Any:
        if not job.inside:
            job.warn_once(
                stock.__name__,
                "%s is not distributed: each of the %d processes runs it whole "
                "(fit, evaluate and predict are distributed; with --loops so is this)",
                job.backend.size,
            )
        return stock(*args, **kwargs)

    return method


def check_keras() -> None:
    """Refuse a Keras backend that the script asked for when it was too late."""
    wanted = os.environ.get("KERAS_BACKEND", "tensorflow")
    if wanted != keras.backend.backend() or wanted != "tensorflow":
        raise UsageError(
            f"the script asks for Keras' backend {wanted!r}, and only 'tensorflow' can "
            "be distributed",
            hint="unset KERAS_BACKEND, or run the script by python itself",
        )


@contextlib.contextmanager
def _agreeing(job: ScriptJob, arguments: dict[str, Any]) -> Iterator[None]:
    """Inside, the callbacks among the arguments agree with rank 0."""
    given = arguments.get("callbacks")
    is_list = isinstance(given, keras.callbacks.CallbackList)
    callbacks = [] if is_list else keras.tree.flatten(given or [])
    if job.backend.rank:
        callbacks = without_records(callbacks)
    with (
        _recording(job, callbacks),
        job.units.keeping(callbacks),
        agreeing(callbacks, job.backend, job.units.run) as followed,
    ):
        if is_list or not given:
            _add_callbacks(arguments, followed)
        else:
            arguments["callbacks"] = followed
        yield


@contextlib.contextmanager
def _recording(
    job: ScriptJob, callbacks: Sequence[keras.callbacks.Callback]
) -> Iterator[None]:
    """Inside, hooks of callbacks that only rank 0 has wait for no other rank."""

    def alone(callback: keras.callbacks.Callback, name: str) -> Callable[..., Any]:
        hook = getattr(callback, name)

        @functools.wraps(hook)
        def made(*args: Any, **kwargs: Any) -> Any:
            with job.alone(callback.model):
                return hook(*args, **kwargs)

        return made

    with contextlib.ExitStack() as inside:
        for callback in callbacks if job.backend.rank == 0 else ():
            for name in METHODS if records(callback) else ():
                if overrides(callback, name):
                    hook = alone(callback, name)
                    inside.enter_context(replacing(callback, name, hook, new=True))
        yield


def _compare(job: ScriptJob, arguments: Mapping[str, Any]) -> None:
    """Refuse a call that other ranks make with other arguments or settings."""
    plain = {
        f"{name}=": repr(value)
        for name, value in arguments.items()
        if name not in _NOT_COMPARED and _is_plain(value)
    }
    mine = describe_settings() | plain
    job.units.run(lambda: compare(job.backend, mine))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) < 100 and all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
