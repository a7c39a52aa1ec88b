"""``collective.fit`` by Keras' own, in which each batch is shared out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from typing import Any

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.elastic import generations
from collective.errors import NextGeneration, UsageError
from collective.fit_options import FitOptions
from collective.log import log
from collective.training import keras_compat
from collective.training.calls.fit_data import open_data, same_order
from collective.training.calls.keras_call import (
    as_read,
    has_others,
    on_devices,
    reading_alike,
    with_announcements,
)
from collective.training.calls.planned_data import PlannedCall
from collective.training.calls.scoped_models import as_one_process
from collective.training.calls.set_options import SetOptions
from collective.training.input.data import DataArguments
from collective.training.input.pipeline import Batch, Input
from collective.training.input.ready_batches import ReadyBatches, spec_of
from collective.training.loop.callbacks import (
    CallbackMethods,
    Callbacks,
    expects_nan,
)
from collective.training.loop.observed_fit import ObservedFit
from collective.training.loop.observer import Observer
from collective.training.loop.position import Position
from collective.training.loop.progress import ProgressBar
from collective.training.loop.rank_zero_callbacks import RankZeroCallbacks
from collective.training.loop.result import Result
from collective.training.model.record import note_prepared, record_of
from collective.training.model.variables import (
    captured_variables,
    register_outside_variables,
)
from collective.training.observers.checkpoint.identity import describe
from collective.training.observers.checkpoint.schedule import Checkpoint
from collective.training.observers.desync import DesyncAlarm
from collective.training.observers.elastic.fit_membership import (
    CallbackMemory,
    FitMembership,
    check_trainings,
)
from collective.training.observers.elastic.fit_units import units_of
from collective.training.observers.layout_report import LayoutReport
from collective.training.observers.ledger.observer import LedgerObserver
from collective.training.observers.ledger.receipts import Receipts
from collective.training.observers.model_axis import ModelAxis
from collective.training.observers.timing import TimingObserver
from collective.training.partition.undo import whole_or_absent
from collective.training.preparation import parts
from collective.training.preparation.compiled_flags import as_compiled
from collective.training.preparation.prepare import prepare
from collective.training.preparation.refusals import check_labels, check_model
from collective.training.process import host_random, interrupts
from collective.training.process.failure import guarded
from collective.training.sharding.held import backend_of_rows, is_held
from collective.training.steps import leaves
from collective.training.steps.batch_function import (
    BatchFunction,
    StepObserver,
)
from collective.training.steps.distributed import distributed_call
from collective.training.steps.leaves import Leaves
from collective.training.steps.program import Program
from collective.training.steps.whole import as_rank_zero, is_eager
from collective.training.verification import compare_models
from collective.training.verification.descriptions import describe as described
from collective.training.verification.descriptions import describe_model, short
from collective.training.verification.ranks import compare, describe_data
from collective.training.verification.same_calls import SameCalls, mark_of
from collective.training.verification.settings import describe_settings

# Arguments of ``fit`` that the ranks do not compare: data are, batch by batch.
_NOT_COMPARED = ("x", "y", "sample_weight", "validation_data", "verbose")
_NOT_OF_KERAS = ("data", "global_batch_size", "seed")


def fit(
    model: keras.Model,
    data: DataArguments,
    arguments: dict[str, Any],
    callbacks: Callbacks,
    backend: Backend,
    options: FitOptions,
    checkpoint: Checkpoint | None = None,
    ledger: str | os.PathLike[str] | None = None,
) -> Result:
    """Train a model; see ``collective.fit``. Every rank calls it.

    Args:
        arguments: More of ``keras.Model.fit``, but for the callbacks.
    """
    with guarded(backend):
        if options.accumulate < 1:
            raise UsageError("accumulate must be at least 1", hint="--accumulate 1")
        check_model(model, backend)
        _check_eager(model, backend, ledger)
        check_trainings(backend)
        with (
            as_one_process(model),
            as_compiled(model, backend),
            units_of(backend).serving(trains=True),
        ):
            training = _Training(
                model, data, arguments, callbacks, backend, options, checkpoint, ledger
            )
            try:
                return training.run()
            except NextGeneration:
                generations.report_handed_over()
                raise


def _check_eager(
    model: keras.Model, backend: Backend, ledger: str | os.PathLike[str] | None
) -> None:
    """Refuse what needs a sum in each step, which a model that runs eagerly has not.

    Raises:
        UsageError: On every rank.
    """
    if is_eager(model) and (backend.elastic or ledger is not None):
        what = "an elastic job (--min-np)" if backend.elastic else "a ledger"
        raise UsageError(
            f"model {model.name!r} runs eagerly, so its steps have no sum, which {what} "
            "needs",
            hint="compile it without run_eagerly=True",
        )


@cache
def _say_not_compiled(say: Callable[[str], None]) -> None:
    """Say once in a process, which may train many models, that XLA compiles no step."""
    say("jit_compile: XLA does not compile the step; it runs as TensorFlow's graph")


class _SameEpochs(Observer):
    """Compares the batches of an epoch before callbacks and checkpoints keep its weights."""

    def __init__(self, same: SameCalls):
        self._same = same

    def end_epoch(self, epoch: int, logs: dict[str, float]) -> None:
        """Compare what was read; see ``Observer``."""
        self._same.compare_rows()


class _Training(StepObserver):
    """One call of ``collective.fit``."""

    def __init__(
        self,
        model: keras.Model,
        data: DataArguments,
        arguments: dict[str, Any],
        callbacks: Callbacks,
        backend: Backend,
        options: FitOptions,
        checkpoint: Checkpoint | None,
        ledger: str | os.PathLike[str] | None,
    ):
        self._model, self._given, self._backend = model, data, backend
        self._arguments = arguments | {
            field.name: getattr(data, field.name)
            for field in fields(data)
            if field.name not in _NOT_OF_KERAS
        }
        self._callbacks, self._checkpoint = callbacks, checkpoint
        self._ledger = ledger
        self._verbose = arguments["verbose"]
        asked = asdict(options) | {"hook": options.hook}
        self._units = units = units_of(backend)
        self._set = SetOptions(
            backend, asked, units.run, self._observers, gathers=checkpoint is not None
        )
        self._receipts: Receipts | None = None
        if ledger is not None:
            self._receipts = Receipts(backend, self._set.virtual)
        attached = None if self._receipts is None else self._receipts.attached
        settings = self._set.of_steps(attached=attached)
        self._settings = with_announcements(settings, units)
        self._same = SameCalls(backend, units.run)
        self._parts: dict[str, str] = {}  # what the ranks have in common
        self._member: FitMembership | None = None  # of an elastic job
        self._result: Result | None = None
        self._begin_order: Callable[[], None] = lambda: None
        # The data that a checkpoint, or a rank that joins, is told of.
        self._described: Input | ReadyBatches | None = None
        self._has_begun = self._resumes = False
        self._position: Position
        self._methods: CallbackMethods | None = None

    def run(self) -> Result:
        """Call Keras' ``fit``, and return the result."""
        model, backend, options = self._model, self._backend, self._set.options
        arguments = self._arguments | {
            name: as_read(self._arguments[name])
            for name in ("x", "y", "validation_data")
        }
        self._compare(arguments)
        expected = self._units.run(lambda: expects_nan(self._callbacks, backend))
        observers: list[StepObserver] = [self._units, self, self._set]
        with contextlib.ExitStack() as inside:
            cut = parts.in_parts(
                model, backend, options.shard_optimizer, options.shard_weights
            )
            placing = inside.enter_context(cut)
            if placing is not None:
                observers += [ModelAxis(placing, True), LayoutReport(placing)]
            rows = placing.rows(model) if placing else backend_of_rows(model, backend)
            planned = PlannedCall(rows, is_eager(model), self._settings.virtual)
            inside.enter_context(contextlib.closing(planned))
            self._open(planned, arguments)
            if has_others(backend):
                observers.insert(2, self._same)
                inside.enter_context(self._same.call())
            if self._receipts is not None:
                observers.insert(1, self._receipts)
                planned.reads["train_step"].after_read.append(self._receipts.note)
            inside.enter_context(
                distributed_call(
                    model,
                    self._settings,
                    observers,
                    self._units.run_step,
                    expected,
                    planned.reads,
                    lambda: as_rank_zero(backend, self._units.run),
                )
            )
            order = same_order(arguments, options.seed, backend)
            self._begin_order = inside.enter_context(order)
            more = inside.enter_context(self._set.fitting(model, arguments))
            if has_others(backend):
                epochs = max(arguments["epochs"] - arguments["initial_epoch"], 0)
                inside.enter_context(reading_alike(epochs))
            inside.enter_context(interrupts.between_steps())
            if planned.may_draw(arguments):
                host_random.read_by(self)
                inside.callback(host_random.closed, self)
            self._warn()
            keras_fit = getattr(keras.Model.fit, "stock", keras.Model.fit)
            arguments |= {"callbacks": more, "verbose": 0}  # the bar is an observer
            with self._without_rows(), on_devices(model, backend):
                keras_fit(model, **arguments)
        assert self._result is not None
        model.history = self._result
        if backend.elastic:
            self._result.repeat_afterwards(self._units.afterwards)
        checkpoint = self._checkpoint
        if checkpoint is not None and checkpoint.raises:
            checkpoint.raise_if_failed()
        return self._result

    def _open(self, planned: PlannedCall, arguments: dict[str, Any]) -> None:
        """Open the data, and build the model if they say its shapes."""
        self._described = found = open_data(
            planned,
            self._given,
            arguments,
            self._backend,
            units=self._units,
            with_rows_read=self._ledger is not None,
            is_kept=self._checkpoint is not None,
        )
        if found is None:
            return
        if self._backend.elastic and isinstance(found, Input):
            # Before batches are read ahead.
            self._parts |= describe_data("training", found)
        self._prepare(found.spec)
        if isinstance(found, Input):
            check_labels(self._model, found.source)

    def _warn(self) -> None:
        """Say that XLA compiles no step, if the user may expect it."""
        asked = self._set.options.jit_compile
        expected = self._model.jit_compile if asked is None else asked
        if self._backend.rank == 0 and expected:
            _say_not_compiled(log.warning if asked else log.info)

    @contextlib.contextmanager
    def _without_rows(self) -> Iterator[None]:
        """Name the reason if Keras has no logs, since no step was made."""
        try:
            yield
        except ValueError as error:
            if self._has_begun or "Cannot get result()" not in str(error):
                raise
            raise UsageError(
                "the data set has no rows", hint="pass data with at least one row"
            ) from error

    def _compare(self, arguments: Mapping[str, Any]) -> None:
        if not has_others(self._backend):
            return
        options = self._set.options
        shown = {k: v for k, v in arguments.items() if k not in _NOT_COMPARED}
        for name in ("accumulate", "steps", "hook", "check_every"):
            shown[name] = getattr(options, name)
        parts = describe_settings()
        parts |= {f"{name}=": short(described(value)) for name, value in shown.items()}
        self._parts = parts
        self._units.run(lambda: compare(self._backend, parts))

    def _observers(self, observed: ObservedFit) -> list[Observer]:
        """Return the observers of the training, and find the state to start from."""
        backend, options = self._backend, self._set.options
        position = observed.position
        self._position, position.unit = position, self._units.run
        params = dict(observed.callback.params) | {"verbose": self._verbose}
        self._result = Result(
            position, params, options.per_replica, self._settings.hook
        )
        on_rank_zero = RankZeroCallbacks(
            self._callbacks, position, params, self._units.run
        )
        observed.tested = self._methods = on_rank_zero.methods
        self._methods.is_shared_later = True
        found: list[Observer] = [TimingObserver(self._result.timing, position)]
        before_write = None
        if self._receipts is not None:
            assert self._ledger is not None and isinstance(self._described, Input)
            plan = self._described.plan
            noting = LedgerObserver(self._ledger, position, plan, self._receipts)
            found.append(noting)
            before_write = noting.sync
        if has_others(backend):
            found.append(_SameEpochs(self._same))
        found.append(on_rank_zero)
        if backend.elastic:
            found.append(CallbackMemory(on_rank_zero.methods))
        if not on_rank_zero.methods.has_bar and str(self._verbose) != "0":
            # After the callbacks, so that it shows the logs that they add.
            found.append(ProgressBar(position, params["epochs"], self._verbose))
        if self._checkpoint is not None:
            self._attach(self._checkpoint, position, before_write)
            found.append(self._checkpoint)
        if backend.elastic:
            found.append(self._membership(observed))
        elif self._checkpoint is not None:
            self._checkpoint.find_start()
            position.agree_on_start()
        self._resumes = position.start is not None
        if DesyncAlarm.is_needed(backend, options.check_every):
            # The ranks have the same model only when the first step has been traced.
            found.append(DesyncAlarm(position, options.check_every, first=1))
        self._begin_order()
        return found

    def before_step(
        self, function: BatchFunction, program: Program, tensors: Sequence[tf.Tensor]
    ) -> None:
        """Note what is known once the first step is traced; ranks then share weights."""
        model, seed = self._model, self._set.options.seed
        if (
            self._has_begun
            or function.name != "train_step"
            or function.model is not model
        ):
            return
        self._has_begun = True
        self._know(function, program)
        assert self._methods is not None
        self._methods.is_shared_later = False
        if has_others(self._backend) and self._methods.used:  # they may assign some
            variables, undone = program.variables, contextlib.nullcontext()

            def given() -> None:
                with whole_or_absent(variables) if self._member else undone:
                    self._backend.broadcast(variables)

            self._units.run(given, variables)
        if seed is not None and not self._resumes:
            keras_compat.seeds.reseed(captured_variables(program.source.graph), seed)

    def before_whole_step(self, model: keras.Model, method: str, data: Any) -> None:
        """Build a model that runs eagerly before its first step; see ``before_step``."""
        if self._has_begun or method != "train_step" or model is not self._model:
            return
        self._has_begun = True
        if self._described is None:
            self._prepare(spec_of(leaves.spec_of(data)))
        assert self._methods is not None
        self._methods.is_shared_later = False
        seed = self._set.options.seed
        if seed is not None and not self._resumes:
            states = map(
                keras_compat.model.tf_variable, keras_compat.seeds.seed_states(model)
            )
            keras_compat.seeds.reseed([*states], seed)

    def _know(self, function: BatchFunction, program: Program) -> None:
        """Note what the state of the model has, once its first step is traced."""
        model = self._model
        note_prepared(model, function.hook)
        is_whole = not any(is_held(variable) for variable in model.variables)
        if is_whole and not program.has_run:  # else they are known
            register_outside_variables(
                model, self._backend, program.source, writes=True
            )

    def _membership(self, observed: ObservedFit) -> FitMembership:
        """Return what lets ranks go and admits others; find the state to start from."""
        data = self._described
        plan = self._plan(data if isinstance(data, Input) else None)
        member = FitMembership(
            self._units, observed, plan, self._checkpoint, self._same.restart
        )
        self._member = member
        if member.joins:
            observed.late = self._join
        elif member.continues_others and self._checkpoint is None:
            observed.late = self._continue
        else:
            member.find_start()
        return member

    def _join(self) -> None:
        assert self._member is not None and self._methods is not None
        self._has_begun = self._resumes = True
        self._methods.is_shared_later = False
        self._member.join()

    def _continue(self) -> None:
        assert self._member is not None
        self._member.find_start()
        self._resumes = self._position.start is not None

    def read(self, function: BatchFunction, data: Any, spec: Any) -> None:
        """Describe the training by its first batch, for ranks that join it."""
        member = self._member
        is_first = function.name == "train_step" and function.model is self._model
        if member is None or member.description or not is_first:
            return
        if function.reads is not None:
            data, spec = function.reads.read(), function.reads.spec
        function.trace(data, spec)
        program = function.programs[0]
        self._know(function, program)
        member.description = self._parts | describe_model(self._model)
        if function.reads is None:
            rows = mark_of(Leaves.of(data).tensors)
            member.description["training rows"] = str(rows)

    def _prepare(self, spec: Batch) -> None:
        """Build the model before the training, and check that it fits the data."""
        prepare(
            self._model,
            self._backend,
            spec,
            hook=self._settings.hook,
            features=self._set.options.features,
        )
        self._units.run(lambda: compare_models(self._backend, self._model))
        self._same.compared = self._model

    def _attach(
        self,
        checkpoint: Checkpoint,
        position: Position,
        before_write: Callable[[], None] | None,
    ) -> None:
        """Have a checkpoint serve the training, and find the state to start from."""
        data, model = self._described, self._model
        assert data is not None
        hook, function = record_of(model).hook, model.train_function
        if hook is not None:
            function.hook = hook
        identity = describe(data, model)
        checkpoint.attach(position, self._plan(data), before_write, identity)

    def _plan(self, data: Input | ReadyBatches | None) -> dict[str, Any]:
        """Return what a kept state must have in common with the training."""
        plan = {} if data is None else asdict(data.plan)
        if self._set.options.virtual_replicas is not None:
            plan["virtual_replicas"] = self._set.options.virtual_replicas
        if self._settings.hook is not None:
            plan["hook"] = repr(self._settings.hook)
        return plan
