"""Chooses the step of a training or evaluation, of which there are three kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collective.backends.base import Backend
from collective.fit_options import FitOptions
from collective.training.input.pipeline import Batch
from collective.training.model.kept import kept_as_compiled
from collective.training.model.prepared import PreparedModel
from collective.training.step import finite
from collective.training.step.attachments import Attachment
from collective.training.steps.own_rows_step import OwnRowsStep
from collective.training.steps.partitioned_step import PartitionedStep
from collective.training.steps.whole_step import WholeStep
from collective.training.virtual.pieces import VirtualReplicas

AnyStep = PartitionedStep | WholeStep | OwnRowsStep


def make_step(
    prepared: PreparedModel,
    backend: Backend,
    spec: Batch,
    options: FitOptions | None = None,
    *,
    method: str = "train_step",
    attachments: Sequence[Attachment] = (),
    expected_rows: int | None = None,
    is_stacked: bool = False,
) -> AnyStep:
    """Return the step of a model.

    Args:
        spec: ``Batch`` of ``tf.TensorSpec`` with an open first dimension.
        method: The model's method: ``train_step`` or ``test_step``.
        attachments: Further values that travel in the exchange.
        expected_rows: The number of rows that most batches have.
        is_stacked: Whether each row of ``spec`` is a whole batch, of which a replica has one.
    """
    options = options or FitOptions()
    if options.per_replica or not backend.synchronous:
        return OwnRowsStep(
            prepared,
            backend,
            spec,
            method=method,
            attachments=attachments,
            is_stacked=is_stacked,
            seed=options.seed,
        )
    if prepared.model.run_eagerly:
        return WholeStep(
            prepared,
            backend,
            spec,
            method=method,
            attachments=attachments,
            micro_batches=options.accumulate,
            seed=options.seed,
        )
    kept = _kept(prepared, backend)
    key = (
        (backend, method, repr(spec), expected_rows, options.accumulate),
        (options.virtual_replicas, finite.traced_for()),
    )
    step = kept.get(key)
    if step is not None and step.continue_with(prepared, attachments, options.seed):
        return step
    count = options.virtual_replicas
    kept[key] = step = PartitionedStep(
        prepared,
        backend,
        spec,
        method=method,
        attachments=attachments,
        expected_rows=expected_rows,
        micro_batches=options.accumulate,
        seed=options.seed,
        virtual=None if count is None else VirtualReplicas(count),
    )
    return step


def _kept(prepared: PreparedModel, backend: Backend) -> dict[Any, PartitionedStep]:
    """Return the steps that were traced for a model as it is compiled now, by their use."""
    is_plain = not (prepared.partition or prepared.placement or prepared.hook)
    if not is_plain or backend.tensor is not None:
        return {}
    return kept_as_compiled(prepared.model, "steps")
