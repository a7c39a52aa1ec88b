"""``collective.training.fit``, what ``model.fit`` is to Keras."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import keras

from collective import backends
from collective.backends.base import Backend
from collective.backends.capabilities import Serving
from collective.training.callbacks import RankZeroCallbacks
from collective.training.checkpoint.observer import CheckpointObserver
from collective.training.checkpoint.schedule import Checkpoint
from collective.training.checks import check_batch, check_labels
from collective.training.elastic.membership import Membership
from collective.training.evaluation import Evaluation
from collective.training.failure import ends_the_job, explaining_memory
from collective.training.gradient_sizes import message
from collective.training.input.pipeline import Input
from collective.training.ledger.observer import LedgerObserver
from collective.training.loop import Loop
from collective.training.observer import Observer
from collective.training.position import Position
from collective.training.prepared import prepare
from collective.training.replica_check import DesyncAlarm, FinalCheck
from collective.training.reporting.heartbeat import Heartbeat
from collective.training.reporting.progress import ProgressBar
from collective.training.reporting.timeline import TimelineObserver
from collective.training.reporting.timing import TimingObserver
from collective.training.result import Result
from collective.training.step import Step
from collective.training.verification import (
    compare_data,
    compare_models,
    verify_step,
)


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
    sync_batch_norm: bool = False,
    verify: bool = True,
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
            ``tf.data.Dataset`` of single rows, or a ``collective.training.input.source.Source``.
        backend: A name (see ``train.py --list-backends``) or a backend.
        global_batch_size: Rows of one update, over all replicas.
        epochs: Passes over the data.
        steps: Updates in all; overrides ``epochs``.
        accumulate: Micro-batches an update is cut into, to save memory.
        jit_compile: Whether XLA compiles the forward and backward pass.
        recompute: Whether activations are computed again instead of kept, to save
            memory; see ``collective.training.memory.recompute``.
        shard_optimizer: Whether each rank keeps a part of the optimizer's state only;
            see ``collective.training.memory.sharded_optimizer``.
        sync_batch_norm: Whether layers of batch normalization have the statistics of
            the whole global batch, so that N replicas train what one does; see
            ``collective.training.coupled.batch_norm``.
        shuffle: Whether each epoch has a new order, which depends on the seed alone.
        verify: Whether the step is compared with Keras' own on a few rows before it
            trains; see ``collective.training.verification``.
        seed: For the order and for random layers.
        check_every: Steps from one comparison of the replicas' parameters and
            optimizer state, by checksum, to the next; 0 for never.
        validation_data: As ``data``; evaluated after each epoch, exactly.
        callbacks: Keras callbacks; they run on rank 0, all ranks follow.
        verbose: 0 silent, 1 a bar, 2 a line an epoch, ``auto``.
        timeline: File for a Chrome trace of what every rank did when.
        checkpoint: Where the state of the training is kept, and resumed from.
        ledger: A file for the rows that each step has used; see
            ``collective.training.ledger.verify``.

    Raises:
        UsageError: What was asked for cannot be done; nothing was trained.
        CollectiveError: The loss is not finite, or the replicas differ.
        ProcessExit: The job needs nothing more of this process, as that it leaves an
            elastic job.
    """
    if isinstance(backend, str):
        sizes = message(model) if isinstance(model, keras.Model) else None
        backend = backends.get(backend, gradients=sizes)
    if isinstance(backend, Serving):
        backend.serve()
    with ends_the_job(backend), explaining_memory():
        inputs = Input(
            data,
            global_batch_size,
            seed=seed,
            shuffle=shuffle,
            with_rows_read=ledger is not None,
        )
        check_batch(backend, global_batch_size, accumulate)
        validation = None
        if validation_data is not None:
            validation = Input(validation_data, global_batch_size, shuffle=False)
        compare_data(
            backend,
            inputs,
            validation,
            {"epochs": epochs, "steps": steps, "accumulate": accumulate},
        )
        prepared = prepare(
            model,
            backend,
            inputs.spec,
            micro_batch_rows=-(-global_batch_size // (backend.replicas * accumulate)),
            recompute=recompute,
            shard_optimizer=shard_optimizer,
            jit_compile=jit_compile,
        )
        model = prepared.model
        compare_models(backend, model)
        check_labels(model, inputs.source)
        plan = verify_step(
            prepared,
            backend,
            inputs,
            validation,
            accumulate=accumulate,
            seed=seed,
            sync_batch_norm=sync_batch_norm,
            enabled=verify,
            verbose=verbose,
        )
        per_epoch = inputs.steps_per_epoch
        last_step = epochs * per_epoch if steps is None else steps
        position = Position(model, backend, gathers=checkpoint is not None)
        result = Result(model, backend, position.history, position.losses)
        observers, membership = _observers(
            position,
            result,
            inputs,
            epochs=-(-last_step // per_epoch),
            callbacks=callbacks,
            verbose=verbose,
            timeline=timeline,
            checkpoint=checkpoint,
            ledger=ledger,
        )
        smallest_batch = inputs.rows % global_batch_size or global_batch_size
        attachments = [a for observer in observers for a in observer.attachments]
        if DesyncAlarm.is_needed(backend, check_every):
            alarm = DesyncAlarm(model, backend, check_every)
            attachments.insert(0, alarm)
            if backend.synchronous:
                observers.append(FinalCheck(alarm, position))
        step = Step(
            prepared,
            backend,
            inputs.spec,
            accumulate=accumulate,
            jit_compile=jit_compile,
            recompute=recompute,
            seed=seed,
            maybe_empty=smallest_batch < backend.most_replicas,
            attachments=attachments,
            plan=plan,
            sync_batch_norm=sync_batch_norm,
        )
        evaluate = None
        if validation is not None:
            rows = max(global_batch_size, 32 * backend.most_replicas)
            evaluate = Evaluation(prepared, backend, validation.source, rows, plan)
        loop = Loop(
            position,
            step,
            inputs.movable() if backend.elastic else inputs.dataset,
            per_epoch,
            last_step,
            observers,
            evaluate,
        )
        if membership is not None:
            return membership.run(loop, result)
        loop.run()
        return result


def _observers(
    position: Position,
    result: Result,
    inputs: Input,
    *,
    epochs: int,
    callbacks: Sequence[keras.callbacks.Callback],
    verbose: str | int,
    timeline: str | None,
    checkpoint: Checkpoint | None,
    ledger: str | os.PathLike[str] | None,
) -> tuple[list[Observer], Membership | None]:
    """The observers that were asked for, innermost first, and the state to start from.

    A timeline or a ledger has the step before callbacks can fail in it; a checkpoint
    has what they changed, and so has the state with which a rank leaves.
    """
    plan, backend = inputs.plan, position.backend
    observers: list[Observer] = [Heartbeat()]
    if timeline:
        observers.append(TimelineObserver(timeline, position))
    observers.append(TimingObserver(result.timing, position))
    before_write = None
    if ledger is not None:
        noting = LedgerObserver(ledger, position, plan)
        observers.append(noting)
        before_write = noting.sync
    if str(verbose) != "0":
        observers.append(ProgressBar(position, epochs, verbose))
    observers.append(
        RankZeroCallbacks(callbacks, position, epochs, inputs.steps_per_epoch)
    )
    saving = membership = None
    if checkpoint is not None:
        saving = CheckpointObserver(checkpoint, position, plan, before_write)
        observers.append(saving)
    if backend.elastic:
        membership = Membership(position, inputs, saving)
        membership.find_start()
        observers.append(membership)
    if saving is not None:
        saving.find_start()
    return observers, membership
