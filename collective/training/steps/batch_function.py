"""The function that Keras' loops call with each batch: train, test or predict.

Keras' ``fit``, ``evaluate``, ``predict``, ``train_on_batch`` and their like stay as they
are: data adapters, epochs, the order of hooks, logs, history. Each of them calls a function
that ``make_train_function`` and its sisters have made. This one shares the rows of the
batch out over the replicas, and returns what Keras' own would return.

The batch is read before the step, outside of the graph. So its shapes choose the program,
and a step that the death of a rank interrupts is repeated with the same batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from collective import recorder
from collective.log import log
from collective.training import keras_compat
from collective.training.compression import savings
from collective.training.compression.hook_state import HookState
from collective.training.keras_compat.tensorflow_names import determinism
from collective.training.model.record import record_of
from collective.training.model.variables import dtype_of_sums
from collective.training.process import interrupts
from collective.training.sharding.held import backend_of_rows
from collective.training.steps import leaves, own_batches
from collective.training.steps.leaves import Leaves
from collective.training.steps.own_rows_program import OwnRowsProgram
from collective.training.steps.partitioned_program import PartitionedProgram
from collective.training.steps.planned_batches import PlannedBatches
from collective.training.steps.program import KerasStep, Kind, Program
from collective.training.steps.settings import StepSettings
from collective.training.virtual import checks as virtual_checks

# Takes a function, a program of it, a batch, and the number of the step. It may make the
# step several times, and asks the batch for its tensors each time: another job may then
# have other rows for this rank.
RunStep = Callable[["BatchFunction", Program, Leaves, int], Any]
_running = 0


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Note that updates and gradients in a step of Keras are not a loop's of a script."""
    global _running
    _running += 1
    try:
        yield
    finally:
        _running -= 1


def is_running() -> bool:
    """Return whether a step of Keras runs, or is traced, that is shared out."""
    return _running > 0


class StepObserver:
    """What may happen around each step; every method runs on every rank."""

    def before_trace(self, function: BatchFunction, kind: Kind) -> None:
        """Act before a step is traced for a kind of batches."""

    def traced(self, function: BatchFunction, program: Program) -> None:
        """Take a program that was traced, before it runs."""

    def before_step(
        self, function: BatchFunction, program: Program, tensors: Sequence[tf.Tensor]
    ) -> None:
        """Look at a batch before its step."""

    def before_whole_step(self, model: keras.Model, method: str, data: Any) -> None:
        """Look at a batch before its step, which runs eagerly, whole on every rank.

        Args:
            method: ``train_step``, ``test_step`` or ``predict_step``.
        """

    def after_step(self, model: keras.Model, method: str, step: Step) -> None:
        """Look at a step that every rank has finished.

        Args:
            method: ``train_step``, ``test_step`` or ``predict_step``.
        """

    def before_overrun(self, program: Program) -> None:
        """Act before the writes of a step that has no batch."""

    def read(self, function: BatchFunction, data: Any, spec: Any) -> None:
        """Take a batch that was read; its step may be one that was made before.

        Args:
            spec: The specification of all batches, if the data have one.
        """

    def is_past(self, model: keras.Model, method: str) -> bool:
        """Return whether the batch that was read belongs to a step made before.

        A training that is resumed reads its data from the start.

        Args:
            method: ``train_step``, ``test_step`` or ``predict_step``.
        """
        return False


class Step(NamedTuple):
    """A step that has ended. Times are seconds of ``time.perf_counter``.

    Attributes:
        number: The number of the step, from 0, as the function counts.
        begin: When the function began to wait for the batch.
        ready: When it had the batch.
        done: When the step had returned.
        data: The batch, as the step of Keras gets it; or a ``Batch`` with the rows of
            this process.
        outputs: What the step of Keras returned.
        report: See ``collective.training.steps.report``. None if nobody has asked for it.
    """

    number: int
    begin: float
    ready: float
    done: float
    data: Any
    outputs: Any
    report: Any = None


