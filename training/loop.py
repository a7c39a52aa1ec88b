"""Epochs and steps of a training, and what is kept of each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective import recorder
from collective.backends.base import Backend
from collective.elastic import generations
from collective.errors import CollectiveError, UsageError
from collective.training import keras_compat
from collective.training.callbacks import RankZeroCallbacks, make_alike
from collective.training.checkpoint import random_state
from collective.training.checkpoint.schedule import Checkpoint
from collective.training.checkpoint.state import State, broadcast, values_of
from collective.training.checkpoint.writer import Files, Gathered
from collective.training.checks import check_same_data
from collective.training.elastic.reconfigure import (
    Change,
    Regroup,
    T,
    check_newcomers,
    enough,
    enter,
    go_again,
    going_on,
    newest,
)
from collective.training.elastic.state_handoff import Handover
from collective.training.evaluation import Evaluation
from collective.training.exchange import gather_few
from collective.training.input import source_errors
from collective.training.input.pipeline import Batch, Input
from collective.training.reporting.progress import Progress
from collective.training.reporting.report import Averages
from collective.training.reporting.timeline import Timeline, together
from collective.training.reporting.timing import Timing
from collective.training.step import Step


@dataclass
class Result:
    """What a training gave.

    Attributes:
        model: The trained model, the same on every rank.
        backend: The backend it ran on.
        history: Logs of each epoch by name, as in ``keras.callbacks.History``.
        losses: The loss of every step, over its whole global batch; those made before
            a checkpoint this training goes on from included.
        timing: Seconds of every step made here.
    """

    model: keras.Model
    backend: Backend
    history: dict[str, list[float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    timing: Timing = field(default_factory=Timing)
    _again: Callable[[Change], Any] = field(default=lambda change: None, repr=False)

    def afterwards(self, action: Callable[[], T]) -> T:
        """Does what all ranks do together after the training.

        Where ranks die meanwhile, and the backend can go on without them
        (``Options.min_np``), the others agree on the end of the training once more
        and do it again.
        """

        def attempt(change: Change | None) -> T:
            if change is not None:
                self._again(change)
            return action()

        return going_on(self.backend, attempt)


class Loop:
    """Epochs and steps, and what is kept of each."""

    def __init__(self, backend: Backend, plan: Input, epochs: int, steps: int | None):
        self.backend = backend
        self.plan = plan
        self.last = epochs * plan.steps_per_epoch if steps is None else steps
        self.epochs = -(-self.last // plan.steps_per_epoch)
        tail = plan.rows % plan.global_batch_size or plan.global_batch_size
        self.smallest = min(tail, plan.global_batch_size)
        # What comes next, as in State. The model is always what it then is, and
        # changes with these.
        self.epoch = self.number = 0
        self.start: State | None = None  # to be put in place
        self.final: State | None = None  # of a last epoch that is not whole
        self.averages: Averages | None = None  # of the epoch under way
        self.ended: list[float] = []  # its steps, by the clock of the report
        self.losses = np.zeros(0)  # of the epochs before it
        self.timeline: Timeline | None = None

    def check(self, accumulate: int) -> None:
        """Refuses what cannot be trained; every rank calls it."""
        replicas, size = self.backend.most_replicas, self.plan.global_batch_size
        if size < replicas:
            raise UsageError(
                f"a global batch of {size} rows cannot be shared by {replicas} replicas",
                hint=f"--global-batch-size {replicas} or more, or fewer replicas",
            )
        if accumulate < 1:
            raise UsageError("accumulate must be at least 1", hint="--accumulate 1")
        check_same_data(self.backend, self.plan.source)

    def begin(
        self, model: keras.Model, checkpoint: Checkpoint | None, ledger: Any
    ) -> None:
        """Finds the state to start from, on rank 0."""
        if self.backend.options.min_np is None:
            self.batches = lambda *place: iter(self.plan.dataset(*place))
        else:
            self.batches = self.plan.moving()
        self.result = Result(model, self.backend)
        self.handover = Handover(self.backend)
        self.files = Files(self.backend, self.plan.plan, checkpoint, ledger)
        kept = self.handover.find(model, self.plan.plan)
        self.start = self.files.begin(model, kept, again=generations.number() > 0)

    def run(
        self,
        step: Step,
        hooks: RankZeroCallbacks,
        validate: Evaluation | None,
        verbose: str | int,
        timeline: str | None,
    ) -> Result:
        """Trains to the end; where ranks come and go, it goes on if it may."""

        def attempt(change: Change | None) -> Result:
            self._agree(step, hooks, timeline, change)
            bar = Progress(self.epochs, verbose if self.backend.rank == 0 else 0)
            try:
                return self._train(step, hooks, validate, bar)
            finally:
                recorder.in_no_step()

        with contextlib.ExitStack() as stack:
            if self.backend.options.min_np is not None:
                self.result._again = attempt
            change = enter(self.backend) if self.backend.joins else None
            if step.notices.told:
                stack.enter_context(step.notices.preemption)
            stack.callback(self._close)
            return going_on(self.backend, attempt, change)

    def _close(self) -> None:
        if self.timeline is not None:
            self.timeline.close()
        self.files.close()

    def _agree(
        self,
        step: Step,
        hooks: RankZeroCallbacks,
        timeline: str | None,
        change: Change | None,
    ) -> None:
        """All ranks come to the same state, at the start and after a change."""
        backend, result = self.backend, self.result
        hooks.agree()
        root = None
        if change is not None and change.came:
            check_newcomers(backend, self.plan.source)
        if change is not None:
            mine = self.start or self.final or self._state()
            self._keep()
            self.start, root = newest(mine, backend)
        elif backend.size > 1:
            self._begin_alike()
        self.final = self.averages = None
        if change is None:
            self.handover.taken(None if self.start is None else self.start.step)
        if self.start is not None:
            start = self.start
            self.epoch, self.number, self.losses = start.epoch, start.step, start.losses
            result.history = {name: list(of) for name, of in start.history.items()}
            result.losses = start.losses.tolist()
        if self.number > self.last:
            raise UsageError(
                f"the training is at step {self.number} already, and {self.last} steps "
                "were asked for",
                hint="more --steps or --epochs, or another --checkpoint-dir",
            )
        if timeline:
            try:
                self.timeline = together(self.timeline, timeline, backend, self.number)
            except UsageError as error:
                if change is None or change.former[backend.rank] >= 0:
                    raise
                go_again(backend, error)
        self.files.lead(result.model, self.number, step.layout, root)
        if change is None:
            return
        if self.timeline is not None:
            self.timeline.event(f"goes on as rank {backend.rank} of {backend.size}")
        told, over = step.notices.preemption, self.epoch >= self.epochs
        if not enough(backend, change, told, self.number, over, self._renew):
            self._give_up(backend.size, change.size)

    def _part(self, step: Step) -> None:
        """Between two steps: some leave, or are taken in, and all others meet anew."""
        backend, news = self.backend, step.notices.news
        if news.renews:
            self._renew()
        if not (news.leaving or news.waiting):
            return
        stay = backend.size - len(news.leaving)
        grows = backend.options.max_np is not None
        if stay < (backend.options.min_np or 1) and not (stay and grows):
            self._give_up(stay, backend.size)
        if backend.rank not in news.leaving:
            raise Regroup(news.leaving)
        self.files.close()
        if self.timeline is not None:
            self.timeline.event("leaves the job")
        backend.leave()
        raise SystemExit(0)

    def _renew(self) -> None:
        """Ends for the job's next round, with the state kept; every rank calls it."""
        if not self.handover.possible:
            return
        backend, state = self.backend, self.start or self.final or self._state()
        self.files.wait()  # Keras writes one file of a model at a time
        kept = self.handover.keep(state, self.result.model, self.plan.plan)
        if not gather_few(backend, [kept]).any():
            self.handover.possible = False  # goes on as it is
            return
        self.files.close()
        raise SystemExit(generations.EXIT_CODE)

    def _give_up(self, left: int, size: int) -> None:
        """Ends the job, with a checkpoint where there may be one."""
        backend, least = self.backend, self.backend.options.min_np or 1
        if backend.rank:
            backend.barrier()  # rank 0 ends the job
        self.files.save_last(lambda: self.start or self._state())
        if self.files.folder is not None:
            hint = f"--resume goes on from {self.files.folder}, on fewer ranks, too"
        else:
            hint = "--checkpoint-dir, to go on from there"
            hint = f"a smaller --min-np; and {hint}" if left else hint
        raise CollectiveError(
            f"step {self.number}: of {size} ranks {left} "
            f"{'is' if left == 1 else 'are'} left, and --min-np is {least}",
            hint=hint,
            everywhere=False,
        )

    def _train(
        self,
        step: Step,
        hooks: RankZeroCallbacks,
        validate: Evaluation | None,
        bar: Progress,
    ) -> Result:
        """From the state in place, or to be put there, to the end."""
        model, per_epoch, timeline = (
            step.model,
            self.plan.steps_per_epoch,
            self.timeline,
        )
        backend, result, start = self.backend, self.result, self.start
        every_batch = "on_train_batch_end" in hooks.hooks
        batches = self.batches(
            self.number, self.last, backend.local_replicas, backend.replicas
        )
        if start is not None:
            start.put(model)  # here for the hooks to see it,
        hooks.call("on_train_begin", {})
        if start is not None:
            start.put(model)  # and here because they must not change it
        while self.epoch < self.epochs and not model.stop_training:
            epoch = self.epoch
            hooks.call("on_epoch_begin", epoch, {})
            sums = None
            if start is not None and start.within_epoch:
                start.put(model)
                sums = start.sums
            self.averages = averages = Averages(step.layout, sums)
            start = self.start = None
            first, last = epoch * per_epoch, min((epoch + 1) * per_epoch, self.last)
            bar.begin(epoch, last - first)
            while self.number < last and not model.stop_training:
                number = self.number
                hooks.call("on_train_batch_begin", number - first, {})
                begin = time.perf_counter()
                recorder.waits_for_input(number, begin)
                batch = _next(batches)
                ready = time.perf_counter()
                recorder.in_step(number, ready)
                report = step(batch, number)
                recorder.in_no_step()
                averages.add(report)
                self.number += 1
                done = time.perf_counter()
                self.ended.append(time.time())
                if timeline is not None:
                    timeline.step(number, begin, ready, done, report)
                result.timing.input.append(ready - begin)
                result.timing.step.append(done - ready)
                self.files.note(number, report, step.layout)
                if every_batch:
                    now = averages.logs() if backend.rank == 0 else {}
                    hooks.call("on_train_batch_end", number - first, now)
                bar.update(self.number - first, averages.logs)
                if self.number < last and not model.stop_training:
                    self.files.save(model, self.number, False, self._state)
                if self.number < self.last and not model.stop_training:
                    self._part(step)
            if self.number == last < first + per_epoch and not model.stop_training:
                self.final = self._state()  # more steps can go on from here
            logs = averages.logs()
            self._keep()
            if validate is not None:
                hooks.call("on_test_begin", {})
                with (
                    timeline.span("validation")
                    if timeline
                    else contextlib.nullcontext()
                ):
                    exact = {f"val_{k}": v for k, v in validate().items()}
                logs |= exact
                hooks.call("on_test_end", exact)
            bar.end(self.number - first, logs)
            hooks.call("on_epoch_end", epoch, dict(logs))
            for name, value in logs.items():
                result.history.setdefault(name, []).append(value)
            self.averages, self.losses = None, np.array(result.losses)
            self.epoch += 1
            if self.epoch < self.epochs and not model.stop_training:
                self.files.save(model, self.number, True, self._state)
        final = self.final = self.final or self._state()
        self.files.save_last(lambda: final)
        if step.parted is not None:
            step.parted.finish()
        else:
            with backend.scope():
                keras_compat.finish(model)
        result.timing.exchange_waits(backend)
        hooks.call("on_train_end", {})
        self.files.end_ledger()
        if timeline is not None:
            timeline.end()
        return result

    def _state(
        self,
        buffers: Sequence[np.ndarray] | None = None,
        gathered: Gathered | None = None,
    ) -> State:
        """The state of the training now.

        Where it was not gathered already, every rank calls it.
        """
        if gathered is None:
            gathered = self.files.gathered(self.result.model)
        losses, sums, averages = self.losses, np.zeros(0), self.averages
        if averages is not None:
            sums = averages.sums().copy()
            more = [values[averages.layout.LOSS] for values in averages.reports]
            losses = np.concatenate([losses, more])
        return State(
            self.epoch,
            self.number,
            values_of(self.result.model, buffers, gathered),
            sums,
            losses,
            {name: list(values) for name, values in self.result.history.items()},
            random_state.take(),
            bool(self.result.model.stop_training),
        )

    def _begin_alike(self) -> None:
        """Every rank gets the newest state to start from, or rank 0's new model."""
        backend, model = self.backend, self.result.model
        # Nothing of the global generators: a new training leaves them alone.
        fresh = State(0, 0, values_of(model))
        if gather_few(backend, [self.start is not None]).any():
            self.start, _ = newest(self.start or fresh, backend)
        elif backend.options.min_np is not None:  # all of it or nothing, if one dies
            broadcast(fresh, backend).put(model)
        else:  # one variable at a time, so that not all are there twice
            make_alike(model, backend)

    def _keep(self) -> None:
        """Keeps the losses, times and rows of the epoch's steps that were made here."""
        if self.averages is None:
            return
        layout, timing = self.averages.layout, self.result.timing
        for values, end in zip(self.averages.reports, self.ended, strict=True):
            start, stop = values[layout.REDUCE_START], values[layout.REDUCE_STOP]
            self.result.losses.append(float(values[layout.LOSS]))
            timing.started.append(float(start))
            timing.all_reduce.append(float(stop - start))
            timing.update.append(max(0.0, float(end - stop)))
            timing.rows.append(int(values[layout.ROWS]))
        self.ended = []


def _next(batches: Any) -> Batch:
    try:
        return next(batches)
    except tf.errors.OpError as error:
        told = source_errors.explain(error)
        if told is None:
            raise
        raise told from None
