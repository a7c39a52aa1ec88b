"""Options of ``--set``, which are for each ``fit`` of a script: settings and observers.

They act under Keras' own loops. An option that says which rows a step has, as a ledger, is
an argument of ``collective.fit``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.fit_options import NAMES, FitOptions
from collective.training.compression import named
from collective.training.input.data import is_array_data
from collective.training.input.distributed_datasets import original
from collective.training.input.plan import ENDLESS
from collective.training.input.replica_batches import stack_arguments
from collective.training.loop.observed_fit import ObservedFit
from collective.training.loop.observer import Observer
from collective.training.observers.timeline import TimelineObserver
from collective.training.preparation import compatibility
from collective.training.preparation.prepare import features_of
from collective.training.steps import own_batches
from collective.training.steps.batch_function import BatchFunction, Step, StepObserver
from collective.training.steps.program import Program
from collective.training.steps.settings import StepSettings
from collective.training.steps.whole import is_eager
from collective.training.verification import (
    StockRun,
    can_run_beside,
    deterministic,
    steps_beside,
)
from collective.training.virtual import checks as virtual_checks

#: Options of ``collective.fit`` that plan the rows of steps.
_OF_PLANS = ("checkpoint", "global_batch_size", "ledger")


def check_settable(asked: Mapping[str, Any]) -> None:
    """Refuse an option that plans the rows of steps.

    Raises:
        UsageError: An unedited script cannot have it.
    """
    for name in _OF_PLANS:
        if asked.get(name) is not None:
            raise UsageError(
                f"{name} cannot be set for an unedited script: Keras' own fit chooses "
                "its rows",
                hint=f"call collective.fit(model, ..., {name}=...) in the script",
            )


class SetOptions(StepObserver):
    """What ``--set`` adds to each ``fit`` of a script.

    Args:
        backend: Sums over the ranks.
        asked: The options by name.
        unit: Runs what all ranks do together.
        more: Returns observers of each ``fit`` in addition to those of the options,
            outside of them; see ``ObservedFit``.
        gathers: See ``Position``.

    Raises:
        UsageError: On every rank alike: they do not work together, or not here.
    """

    def __init__(
        self,
        backend: Backend,
        asked: Mapping[str, Any],
        unit: Callable[[Callable[[], Any]], Any],
        more: Callable[[ObservedFit], Sequence[Observer]] | None = None,
        gathers: bool = False,
    ):
        check_settable(asked)
        options = FitOptions(**asked)
        choice = own_batches.chosen(options.per_replica, backend)
        self.options = replace(options, per_replica=choice)
        self._backend = backend
        compatibility.check(self.options.features, backend)
        if self.options.hook is not None:
            named.make(self.options.hook)
        self.virtual = virtual_checks.check_count(
            self.options.virtual_replicas, backend
        )
        virtual = self.virtual
        if virtual is not None:
            unit(lambda: deterministic.agree(virtual, backend))
        self._beside = unit(lambda: steps_beside(self.options.verify, backend))
        self._observed: ObservedFit | None = None
        self._more, self._gathers = more, gathers

    @property
    def given(self) -> dict[str, Any]:
        """Return the options that were asked for, as arguments of ``collective.fit``."""
        default = FitOptions()
        chosen = {name: getattr(self.options, name) for name in NAMES}
        return {n: v for n, v in chosen.items() if v != getattr(default, n)}

    @property
    def reports(self) -> bool:
        """Return whether observers need the report of each step."""
        ends = self.options.steps is not None
        return bool(ends or self.options.timeline or self._beside or self._more)

    @contextlib.contextmanager
    def fitting(
        self, model: keras.Model, arguments: dict[str, Any]
    ) -> Iterator[list[keras.callbacks.Callback]]:
        """Inside, Keras fits a model with the options; every rank enters it.

        Args:
            arguments: Of the call; changed where an option says so.

        Yields:
            More callbacks for the call.
        """
        more = self._begin(model, arguments)
        with contextlib.ExitStack() as inside:
            if self.virtual is not None:
                inside.enter_context(deterministic.deterministic())
            if not self.reports:
                yield more
                return
            initial = arguments.get("initial_epoch") or 0
            last = ENDLESS
            if self.options.steps is not None:
                last = self.options.steps
                arguments["epochs"] = initial + last  # each has one step at least
            observed = ObservedFit(
                model,
                self._backend,
                self._observers,
                gathers=self._gathers,
                initial_epoch=initial,
                last_step=last,
            )
            inside.enter_context(self._observing(observed))
            yield [observed.callback, *more]

    def _begin(
        self, model: keras.Model, arguments: dict[str, Any]
    ) -> list[keras.callbacks.Callback]:
        """Begin to train a model; return more callbacks for the call."""
        choice, backend = self.options.per_replica, self._backend
        if is_eager(model) and (choice or self.options.hook is not None):
            raise UsageError(
                f"model {model.name!r} runs eagerly, whole on every rank, which does not "
                "work with per_replica or a communication hook",
                hint="compile it without run_eagerly; or drop the option",
            )
        size = arguments.get("batch_size")
        if is_array_data(original(arguments["x"])):
            size = size or 32
        own_batches.begin(choice, model, backend, size)
        if choice == "batch":
            return stack_arguments(arguments, backend.most_replicas)
        return []

    @contextlib.contextmanager
    def _observing(self, observed: ObservedFit) -> Iterator[None]:
        before, self._observed = self._observed, observed
        try:
            with contextlib.closing(observed):
                try:
                    yield
                except BaseException:
                    observed.interrupted()
                    raise
        finally:
            self._observed = before

    def _observers(self, observed: ObservedFit) -> Sequence[Observer]:
        """Return the observers of a call, innermost first."""
        found = list(self._stock_run(observed.position.model))
        if self.options.timeline:
            found.append(TimelineObserver(self.options.timeline, observed.position))
        return found if self._more is None else [*found, *self._more(observed)]

    def _stock_run(self, model: keras.Model) -> Sequence[Observer]:
        backend = self._backend
        asked = self.options.shard_optimizer or self.options.shard_weights
        in_parts = asked and backend.size > 1
        if not self._beside or not can_run_beside(model, backend, in_parts):
            return ()
        return [StockRun(model, backend, self._beside)]

    def traced(self, function: BatchFunction, program: Program) -> None:
        """Refuse a model, or batches, that the options cannot be used with."""
        if function.name == "train_step":  # a model that predicts may not be compiled
            features = self.options.features | features_of(function.model)
            compatibility.check(features, self._backend)

    def read(self, function: BatchFunction, data: Any, spec: Any) -> None:
        """Tell the call; see ``StepObserver``."""
        if self._observed is not None:
            self._observed.read(function, data, spec)

    def is_past(self, model: keras.Model, method: str) -> bool:
        """Ask the call; see ``StepObserver``."""
        return self._observed is not None and self._observed.is_past(model, method)

    def before_step(
        self, function: BatchFunction, program: Program, tensors: Sequence[tf.Tensor]
    ) -> None:
        """Tell the observers of the call."""
        if self._observed is not None:
            self._observed.before_step(function, program, tensors)

    def after_step(self, model: keras.Model, method: str, step: Step) -> None:
        """Tell the observers of the call."""
        if self._observed is not None:
            self._observed.after_step(model, method, step)

    def of_steps(self, **more: Any) -> StepSettings:
        """Return the settings of all steps of the script."""
        return StepSettings(self._backend, self.options, reports=self.reports, **more)
