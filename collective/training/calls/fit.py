"""``collective.fit``, what ``model.fit`` is to Keras."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import keras

from collective.backends.base import Backend
from collective.fit_options import FitOptions
from collective.training.calls import keras_fit
from collective.training.calls.opening import open_backend
from collective.training.calls.scoped_models import backend_for
from collective.training.input.data import DataArguments
from collective.training.loop.callbacks import Callbacks
from collective.training.loop.result import Result
from collective.training.observers.checkpoint.schedule import Checkpoint
from collective.training.preparation import parts
from collective.training.preparation.refusals import check_model
from collective.training.process.failure import guarded
from collective.training.process.known_arguments import known_arguments
from collective.training.verification.deterministic import THREADS


@known_arguments
def fit(
    model: keras.Model | Callable[[], keras.Model],
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: str | int = "auto",
    callbacks: Callbacks = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool | str = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
    *,
    backend: str | Backend = "auto",
    steps: int | None = None,
    accumulate: int = 1,
    jit_compile: bool | None = None,
    shard_optimizer: bool = False,
    shard_weights: bool = False,
    hook: str | Any = None,
    per_replica: bool | str = False,
    verify: bool | str = False,
    seed: int | None = None,
    terminate_on_nan: bool = False,
    check_every: int = 100,
    virtual_replicas: int | None = None,
    timeline: str | None = None,
    checkpoint: Checkpoint | None = None,
    ledger: str | os.PathLike[str] | None = None,
    data: Any = None,
    global_batch_size: int | None = None,
) -> Result:
    """Train a model; the same model comes out of every backend.

    The arguments up to ``validation_freq`` are those of ``keras.Model.fit``, in its
    order and with its meaning; ``docs/how-to/from-model-fit.md`` has what differs.

    Args:
        model: A compiled model, or a function that makes one. Backends with several
            devices need the function, or a model made in ``backend.scope()``.
        x: Inputs: an array, a list, tuple or dict of arrays, a DataFrame, a tensor
            (ragged or sparse, too); or what has the labels, too: a ``tf.data.Dataset``
            of batches, a ``keras.utils.PyDataset``, a generator of batches, a torch
            DataLoader, a ``collective.training.input.source.Source``.
        y: Labels, likewise, or None where x has them, or the model needs none.
        batch_size: Rows of one update, over all replicas together; 32 by default.
            Ignored if x yields batches.
        epochs: Training ends before the epoch of this number.
        verbose: 0 silent, 1 a bar, 2 a line an epoch, ``auto``.
        callbacks: A Keras callback or a list of them; they run on rank 0, all ranks
            follow. What a callback raises, every rank raises.
        validation_split: The share of the rows, the last ones, to validate with.
        validation_data: ``(x, y)`` or ``(x, y, sample_weight)``, or a data set;
            evaluated after each epoch, exactly.
        shuffle: Whether epochs mix the rows of arrays and the items of a ``PyDataset``:
            in Keras' own order if the script has set a seed, as by
            ``keras.utils.set_random_seed``; else in one that depends on ``seed`` alone.
            ``batch`` mixes rows within batches.
        class_weight: The weight of the rows of each class of y.
        sample_weight: The weight of each row.
        initial_epoch: The epoch to start with.
        steps_per_epoch: Updates of an epoch; the next one continues in the data.
        validation_steps: How many batches to validate with, at most.
        validation_batch_size: Rows that are validated at a time; ``batch_size`` by
            default.
        validation_freq: Validates every so many epochs, or after these epochs.
        backend: A name (see ``train.py --list-backends``) or a backend.
        steps: Updates in all; overrides ``epochs``.
        accumulate: Micro-batches an update is cut into, to save memory.
        jit_compile: Accepted for scripts that have it: XLA does not compile a step that
            sums over ranks, and a line says so.
        shard_optimizer: Whether each rank keeps a part of the optimizer's state only;
            see ``collective.training.sharding``.
        shard_weights: Whether each rank keeps a part of weights, gradients and the
            optimizer's state only (native, mpi); see ``docs/how-to/parallel.md``.
        hook: Compresses gradients before they are summed: a ``CommunicationHook``, or
            ``powersgd:4`` by name. The model is not equal to that of one process without
            it, and all outputs say so; see ``collective.training.compression``.
        per_replica: True: each replica's rows are a batch of their own, as with
            tf.distribute; ``batch``: each replica has whole batches of the data, as for
            steps that know how many rows a batch has. Gradients, metrics and state are
            averaged by rows; N replicas train a model different from one replica's. See
            ``collective.training.steps.own_batches``.
        verify: True or ``run``: the first 10 steps are made by Keras, too, on rank 0, and
            what differs is shown; ``run:K``: the first K.
        seed: None: order and random layers follow from the seeds of the script and of
            the layers, as in Keras. A number: they follow from it, and from the step.
        terminate_on_nan: Whether a loss or gradient that is not finite ends the training
            before it is applied; by default a warning names step, rank and variable, and
            the training continues, as in Keras.
        check_every: Steps from one comparison of the replicas' parameters and
            optimizer state, by checksum, to the next; 0 for never.
        virtual_replicas: Into how many pieces each global batch is cut, each the batch of
            one replica wherever it runs: the trained bits are the same on any number of
            ranks up to this one; see ``collective.training.virtual``.
        timeline: File for a Chrome trace of what every rank did when.
        checkpoint: Where the state of the training is kept, and resumed from.
        ledger: A file for the rows that each step has used; see
            ``collective.training.observers.ledger.verify``.
        data: In place of x, y and sample_weight, rows in one value: ``(x, y)`` or
            ``(x, y, sample_weight)``, a ``tf.data.Dataset`` of single rows, or a
            ``Source``.
        global_batch_size: In place of batch_size, where x is such a value.

    Returns:
        Keras' ``History``, also as ``model.history``, with more in it.

    Raises:
        UsageError: What was asked for cannot be done; nothing was trained.
        CollectiveError: The loss is not finite and ``terminate_on_nan`` is on, or the
            replicas differ.
        ProcessExit: This process has finished, for example because it leaves an elastic
            job.
    """
    options = FitOptions(
        accumulate=accumulate,
        virtual_replicas=virtual_replicas,
        steps=steps,
        shard_optimizer=shard_optimizer,
        shard_weights=shard_weights,
        hook=hook,
        jit_compile=jit_compile,
        per_replica=per_replica,
        verify=verify,
        seed=seed,
        terminate_on_nan=terminate_on_nan,
        check_every=check_every,
        timeline=timeline,
    )
    threads = None if virtual_replicas is None else THREADS
    backend = open_backend(backend_for(model, backend), threads)
    if not isinstance(model, keras.Model):
        with guarded(backend):
            with backend.scope():
                model = parts.made(model, backend, shard_weights)
            check_model(model, backend)
    arguments = DataArguments(
        x=x,
        y=y,
        batch_size=batch_size,
        validation_split=validation_split,
        validation_data=validation_data,
        shuffle=shuffle,
        class_weight=class_weight,
        sample_weight=sample_weight,
        steps_per_epoch=steps_per_epoch,
        validation_steps=validation_steps,
        validation_batch_size=validation_batch_size,
        seed=seed,
        data=data,
        global_batch_size=global_batch_size,
    )
    more = {
        "epochs": epochs,
        "verbose": verbose,
        "initial_epoch": initial_epoch,
        "validation_freq": validation_freq,
    }
    return keras_fit.fit(
        model, arguments, more, callbacks, backend, options, checkpoint, ledger
    )
