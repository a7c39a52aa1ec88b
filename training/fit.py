"""The training loop: ``training.fit``, what ``model.fit`` is to Keras."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

import backends
from backends.base import Backend
from collective.errors import UsageError
from training import keras_compat
from training.callbacks import RankZeroCallbacks, followed_variables
from training.checks import check_labels, check_model, check_same_stream
from training.evaluation import Evaluation
from training.failure import ends_the_job
from training.inputs import Batch, Input
from training.message import message
from training.progress import Progress
from training.report import Averages
from training.sources import failures
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
        losses: The loss of every step, over its whole global batch.
        timing: Seconds of every step.
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
    shuffle: bool = True,
    seed: int = 0,
    check_every: int = 100,
    validation_data: Any = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    verbose: str | int = "auto",
    timeline: str | None = None,
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
        shuffle: Whether each epoch has a new order, which depends on the seed alone.
        seed: For the order and for random layers.
        check_every: Steps from one comparison of the replicas' parameters and
            optimizer state, by checksum, to the next; 0 for never.
        validation_data: As ``data``; evaluated after each epoch, exactly.
        callbacks: Keras callbacks; they run on rank 0, all ranks follow.
        verbose: 0 silent, 1 a bar, 2 a line an epoch, ``auto``.
        timeline: File for a Chrome trace of what every rank did when.

    Raises:
        UsageError: What was asked for cannot be done; nothing was trained.
        CollectiveError: The loss is not finite, or the replicas differ.
    """
    if isinstance(backend, str):
        known = message(model) if isinstance(model, keras.Model) else None
        backend = backends.get(backend, gradients=known)
    with ends_the_job(backend):
        plan = Input(data, global_batch_size, seed=seed, shuffle=shuffle)
        loop = _Loop(backend, plan, epochs, steps)
        loop.check(accumulate)
        dataset = plan.dataset(0, loop.last, backend.local_replicas, backend.replicas)
        spec = plan.spec
        model = _ready(model, backend, spec)
        check_labels(model, plan.source)
        backend.broadcast(followed_variables(model))
        step = Step(
            model,
            backend,
            spec,
            accumulate=accumulate,
            jit_compile=jit_compile,
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
        with contextlib.ExitStack() as stack:
            record = (
                stack.enter_context(Timeline(timeline, backend)) if timeline else None
            )
            return loop.run(step, iter(dataset), hooks, validate, bar, record)


def _ready(
    model: keras.Model | Callable[[], keras.Model], backend: Backend, spec: Batch
) -> keras.Model:
    """Makes the model where a function was given; builds all of its variables."""
    if not isinstance(model, keras.Model):
        with backend.scope():
            model = model()
    check_model(model, backend)
    with backend.scope():
        try:
            keras_compat.build(model, spec[:3])
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            shape = tf.nest.map_structure(lambda s: tuple(s.shape[1:]), spec.x)
            first = str(error).strip().split("\n")[0]
            raise UsageError(
                f"model {model.name!r} does not fit the data (a row of x has shape "
                f"{shape}): {first}",
                hint="give the model the input shape and the number of outputs of the "
                "data, or choose another --data",
            ) from error
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

    def check(self, accumulate: int) -> None:
        replicas, size = self.backend.replicas, self.plan.global_batch_size
        if size < replicas:
            raise UsageError(
                f"a global batch of {size} rows cannot be shared by {replicas} replicas",
                hint=f"--global-batch-size {replicas} or more, or fewer replicas",
            )
        if accumulate < 1:
            raise UsageError("accumulate must be at least 1", hint="--accumulate 1")
        check_same_stream(self.backend, self.plan.source)

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
        result = Result(model, self.backend)
        every_batch = "on_train_batch_end" in hooks.hooks
        hooks.call("on_train_begin", {})
        for epoch in range(self.epochs):
            hooks.call("on_epoch_begin", epoch, {})
            first, last = epoch * per_epoch, min((epoch + 1) * per_epoch, self.last)
            bar.begin(epoch, last - first)
            averages = Averages(step.layout)
            ended: list[float] = []  # by the clock of the report
            for number in range(first, last):
                hooks.call("on_train_batch_begin", number - first, {})
                begin = time.perf_counter()
                batch = _next(batches)
                ready = time.perf_counter()
                report = step(batch, number)
                done = time.perf_counter()
                ended.append(time.time())
                averages.add(report)
                if timeline is not None:
                    timeline.step(number, begin, ready, done, report)
                result.timing.input.append(ready - begin)
                result.timing.step.append(done - ready)
                if every_batch:
                    now = averages.logs() if self.backend.rank == 0 else {}
                    hooks.call("on_train_batch_end", number - first, now)
                bar.update(number - first + 1, averages.logs)
                if model.stop_training:
                    break
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
            bar.end(len(averages.reports), logs)
            for name, value in logs.items():
                result.history.setdefault(name, []).append(value)
            hooks.call("on_epoch_end", epoch, dict(logs))
            if model.stop_training:
                break
        with self.backend.scope():
            keras_compat.finish(model)
        result.timing.tell_waiting(self.backend)
        hooks.call("on_train_end", {})
        return result


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
