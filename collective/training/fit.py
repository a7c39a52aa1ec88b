"""``collective.fit``, what ``model.fit`` is to Keras."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import keras

from collective.backends.base import Backend
from collective.distribute.models import as_one_process, backend_for
from collective.fit_options import FitOptions
from collective.log import log
from collective.training import compatibility, host_random, keras_compat
from collective.training.assemble import make_evaluation, make_step
from collective.training.compiled_flags import as_compiled
from collective.training.evaluation.evaluate import open_backend, open_inputs
from collective.training.failure import guarded
from collective.training.input.batches import Batches
from collective.training.input.data import FitData, fit_data, plan_shuffle
from collective.training.input.feed import ENDLESS, PlannedFeed
from collective.training.input.pipeline import Input
from collective.training.input.source import Source
from collective.training.loop.callbacks import (
    Callbacks,
    RankZeroCallbacks,
    expects_nan,
)
from collective.training.loop.loop import Loop
from collective.training.loop.observer import Observer
from collective.training.loop.position import Position
from collective.training.loop.progress import Heartbeat, ProgressBar
from collective.training.loop.result import Result
from collective.training.observers.checkpoint.identity import (
    describe as describe_identity,
)
from collective.training.observers.checkpoint.schedule import Checkpoint
from collective.training.observers.desync import DesyncAlarm, DesyncCheck
from collective.training.observers.elastic.membership import Membership
from collective.training.observers.ledger.observer import LedgerObserver
from collective.training.observers.timeline import TimelineObserver
from collective.training.observers.timing import TimingObserver
from collective.training.prepare import prepare, runs_eagerly
from collective.training.refusals import check_batch, check_labels, check_states_of_rows
from collective.training.step import finite, xla
from collective.training.variables import gradient_sizes
from collective.training.variants.coupled import batch_norm, look_ups
from collective.training.variants.custom_step.check import check_step
from collective.training.variants.custom_step.step import CustomStep
from collective.training.variants.virtual import checks as virtual_checks
from collective.training.variants.virtual import settings
from collective.training.variants.virtual.pieces import VirtualReplicas
from collective.training.verification import (
    compare_data,
    compare_graphs,
    compare_models,
    is_wanted,
    verify_step,
)


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
    recompute: bool = False,
    shard_optimizer: bool = False,
    sync_batch_norm: bool | str = False,
    embedding_gradients: str = "combined",
    verify: bool = True,
    seed: int | None = None,
    check_every: int = 100,
    virtual_replicas: int | None = None,
    timeline: str | None = None,
    checkpoint: Checkpoint | None = None,
    ledger: str | os.PathLike[str] | None = None,
    data: Any = None,
    global_batch_size: int | None = None,
) -> Result:
    """Trains a model; the same model comes out of every backend.

    The arguments up to ``validation_freq`` are those of ``keras.Model.fit``, in its
    order and with its meaning; ``docs/how-to/from-model-fit.md`` has what differs.

    Args:
        model: A compiled model, or a function that makes one. Backends with several
            devices need the function, or a model made in ``backend.scope()``.
        x: Inputs: an array, a list, tuple or dict of arrays, a DataFrame, a tensor
            (ragged or sparse, too); or what has the labels, too: a ``tf.data.Dataset``
            of batches, a ``keras.utils.PyDataset``, a generator of batches, a torch
            DataLoader, a ``collective.training.input.source.Source``.
        y: Labels, likewise; None where x has them, or the model needs none.
        batch_size: Rows of one update, over all replicas together; 32 by default.
            Without meaning where x gives batches.
        epochs: The number of the epoch to stop before.
        verbose: 0 silent, 1 a bar, 2 a line an epoch, ``auto``.
        callbacks: A Keras callback or a list of them; they run on rank 0, all ranks
            follow. What a callback raises, every rank raises.
        validation_split: The share of the rows, the last ones, to validate with.
        validation_data: ``(x, y)`` or ``(x, y, sample_weight)``, or a data set;
            evaluated after each epoch, exactly.
        shuffle: Whether epochs mix the rows of arrays and the items of a ``PyDataset``:
            in Keras' own order where the script has set a seed, as by
            ``keras.utils.set_random_seed``; else in one that depends on ``seed`` alone.
            ``batch`` mixes rows within batches.
        class_weight: The weight of the rows of each class of y.
        sample_weight: The weight of each row.
        initial_epoch: The epoch to begin with.
        steps_per_epoch: Updates of an epoch; the next one continues in the data.
        validation_steps: How many batches to validate with, at most.
        validation_batch_size: Rows that are validated at a time; ``batch_size`` by
            default.
        validation_freq: After how many epochs each to validate, or after which.
        backend: A name (see ``train.py --list-backends``) or a backend.
        steps: Updates in all; overrides ``epochs``.
        accumulate: Micro-batches an update is cut into, to save memory.
        jit_compile: Whether XLA compiles the forward and backward pass; by default as
            Keras does: where ``model.compile`` says so, and on GPUs.
        recompute: Whether activations are computed again instead of kept, to save
            memory; see ``collective.training.variants.memory.recompute``.
        shard_optimizer: Whether each rank keeps a part of the optimizer's state only;
            see ``collective.training.variants.memory.sharded_optimizer``.
        sync_batch_norm: Whether layers of batch normalization have the statistics of
            the whole global batch, so that N replicas train what one does; ``auto``:
            where that is possible, else a warning. See
            ``collective.training.variants.coupled.batch_norm``.
        verify: Whether the step is compared with Keras' own on a few rows before it
            trains; see ``collective.training.verification``.
        embedding_gradients: What the optimizer sees of an embedding's row that a batch
            looks up several times: ``combined``, the gradient of the row, on every
            backend; or ``keras``, that of each look-up, as in ``model.fit``. Adam and
            others train different models with the two; see
            ``collective.training.variants.coupled.look_ups``.
        seed: None: order and random layers follow from the seeds of the script and of
            the layers, as in Keras. A number: they follow from it, and from the step.
        check_every: Steps from one comparison of the replicas' parameters and
            optimizer state, by checksum, to the next; 0 for never.
        virtual_replicas: Into how many pieces each global batch is cut, each the batch of
            one replica wherever it runs: the trained bits are the same on any number of
            ranks up to this one; see ``collective.training.variants.virtual``.
        timeline: File for a Chrome trace of what every rank did when.
        checkpoint: Where the state of the training is kept, and resumed from.
        ledger: A file for the rows that each step has used; see
            ``collective.training.observers.ledger.verify``.
        data: Of earlier versions: ``(x, y)`` or ``(x, y, sample_weight)``, a
            ``tf.data.Dataset`` of single rows, or a ``Source``.
        global_batch_size: Of earlier versions: ``batch_size``, and with it a tuple in
            place of x is ``(x, y)``, and a ``tf.data.Dataset`` has single rows.

    Returns:
        Keras' ``History``, also as ``model.history``, with more in it.

    Raises:
        UsageError: What was asked for cannot be done; nothing was trained.
        CollectiveError: The loss is not finite, or the replicas differ.
        ProcessExit: The job needs nothing more of this process, as that it leaves an
            elastic job.
    """
    backend = backend_for(model, backend)
    named = isinstance(backend, str) and isinstance(model, keras.Model)
    backend = open_backend(
        backend,
        gradient_sizes(model) if named else None,
        None if virtual_replicas is None else settings.THREADS,
    )
    with guarded(backend), contextlib.ExitStack() as contexts:
        contexts.enter_context(as_one_process(model))
        virtual = virtual_checks.check_count(virtual_replicas, backend)
        features = {
            "accumulate": accumulate > 1,
            "jit_compile": jit_compile is True,
            "recompute": recompute,
            "shard_optimizer": shard_optimizer,
            "virtual_replicas": virtual is not None,
            "checkpoint": checkpoint is not None,
            "ledger": ledger is not None,
        }
        asked = {name for name, on in features.items() if on}
        compatibility.check(asked, backend)
        if virtual is not None:
            settings.agree(virtual, backend)
            contexts.enter_context(settings.deterministic())

        # The data, and the model ready to train on them; the same on every rank.
        given = fit_data(
            x,
            y,
            batch_size=batch_size,
            validation_split=validation_split,
            validation_data=validation_data,
            shuffle=shuffle,
            class_weight=class_weight,
            sample_weight=sample_weight,
            steps_per_epoch=steps_per_epoch,
            validation_batch_size=validation_batch_size,
            seed=seed,
            data=data,
            global_batch_size=global_batch_size,
        )
        inputs = _inputs(
            given, backend, virtual, steps_per_epoch, seed, shuffle, ledger
        )
        if isinstance(inputs, Batches):
            asked.add("batches")
        compatibility.check(asked, backend)
        validation = None
        if given.validation is not None:
            rows_at_a_time = given.validation_batch_size
            validation = open_inputs(
                given.validation, backend, rows_at_a_time, validation_steps
            )
        must_agree = {
            "epochs": epochs,
            "steps": steps,
            "accumulate": accumulate,
            "steps_per_epoch": steps_per_epoch,
            "class_weight": class_weight,
        }
        compare_data(backend, inputs, validation, must_agree)
        rows = check_batch(backend, inputs, accumulate)
        if virtual is not None:
            virtual_checks.check_batch(virtual, inputs)
        pieces = virtual.count if virtual else backend.replicas
        contexts.enter_context(as_compiled(model, backend))
        prepared = prepare(
            model,
            backend,
            inputs.spec,
            micro_batch_rows=-(-rows // (pieces * accumulate)),
            shard_optimizer=shard_optimizer,
            features=asked,
        )
        model = prepared.model
        contexts.callback(keras_compat.switch_on_gradient_sum, model.optimizer)
        compare_models(backend, model)
        check_states_of_rows(model)
        own_step = keras_compat.overrides(model, "train_step")

        contexts.enter_context(finite.ignored(expects_nan(callbacks, backend)))

        # How the step computes what is not a sum over rows.
        compiles = xla.chosen(jit_compile, model, backend, asked)
        synchronizes = batch_norm.chosen(sync_batch_norm, prepared, backend, asked)
        plan = verify_step(
            prepared,
            backend,
            inputs,
            validation,
            accumulate=accumulate,
            seed=seed,
            sync_batch_norm=synchronizes,
            enabled=verify and not own_step,  # that one has a check of its own
            verbose=verbose,
            virtual=virtual,
        )
        known = inputs.batch_size if isinstance(inputs, Batches) else rows
        if virtual is not None:
            known = None  # tables travel whole
        plan = look_ups.planned(
            plan, embedding_gradients, prepared, backend, known, asked
        )

        # The step, and what happens beside it.
        if isinstance(inputs, Input):
            check_labels(model, inputs.source)
            feed: PlannedFeed | Batches = PlannedFeed(
                inputs, backend, steps_per_epoch, initial_epoch, virtual
            )
        else:
            feed = inputs
        if steps is not None:
            epochs = feed.epochs(steps)
        position = Position(model, backend, checkpoint is not None, initial_epoch)
        params = {
            "verbose": verbose,
            "epochs": epochs,
            "steps": steps_per_epoch or inputs.steps_per_epoch,
        }
        result = Result(position, params)
        hooks = RankZeroCallbacks(callbacks, position, params)
        observers, membership = _observers(
            position, result, inputs, hooks, timeline, checkpoint, ledger, virtual
        )
        if DesyncAlarm.is_needed(backend, check_every):
            observers.append(DesyncCheck(position, check_every))
        more: dict[str, Any] = {
            "maybe_empty": _maybe_empty(inputs, virtual, backend),
            "attachments": [a for o in reversed(observers) for a in o.attachments],
        }
        step: Any
        if own_step:
            more |= {"jit_compile": compiles, "sync_batch_norm": synchronizes}
            step = CustomStep(prepared, backend, inputs.spec, **more)
            for line in check_step(step, inputs, is_wanted(verify)):
                if backend.rank == 0 and str(verbose) != "0":
                    log.info(line)
        else:
            options = FitOptions(
                accumulate=accumulate,
                jit_compile=compiles,
                recompute=recompute,
                shard_optimizer=shard_optimizer,
                sync_batch_norm=synchronizes,
                virtual_replicas=virtual_replicas,
                seed=seed,
            )
            before = host_random.state()
            step = make_step(prepared, backend, inputs.spec, options, plan=plan, **more)
            drawn = host_random.differ(before, host_random.state())
            compare_graphs(backend, step.graph, drawn)
        validate = None
        if validation is not None:
            evaluation = make_evaluation(
                prepared, backend, validation, validation_steps, plan
            )
            validate = lambda: evaluation(hooks.hooks, position.epoch)  # noqa: E731

        log.debug(
            "backend %r (%s), %s; features: %s; plan of the step: %s; observers: %s",
            backend.name,
            backend.chosen_because,
            f"bucket_bytes={getattr(backend, 'bucket_bytes', None)}",
            ", ".join(sorted(asked | compatibility.of_backend(backend))) or "none",
            plan,
            ", ".join(type(observer).__name__ for observer in observers),
        )
        loop = Loop(
            position,
            step,
            feed,
            epochs,
            ENDLESS if steps is None else steps,
            observers,
            validate,
            lambda epoch: keras_compat.is_validated(model, epoch, validation_freq),
        )
        with runs_eagerly(model):
            if membership is not None:
                membership.run(loop)
                result.repeat_afterwards(membership.repeat)
            else:
                loop.run()
        if virtual is not None:
            result.gather_state_sha256()
        model.history = result
        if checkpoint is not None and checkpoint.raises:
            checkpoint.raise_if_failed()
        return result


def _inputs(
    given: FitData,
    backend: Backend,
    virtual: VirtualReplicas | None,
    steps_per_epoch: int | None,
    seed: int | None,
    shuffle: bool | str,
    ledger: Any,
) -> Input | Batches:
    """Which rows make a global batch."""
    if not isinstance(given.train, Source):
        return Batches(given.train, backend, steps_per_epoch, virtual)
    shuffle, seed = plan_shuffle(given.train, shuffle, seed, backend)
    return Input(
        given.train,
        given.batch_size,
        seed=seed,
        shuffle=shuffle,
        with_rows_read=ledger is not None,
        with_checksums=backend.size > 1 and not backend.elastic,
    )


def _maybe_empty(
    inputs: Input | Batches, virtual: VirtualReplicas | None, backend: Backend
) -> bool:
    """Whether a batch may have fewer rows than the pieces that it is cut into."""
    if isinstance(inputs, Batches):
        return True
    size = inputs.global_batch_size
    pieces = virtual.count if virtual else backend.most_replicas
    return (inputs.rows % size or size) < pieces


def _observers(
    position: Position,
    result: Result,
    inputs: Input | Batches,
    hooks: RankZeroCallbacks,
    timeline: str | None,
    checkpoint: Checkpoint | None,
    ledger: str | os.PathLike[str] | None,
    virtual: VirtualReplicas | None,
) -> tuple[list[Observer], Membership | None]:
    """The observers that were asked for, innermost first, and the state to start from.

    A timeline or a ledger has the step before callbacks can fail in it; a checkpoint
    has what they changed, and so has the state with which a rank leaves.
    """
    backend, params = position.backend, result.params
    observers: list[Observer] = [Heartbeat()]
    if timeline:
        observers.append(TimelineObserver(timeline, position))
    observers.append(TimingObserver(result.timing, position))
    before_write = None
    if ledger is not None and isinstance(inputs, Input):
        noting = LedgerObserver(ledger, position, inputs.plan)
        observers.append(noting)
        before_write = noting.sync
    observers.append(hooks)
    if not hooks.hooks.has_bar and str(params["verbose"]) != "0":
        # Behind the callbacks: it shows what they add to the logs.
        observers.append(ProgressBar(position, params["epochs"], params["verbose"]))
    membership = None
    if checkpoint is not None and isinstance(inputs, Input):
        plan = virtual.planned(inputs.plan) if virtual else inputs.plan
        training = describe_identity(inputs, position.model)
        checkpoint.attach(position, plan, before_write, training)
        observers.append(checkpoint)
    if backend.elastic and isinstance(inputs, Input):
        common = settings.describe(virtual) if virtual else {}
        membership = Membership(position, inputs, checkpoint, common)
        membership.handoff.find()
        observers.append(membership)
    if checkpoint is not None:
        checkpoint.find_start()
    return observers, membership