class BatchFunction:
    """A train or test function of a model: takes an iterator, returns logs.

    Args:
        step: ``model.train_step`` or ``model.test_step``.
        name: The name of the method, for messages.
        settings: The backend and the options of the training.
        run_step: Runs a program on a batch; by default, calls it.
    """

    def __init__(
        self,
        model: keras.Model,
        step: KerasStep,
        name: str,
        settings: StepSettings,
        run_step: RunStep | None = None,
    ):
        self._run_step = run_step
        #: Reads the batches, of which Keras' iterator has stand-ins; None if it has them.
        self.reads: PlannedBatches | None = None
        self.model, self._step, self.name = model, step, name
        self.settings = settings
        self._observers: Sequence[StepObserver] = ()
        self.programs: list[Program] = []
        self._by_kind: dict[Any, Program] = {}
        self._last: Program | None = None
        self._number = 0
        #: What a communication hook keeps between steps; made with the first program.
        self.hook: HookState | None = None

    def __call__(self, iterator: Iterator[Any]) -> Any:
        """Run ``steps_per_execution`` steps.

        Args:
            iterator: Yields batches, which are the same on every rank.

        Returns:
            What the last step returns.

        Raises:
            StopIteration: The iterator has no batch left.
        """
        spec = getattr(iterator, "element_spec", None)
        outputs = None
        for done in range(self.model.steps_per_execution):
            interrupts.check()
            begin = time.perf_counter()
            recorder.waits_for_input(self._number, begin)
            try:
                data = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if done:
                    break
                self._overrun(spec)
                raise StopIteration from None
            if self.reads is not None:
                self.reads.count(iterator)
            for observer in self._observers:
                observer.read(self, data, spec)
            if any([o.is_past(self.model, self.name) for o in self._observers]):
                outputs = self.model.get_metrics_result()
            else:
                outputs = self._run_next(data, spec, begin)
        return outputs

    def serve(
        self, observers: Sequence[StepObserver], reads: PlannedBatches | None = None
    ) -> None:
        """Begin to serve a call.

        Args:
            observers: Called around each step, in this order.
            reads: Reads the batches, of which Keras' iterator has stand-ins.
        """
        self._observers, self.reads, self._number = observers, reads, 0

    def _run_next(self, data: Any, spec: Any, begin: float | None = None) -> Any:
        """Run the step on the batch that an iterator has given."""
        if self.reads is None:
            return self.run(data, spec, begin)
        return self.run(self.reads.read(), self.reads.spec, begin)

    def run(self, data: Any, spec: Any = None, begin: float | None = None) -> Any:
        """Run the step on one batch.

        Args:
            data: The batch, which is the same on every rank; or a ``Batch`` with the rows
                of this process.
            spec: The specification of all batches, if the data have one.
            begin: When the wait for the batch began; by default it took no time.
        """
        with running():
            ready = time.perf_counter()
            return self._run(data, spec, ready if begin is None else begin, ready)

    def _run(self, data: Any, spec: Any, begin: float, ready: float) -> Any:
        again = None if self.reads is None else self.reads.read
        batch = Leaves.of(data, again)
        program = self._last = self._program_of(batch, spec)
        number, self._number = self._number, self._number + 1
        for observer in self._observers:
            observer.before_step(self, program, batch.tensors)
        recorder.in_step(number, time.perf_counter())
        try:
            if self._run_step is None:
                outputs = program(batch.tensors, number)
            else:
                outputs = self._run_step(self, program, batch, number)
        finally:
            recorder.in_no_step()
        done = time.perf_counter()
        read = batch.data if batch.rows is None else data
        step = Step(number, begin, ready, done, read, outputs, program.report)
        for observer in self._observers:
            observer.after_step(self.model, self.name, step)
        if not program.is_explained:
            program.explain(f"{self.name} of {self.model.name!r}")
        return outputs

    def trace(self, data: Any, spec: Any = None) -> None:
        """Trace the step for a batch, and run nothing; see ``run``."""
        with running():
            self._program_of(Leaves.of(data), spec).trace()

    def _overrun(self, spec: Any) -> None:
        """Do what a step of Keras does before it finds that there is no batch."""
        is_counted = spec is not None and self.model.steps_per_execution == 1
        if is_counted and self._last is not None:
            for observer in self._observers:
                observer.before_overrun(self._last)
            self._last.overrun()

    def _program_of(self, batch: Leaves, spec: Any) -> Program:
        kind = batch.kind, determinism.is_enabled()
        program = self._by_kind.get(kind)
        if program is None:
            program = self._by_kind[kind] = self._program(batch, spec)
        return program

    def _program(self, batch: Leaves, spec: Any) -> Program:
        """Return a program for a batch: an earlier one that fits it, or a new one."""
        seen = leaves.spec_of(batch.data)
        general = seen if spec is None else leaves.without_optionals(spec)
        is_deterministic = determinism.is_enabled()
        for program in self.programs:
            serves = program.is_deterministic == is_deterministic
            serves = serves and program.kind.is_read_cut == (batch.rows is not None)
            serves = serves and program.kind.fits(batch)
            if serves and _is_compatible(program, batch.tensors):
                return program
        can = leaves.dense(general)
        if batch.rows is None:
            cut = tuple(leaves.cut_by_rows(batch.tensors, can))
        else:
            cut = tuple(can)
        rows = next(itertools.compress(batch.lengths, cut), None)
        kind = Kind(general, cut, None, batch.rows is not None)
        program = self._traced(kind, rows)
        if not self.programs:
            self._check_rows(rows)
        for observer in self._observers:
            observer.traced(self, program)
        self.programs.append(program)
        return program

    def _check_rows(self, rows: int | None) -> None:
        """Check that each replica gets rows of the first batch, as far as is known."""
        settings = self.settings
        if settings.virtual is not None:
            virtual_checks.check_rows(settings.virtual, rows)
        replicas = backend_of_rows(self.model, settings.backend).most_replicas
        if rows is None or rows >= replicas or self.name != "train_step":
            return
        if settings.backend.rank == 0 and record_of(self.model).is_new("idle"):
            log.warning(
                "a batch has %d row%s, and there are %d replicas: %d of them idle in "
                "every step. HINT: batches of %d rows or more, or fewer ranks",
                rows,
                "s" * (rows > 1),
                replicas,
                replicas - rows,
                replicas,
            )

    def _traced(self, kind: Kind, rows: int | None) -> Program:
        """Trace the step for batches of any length, or else for one.

        Keras traces with the length of a batch if the data have only one. A step that
        needs it, such as a stateful layer, fails with another.
        """
        fixed = dataclasses.replace(kind, rows=rows)
        static = keras_compat.model.fixed_rows(self.model)
        if static is not None and static == rows:
            return self._made(fixed, rows)
        try:
            return self._made(kind, rows)
        except Exception:
            if rows is None:
                raise
            try:
                return self._made(fixed, rows)
            except Exception as error:
                raise error from None

    def _made(self, kind: Kind, rows: int | None) -> Program:
        for observer in self._observers:
            observer.before_trace(self, kind)
        trains = self.name == "train_step"
        optimizer = getattr(self.model, "optimizer", None)
        expects_overflow = keras_compat.optimizers.expects_overflow(optimizer)
        checks = trains and not expects_overflow
        reports = trains and self.settings.reports
        if self._has_own_rows:
            return OwnRowsProgram(
                self._step,
                self.model,
                kind,
                self.settings,
                trains=trains,
                checks=checks,
                reports=reports,
            )
        return PartitionedProgram(
            self._step,
            self.model,
            kind,
            self.settings,
            checks=checks,
            reports=reports,
            expected=rows,
            make_hook=self._hook_state if trains else lambda: None,
        )

    @property
    def _has_own_rows(self) -> bool:
        """Return whether each replica has a batch of its own."""
        if self.name == "train_step":
            return bool(self.settings.options.per_replica) or self._is_asynchronous
        if self.name == "test_step":
            return bool(own_batches.trained_with(self.model)) or self._is_asynchronous
        return False

    @property
    def _is_asynchronous(self) -> bool:
        return not self.settings.backend.synchronous

    def _hook_state(self) -> HookState | None:
        """Return what a communication hook keeps between the steps of this function."""
        if self.hook is None:
            self.hook = new_hook_state(self.model, self.settings)
        return self.hook


