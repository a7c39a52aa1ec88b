"""``collective.training.fit``, what ``model.fit`` is to Keras."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from collective import backends
from collective.backends.base import Backend
from collective.backends.capabilities import Serving
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.callbacks import RankZeroCallbacks
from collective.training.checkpoint.schedule import Checkpoint
from collective.training.checks import check_labels, check_model
from collective.training.evaluation import Evaluation
from collective.training.failure import ends_the_job, explaining_memory
from collective.training.gradient_sizes import message
from collective.training.input.pipeline import Batch, Input
from collective.training.loop import Loop, Result
from collective.training.memory import partitioned, sharded_optimizer
from collective.training.parallel import partition, placement
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
    if isinstance(backend, Serving):
        backend.serve()
    with ends_the_job(backend), explaining_memory():
        told = ledger is not None
        plan = Input(
            data, global_batch_size, seed=seed, shuffle=shuffle, tell_rows=told
        )
        loop = Loop(backend, plan, epochs, steps)
        loop.check(accumulate)
        spec = plan.spec
        if backend.stages:
            placement.check(
                backend,
                recompute=recompute,
                shard_optimizer=shard_optimizer,
                jit_compile=jit_compile,
            )
        model = _ready(model, backend, spec, shard_optimizer, jit_compile)
        if backend.stages and placement.of(model) is None:
            rows = -(-global_batch_size // (backend.replicas * accumulate))
            placement.Placement(model, backend.stages, rows)
        check_labels(model, plan.source)
        loop.begin(model, checkpoint, ledger)
        step = Step(
            model,
            backend,
            spec,
            accumulate=accumulate,
            jit_compile=jit_compile,
            recompute=recompute,
            seed=seed,
            maybe_empty=loop.smallest < backend.most_replicas,
            check_every=check_every,
        )
        validate = None
        if validation_data is not None:
            source = Input(validation_data, global_batch_size).source
            validate = Evaluation(
                model,
                backend,
                source,
                max(global_batch_size, 32 * backend.most_replicas),
            )
        hooks = RankZeroCallbacks(
            callbacks, model, backend, loop.epochs, plan.steps_per_epoch
        )
        return loop.run(step, hooks, validate, verbose, timeline)


def _ready(
    model: keras.Model | Callable[[], keras.Model],
    backend: Backend,
    spec: Batch,
    shard_optimizer: bool,
    jit_compile: bool,
) -> keras.Model:
    """Makes the model where a function was given; builds all of its variables."""
    if not isinstance(model, keras.Model):
        with backend.scope():
            model = model()
    check_model(model, backend)
    if shard_optimizer:
        sharded_optimizer.check(model, backend)
    if backend.tensor is not None:
        partition.check(backend, model, jit_compile)
    whole = not shard_optimizer and backend.tensor is None
    with_optimizer = whole and not backend.stages
    with backend.scope():
        try:
            keras_compat.build(model, spec[:3], optimizer=with_optimizer)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            shape = tf.nest.map_structure(lambda s: tuple(s.shape[1:]), spec.x)
            first = str(error).strip().split("\n")[0]
            raise UsageError(
                f"model {model.name!r} does not fit the data (a row of x has shape "
                f"{shape}): {first}",
                hint="give the model the input shape and the number of outputs of the "
                "data, or choose another --data",
            ) from error
    if not whole and partitioned.of(model) is None:
        (sharded_optimizer.Sharding if shard_optimizer else partition.TensorParts)(
            model, backend
        )
    return model
