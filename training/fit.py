"""``collective.training.fit``, what ``model.fit`` is to Keras."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import keras

from collective import backends
from collective.backends.base import Backend
from collective.training.callbacks import RankZeroCallbacks
from collective.training.checkpoint.schedule import Checkpoint
from collective.training.checks import check_labels
from collective.training.elastic.control_messages import Notices
from collective.training.evaluation import Evaluation
from collective.training.failure import ends_the_job, explaining_memory
from collective.training.gradient_sizes import message
from collective.training.input.pipeline import Input
from collective.training.ledger.receipts import Receipts
from collective.training.loop import Loop, Result
from collective.training.prepared import prepare
from collective.training.replica_check import DesyncAlarm
from collective.training.step import Step


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
            ``collective.training.ledger.verify``.

    Raises:
        UsageError: What was asked for cannot be done; nothing was trained.
        CollectiveError: The loss is not finite, or the replicas differ.
    """
    if isinstance(backend, str):
        known = message(model) if isinstance(model, keras.Model) else None
        backend = backends.get(backend, gradients=known)
    backend.serve()
    with ends_the_job(backend), explaining_memory():
        plan = Input(
            data,
            global_batch_size,
            seed=seed,
            shuffle=shuffle,
            with_rows_read=ledger is not None,
        )
        loop = Loop(backend, plan, epochs, steps)
        loop.check(accumulate)
        prepared = prepare(
            model,
            backend,
            plan.spec,
            micro_batch_rows=-(-global_batch_size // (backend.replicas * accumulate)),
            shard_optimizer=shard_optimizer,
            jit_compile=jit_compile,
            recompute=recompute,
        )
        model = prepared.model
        check_labels(model, plan.source)
        loop.begin(model, checkpoint, ledger)
        notices = Notices(backend) if backend.options.min_np is not None else None
        receipts = Receipts(backend) if ledger is not None else None
        alarm = None
        if DesyncAlarm.is_needed(backend, check_every):
            alarm = DesyncAlarm(model, backend, check_every)
        step = Step(
            prepared,
            backend,
            plan.spec,
            accumulate=accumulate,
            jit_compile=jit_compile,
            recompute=recompute,
            seed=seed,
            maybe_empty=loop.smallest < backend.most_replicas,
            attachments=[a for a in (alarm, receipts, notices) if a is not None],
        )
        validate = None
        if validation_data is not None:
            source = Input(validation_data, global_batch_size).source
            validate = Evaluation(
                prepared,
                backend,
                source,
                max(global_batch_size, 32 * backend.most_replicas),
            )
        hooks = RankZeroCallbacks(
            callbacks, model, backend, loop.epochs, plan.steps_per_epoch
        )
        return loop.run(step, hooks, validate, verbose, timeline, notices, receipts)
