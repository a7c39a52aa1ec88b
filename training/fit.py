"""The training loop: ``training.fit``, what ``model.fit`` is to Keras."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import backends
from backends.base import Backend
from collective import recorder
from collective.errors import UsageError
from training import keras_compat, random_state, sharding
from training.callbacks import RankZeroCallbacks, followed_variables
from training.checkpoint import Checkpoint
from training.checks import check_labels, check_model, check_same_data
from training.evaluation import Evaluation
from training.failure import ends_the_job, explaining_memory
from training.inputs import Batch, Input
from training.ledger_writer import Ledger
from training.message import message
from training.progress import Progress
from training.report import Averages
from training.sources import failures
from training.state import State, values_of
from training.step import Step
from training.timeline import Timeline
from training.timing import Timing


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


def fit(
    model: keras.Model | Callable[[], keras.Model],
    data: Any,
    *,
    backend: str | Backend = "auto",
    global_batch_size: int = 64,
    epochs: int = 1,
    steps: int | None = None,
    accumulate: int = 1,
    jit_compile: bool = False,
    recompute: bool = False,
    shard_optimizer: bool = False,
    shuffle: bool = True,
    seed: int = 0,
    check_every: int = 100,
    validation_data: Any = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    verbose: str | int = "auto",
    timeline: str | None = None,
    checkpoint: Checkpoint | None = None,
    ledger: str | os.PathLike[str] | None = None,
) -> Result:
    """Trains a model; the same model comes out of every backend.

    Args:
        model: A compiled model, or a function that makes one. Backends with several
            devices need the function, or a model made in ``backend.scope()``.
        data: ``(x, y)`` or ``(x, y, sample_weight)`` arrays or trees of arrays, a
            ``tf.data.Dataset`` of single rows, or a ``training.sources.Source``.
        backend: A name (see ``train.py --list-backends``) or a backend.
        global_batch_size: Rows of one update, over all replicas.
        epochs: Passes over the data.
        steps: Updates in all; overrides ``epochs``.
        accumulate: Micro-batches an update is cut into, to save memory.
        jit_compile: Whether XLA compiles the forward and backward pass.
        recompute: Whether activations are computed again instead of kept, to save
            memory; see ``training.recompute``.
        shard_optimizer: Whether each rank keeps a part of the optimizer's state only;
            see ``training.sharding``.
        shuffle: Whether each epoch has a new order, which depends on the seed alone.
        seed: For the order and for random layers.
        check_every: Steps from one comparison of the replicas' parameters and
            optimizer state, by checksum, to the next; 0 for never.
        validation_data: As ``data``; evaluated after each epoch, exactly.
        callbacks: Keras callbacks; they run on rank 0, all ranks follow.
        verbose: 0 silent, 1 a bar, 2 a line an epoch, ``auto``.
        timeline: File for a Chrome trace of what every rank did when.
        checkpoint: Where the state of the training is kept, and gone on from.
        ledger: A file that is told which rows each step has used; see
            ``training.ledger``.

    Raises:
        UsageError: What was asked for cannot be done; nothing was trained.
        CollectiveError: The loss is not finite, or the replicas differ.
    """
    if isinstance(backend, str):
        known = message(model) if isinstance(model, keras.Model) else None
        backend = backends.get(backend, gradients=known)
    backend.serve()
    with ends_the_job(backend), explaining_memory():
        told = ledger is not None
        plan = Input(
            data, global_batch_size, seed=seed, shuffle=shuffle, tell_rows=told
        )
        loop = _Loop(backend, plan, epochs, steps)
        loop.check(accumulate)
        spec = plan.spec
        model = _ready(model, backend, spec, shard_optimizer)
        check_labels(model, plan.source)
        loop.begin(model, checkpoint, ledger)
        if loop.start is None:
            backend.broadcast(followed_variables(model))
        dataset = plan.dataset(
            loop.first, loop.last, backend.local_replicas, backend.replicas
        )
        step = Step(
            model,
            backend,
            spec,
            accumulate=accumulate,
            jit_compile=jit_compile,
            recompute=recompute,
            seed=seed,
            maybe_empty=loop.smallest < backend.replicas,
            check_every=check_every,
        )
        validate = None
        if validation_data is not None:
            source = Input(validation_data, global_batch_size).source
            validate = Evaluation(
                model, backend, source, max(global_batch_size, 32 * backend.replicas)
            )
        hooks = RankZeroCallbacks(
            callbacks, model, backend, loop.epochs, plan.steps_per_epoch
        )
        bar = Progress(loop.epochs, verbose if backend.rank == 0 else 0)
        recording = Timeline(timeline, backend) if timeline else None
        with recording or contextlib.nullcontext() as record:
            return loop.run(step, iter(dataset), hooks, validate, bar, record)


def _ready(
    model: keras.Model | Callable[[], keras.Model],
    backend: Backend,
    spec: Batch,
    shard_optimizer: bool,
) -> keras.Model:
    """Makes the model where a function was given; builds all of its variables."""
    if not isinstance(model, keras.Model):
        with backend.scope():
            model = model()
    check_model(model, backend)
    if shard_optimizer:
        sharding.check(model, backend)
    with backend.scope():
        try:
            keras_compat.build(model, spec[:3], optimizer=not shard_optimizer)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            shape = tf.nest.map_structure(lambda s: tuple(s.shape[1:]), spec.x)
            first = str(error).strip().split("\n")[0]
            raise UsageError(
                f"model {model.name!r} does not fit the data (a row of x has shape "
                f"{shape}): {first}",
                hint="give the model the input shape and the number of outputs of the "
                "data, or choose another --data",
            ) from error
    if shard_optimizer and sharding.of(model) is None:
        sharding.Sharding(model, backend)
    return model


class _Loop:
    """Epochs and steps, and what is kept of each."""

    def __init__(self, backend: Backend, plan: Input, epochs: int, steps: int | None):
        self.backend = backend
        self.plan = plan
        self.last = epochs * plan.steps_per_epoch if steps is None else steps
        self.epochs = -(-self.last // plan.steps_per_epoch)
        tail = plan.rows % plan.global_batch_size or plan.global_batch_size
        self.smallest = min(tail, plan.global_batch_size)
        self.start: State | None = None
        self.first = 0
        self.averages: Averages | None = None  # of the epoch under way
        self.losses = np.zeros(0)  # of the epochs before it
        self.checkpoint: Checkpoint | None = None  # rank 0's
        self.due: Callable[[int, bool], bool] | None = None
        self.ledger: Ledger | None = None

    def check(self, accumulate: int) -> None:
        replicas, size = self.backend.replicas, self.plan.global_batch_size
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
        """Finds the state to start from, and opens the ledger."""
        backend, plan = self.backend, self.plan.plan
        if checkpoint is not None:
            self.start = checkpoint.begin(model, backend, plan)
            self.due = checkpoint.due
        if self.start is not None:
            self.first = self.start.step
        if self.first > self.last:
            raise UsageError(
                f"the training is at step {self.first} already, and {self.last} steps "
                "were asked for",
                hint="more --steps or --epochs, or another --checkpoint-dir",
            )
        if backend.rank:
            return  # what is written is rank 0's
        self.checkpoint = checkpoint
        if ledger is not None:
            self.ledger = Ledger(ledger)
            self.ledger.begin(plan, self.first, backend.replicas, backend.name)

    def run(
        self,
        step: Step,
        batches: Any,
        hooks: RankZeroCallbacks,
        validate: Evaluation | None,
        bar: Progress,
        timeline: Timeline | None,
    ) -> Result:
        model, per_epoch = step.model, self.plan.steps_per_epoch
        result = self.result = Result(model, self.backend)
        every_batch = "on_train_batch_end" in hooks.hooks
        start, epoch, number = self.start, 0, self.first
        if start is not None:
            epoch, result.history = start.epoch, dict(start.history)
            self.losses, result.losses = start.losses, start.losses.tolist()
            start.put(model)  # here for the hooks to see it,
        hooks.call("on_train_begin", {})
        if start is not None:
            start.put(model)  # and here because they must not change it
        final: State | None = None
        while epoch < self.epochs and not model.stop_training:
            hooks.call("on_epoch_begin", epoch, {})
            sums = None
            if start is not None and start.within_epoch:
                start.put(model)
                sums = start.sums
            start = self.start = None
            averages = self.averages = Averages(step.layout, sums)
            first, last = epoch * per_epoch, min((epoch + 1) * per_epoch, self.last)
            bar.begin(epoch, last - first)
            ended: list[float] = []  # by the clock of the report
            while number < last and not model.stop_training:
                hooks.call("on_train_batch_begin", number - first, {})
                begin = time.perf_counter()
                with recorder.span(recorder.OTHER, f"input of step {number}"):
                    batch = _next(batches)
                ready = time.perf_counter()
                with recorder.span(recorder.STEP, str(number)):
                    report = step(batch, number)
                done = time.perf_counter()
                ended.append(time.time())
                averages.add(report)
                if timeline is not None:
                    timeline.step(number, begin, ready, done, report)
                result.timing.input.append(ready - begin)
                result.timing.step.append(done - ready)
                if self.ledger is not None:
                    self.ledger.add(number, step.layout.receipts(report))
                number += 1
                if every_batch:
                    now = averages.logs() if self.backend.rank == 0 else {}
                    hooks.call("on_train_batch_end", number - first - 1, now)
                bar.update(number - first, averages.logs)
                if number < last and not model.stop_training:
                    self._save(epoch, number)
            if number == last < first + per_epoch and not model.stop_training:
                final = self._state(epoch, number)  # more steps can go on from here
            logs = averages.logs()
            _keep(result, averages, ended)
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
            bar.end(number - first, logs)
            for name, value in logs.items():
                result.history.setdefault(name, []).append(value)
            hooks.call("on_epoch_end", epoch, dict(logs))
            self.averages, self.losses = None, np.array(result.losses)
            epoch += 1
            if epoch < self.epochs and not model.stop_training:
                self._save(epoch, number)
        final = final or self._state(epoch, number)
        if self.checkpoint is not None:
            self.checkpoint.end(final, self.ledger)
        if step.shards is not None:
            step.shards.finish()
        else:
            with self.backend.scope():
                keras_compat.finish(model)
        result.timing.tell_waiting(self.backend)
        hooks.call("on_train_end", {})
        if self.ledger is not None:
            self.ledger.close()
        return result

    def _state(
        self,
        epoch: int,
        step: int,
        buffers: Sequence[np.ndarray] | None = None,
        gathered: Mapping[int, np.ndarray] | None = None,
    ) -> State:
        """The state of the training now; ``epoch`` and ``step`` are the next ones.

        Where it was not gathered already, every rank calls it.
        """
        if gathered is None:
            gathered = self._gathered()
        losses, sums, averages = self.losses, np.zeros(0), self.averages
        if averages is not None:
            sums = averages.sums().copy()
            more = [values[averages.layout.LOSS] for values in averages.reports]
            losses = np.concatenate([losses, more])
        return State(
            epoch,
            step,
            values_of(self.result.model, buffers, gathered),
            sums,
            losses,
            {name: list(values) for name, values in self.result.history.items()},
            random_state.take(),
            bool(self.result.model.stop_training),
        )

    def _save(self, epoch: int, step: int) -> None:
        """Writes a checkpoint where one is due, on rank 0; every rank calls it."""
        if self.due is None or not self.due(step, not self.averages):
            return
        whole = self._gathered()
        if self.checkpoint is not None:
            self.checkpoint.save(
                lambda buffers: self._state(epoch, step, buffers, whole), self.ledger
            )

    def _gathered(self) -> dict[int, np.ndarray]:
        """What ranks have parts of, if a checkpoint wants it."""
        shards = sharding.of(self.result.model)
        return {} if shards is None or self.due is None else shards.gather()


def _keep(result: Result, averages: Averages, ended: Sequence[float]) -> None:
    """Keeps the losses, times and rows of an epoch's steps."""
    layout, timing = averages.layout, result.timing
    for values, end in zip(averages.reports, ended, strict=True):
        start, stop = values[layout.REDUCE_START], values[layout.REDUCE_STOP]
        result.losses.append(float(values[layout.LOSS]))
        timing.started.append(float(start))
        timing.all_reduce.append(float(stop - start))
        timing.update.append(max(0.0, float(end - stop)))
        timing.rows.append(int(values[layout.ROWS]))


def _next(batches: Any) -> Batch:
    try:
        return next(batches)
    except tf.errors.OpError as error:
        told = failures.explain(error)
        if told is None:
            raise
        raise told from None
