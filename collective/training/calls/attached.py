"""Chooses the observers of a training: those that were asked for, and no others."""

from __future__ import annotations

import os
from dataclasses import asdict

from collective.fit_options import FitOptions
from collective.training.calls.training_data import TrainingData
from collective.training.input.pipeline import Input
from collective.training.loop.observer import Observer
from collective.training.loop.position import Position
from collective.training.loop.progress import Heartbeat, ProgressBar
from collective.training.loop.rank_zero_callbacks import RankZeroCallbacks
from collective.training.loop.result import Result
from collective.training.model.prepared import get_prepared
from collective.training.observers.checkpoint.identity import (
    describe as describe_identity,
)
from collective.training.observers.checkpoint.schedule import Checkpoint
from collective.training.observers.desync import DesyncAlarm
from collective.training.observers.elastic.membership import CallbackMemory, Membership
from collective.training.observers.ledger.observer import (
    AttachedReceipts,
    LedgerObserver,
)
from collective.training.observers.timeline import TimelineObserver
from collective.training.observers.timing import TimingObserver
from collective.training.verification import (
    StockRun,
    can_run_beside,
    deterministic,
    steps_beside,
)


def attach_observers(
    position: Position,
    result: Result,
    data: TrainingData,
    callbacks: RankZeroCallbacks,
    options: FitOptions,
    checkpoint: Checkpoint | None,
    ledger: str | os.PathLike[str] | None,
) -> tuple[list[Observer], Membership | None]:
    """Return the observers that were asked for, innermost first.

    This reads the state to start from, too; in an elastic job the membership reads it.

    A timeline and a ledger record a step before a callback can fail in it. A checkpoint, and
    the state with which a rank leaves, contain what the callbacks have changed.
    """
    backend, params = position.backend, result.params
    inputs, virtual = data.inputs, data.virtual
    observers: list[Observer] = [Heartbeat()]
    if options.timeline:
        observers.append(TimelineObserver(options.timeline, position))
    observers.append(TimingObserver(result.timing, position))
    before_write = None
    if ledger is not None and isinstance(inputs, Input):
        noting = LedgerObserver(
            ledger, position, inputs.plan, AttachedReceipts(backend)
        )
        observers.append(noting)
        before_write = noting.sync
    observers.append(callbacks)
    if backend.elastic:
        observers.append(CallbackMemory(callbacks.methods))
    if not callbacks.methods.has_bar and str(params["verbose"]) != "0":
        # After the callbacks, so that it shows the logs that they add.
        observers.append(ProgressBar(position, params["epochs"], params["verbose"]))
    membership = None
    plan = asdict(inputs.plan)
    if virtual is not None:
        plan["virtual_replicas"] = virtual.count
    common = deterministic.describe(virtual) if virtual is not None else {}
    if (hook := get_prepared(position.model).hook) is not None:
        plan["hook"] = common["hook"] = repr(hook.hook)
    if checkpoint is not None:
        training = describe_identity(inputs, position.model)
        checkpoint.attach(position, plan, before_write, training)
        observers.append(checkpoint)
    if backend.elastic:
        membership = Membership(position, inputs, plan, checkpoint, common)
        observers.append(membership)
    elif checkpoint is not None:
        checkpoint.find_start()
    prepared = get_prepared(position.model)
    beside = steps_beside(options.verify, backend)
    if beside and can_run_beside(prepared, backend):
        # Innermost: it compares the weights before callbacks change them.
        observers.insert(0, StockRun(prepared, backend, beside))
    if DesyncAlarm.is_needed(backend, options.check_every):
        observers.append(DesyncAlarm(position, options.check_every))
    return observers, membership