def new_hook_state(model: keras.Model, settings: StepSettings) -> HookState | None:
    """Return what a communication hook keeps between steps, before the first one.

    Args:
        model: It has its variables.

    Returns:
        None without a hook.
    """
    hook, backend, trained = (
        settings.hook,
        settings.backend,
        model.trainable_variables,
    )
    if hook is None:
        return None
    if backend.rank == 0:
        log.warning(savings.warning(hook, trained))
    return HookState(hook, trained, dtype_of_sums(trained), backend)


class PredictFunction(BatchFunction):
    """The predict function of a model: takes a list of batches, returns their outputs."""

    def __call__(self, iterator: Sequence[Any]) -> Any:  # type: ignore[override]
        """Return the outputs for some batches, one after the other."""
        outputs = []
        for data in iterator:
            interrupts.check()
            if self.reads is not None:
                self.reads.count(self.reads)
            outputs.append(self._run_next(data, None))
        if len(outputs) == 1:
            return outputs[0]
        return keras_compat.data.concatenated(outputs)


def _is_compatible(program: Program, tensors: Sequence[tf.Tensor]) -> bool:
    specs = program.kind.specs()
    return len(specs) == len(tensors) and all(
        spec.dtype == tensor.dtype and spec.shape.is_compatible_with(tensor.shape)
        for spec, tensor in zip(specs, tensors, strict=True)
    )
