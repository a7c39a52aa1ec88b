"""Chooses the parts of a training, once: the only module that knows every variant.

A step is local sums, exchange and update (``collective.training.step.parts``). The table
of compatibility has refused what does not go together before anything is chosen here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import tensorflow as tf

from collective.backends.base import Backend
from collective.fit_options import FitOptions
from collective.training import compatibility, keras_compat
from collective.training.evaluation.exact import BatchwiseEvaluation, Evaluation
from collective.training.input.batches import Batches
from collective.training.input.pipeline import Batch, Input
from collective.training.prepared import PreparedModel
from collective.training.step import look_ups
from collective.training.step.attachments import Attachment
from collective.training.step.draws import Draws
from collective.training.step.forward import Forward
from collective.training.step.local_sums import MicroBatches
from collective.training.step.metric_state import MetricState
from collective.training.step.parts import Exchange, LocalSums, Update
from collective.training.step.plan import StepPlan
from collective.training.step.reduction import AllReduce
from collective.training.step.report import Layout
from collective.training.step.step import Step
from collective.training.step.update import KerasUpdate
from collective.training.variants.coupled.checks import features as coupled_features
from collective.training.variants.coupled.evaluation import CoupledTestSums
from collective.training.variants.coupled.forward import (
    CoupledForward,
    keeps_activations,
)
from collective.training.variants.coupled.sums import CoupledSums
from collective.training.variants.custom_step.evaluation import CustomEvaluation
from collective.training.variants.memory.recompute import recompute_blocks
from collective.training.variants.memory.reduce_scatter import ReduceScatter
from collective.training.variants.memory.sharded_optimizer import (
    ShardedOptimizer,
    WholeGradients,
)
from collective.training.variants.parallel.exchange import ByRank
from collective.training.variants.virtual.exchange import TreeExchange
from collective.training.variants.virtual.pieces import VirtualReplicas
from collective.training.variants.virtual.sums import PieceSums


def make_step(
    prepared: PreparedModel,
    backend: Backend,
    spec: Batch,
    options: FitOptions | None = None,
    *,
    plan: StepPlan | None = None,
    maybe_empty: bool = True,
    attachments: Sequence[Attachment] = (),
) -> Step:
    """The step of a model that Keras' own ``train_step`` would train.

    Args:
        prepared: The model, with all of its variables.
        spec: ``Batch`` of ``tf.TensorSpec`` with an open first dimension.
        options: Of the training.
        plan: How it computes what is not a sum over rows.
        maybe_empty: Whether a replica may have a batch without rows.
        attachments: What else travels in the exchange.

    Raises:
        UsageError: Plan and options cannot be combined.
    """
    options, plan = options or FitOptions(), plan or StepPlan()
    optimizer = prepared.model.optimizer
    virtual = None
    if options.virtual_replicas is not None:
        virtual = VirtualReplicas(options.virtual_replicas)
    coupling = coupled_features(
        *(prepared.model, backend, plan, options.sync_batch_norm is True),
        cut=virtual is not None,
    )
    compatibility.check(coupling | options.features, backend)
    keras_compat.switch_off_gradient_sum(optimizer)
    if not backend.synchronous:
        keras_compat.count_atomically(optimizer)
    wide = any(v.dtype == "float64" for v in prepared.trainable)
    dtype = tf.float64 if wide else tf.float32
    local_sums: LocalSums
    if coupling:
        local_sums = _coupled_sums(prepared, backend, spec, options, plan, maybe_empty)
    else:
        local_sums = _micro_batches(prepared, backend, spec, options, maybe_empty)
    if virtual is not None:
        assert isinstance(local_sums, MicroBatches)
        local_sums = PieceSums(virtual, backend, local_sums, dtype)
    if backend.rank == 0 and not plan.gather_look_ups:
        combined = [prepared.trainable[i] for i in local_sums.traced.found.combined]
        look_ups.note(combined, optimizer)
    return Step(
        prepared,
        backend,
        spec,
        local_sums,
        _exchange(prepared, backend, virtual, dtype, attachments),
        _update(prepared, backend, virtual),
        attachments,
        Layout(prepared.model, plan.gather_metrics),
    )


def _micro_batches(
    prepared: PreparedModel,
    backend: Backend,
    spec: Batch,
    options: FitOptions,
    maybe_empty: bool,
) -> MicroBatches:
    """A pass over each micro-batch of a replica, or of a virtual one."""
    virtual, seed = options.virtual_replicas, options.seed
    pieces = virtual or backend.most_replicas
    if not backend.synchronous:  # workers do not share a batch, nor its draws
        seed, pieces = seed or 0, 1
    by_piece = virtual is not None or not backend.synchronous
    forward = Forward(
        prepared,
        Draws(prepared, seed, by_piece),
        (pieces, options.accumulate),
        recompute_blocks if options.recompute else None,
    )
    jit_compile = options.jit_compile is True
    return MicroBatches(
        backend, forward, spec, options.accumulate, maybe_empty, jit_compile
    )


def _coupled_sums(
    prepared: PreparedModel,
    backend: Backend,
    spec: Batch,
    options: FitOptions,
    plan: StepPlan,
    maybe_empty: bool,
) -> CoupledSums:
    """A pass with collectives over all rows of a replica."""
    draws, pieces = Draws(prepared, options.seed), (backend.most_replicas, 1)
    recompute = partial(recompute_blocks, apart=keeps_activations)
    make = partial(
        CoupledForward,
        *(prepared, draws, pieces, recompute if options.recompute else None, plan),
    )
    return CoupledSums(
        backend,
        Forward(prepared, draws, pieces),
        make,
        spec,
        metrics=MetricState(prepared.model) if plan.gather_metrics else None,
        sync_batch_norm=options.sync_batch_norm is True,
        maybe_empty=maybe_empty,
        jit_compile=options.jit_compile is True,
    )


def _exchange(
    prepared: PreparedModel,
    backend: Backend,
    virtual: VirtualReplicas | None,
    dtype: tf.DType,
    attachments: Sequence[Attachment],
) -> Exchange:
    if virtual is not None:
        return TreeExchange(virtual, backend, dtype)
    if isinstance(prepared.partition, ShardedOptimizer):
        return ReduceScatter(backend, dtype, prepared.partition)
    if backend.tensor is not None:
        return ByRank(backend, dtype, backend.tensor, attachments)
    return AllReduce(backend, dtype)


def _update(
    prepared: PreparedModel, backend: Backend, virtual: VirtualReplicas | None
) -> Update:
    if prepared.partition is None:
        return KerasUpdate(prepared, backend)
    if virtual is not None:
        assert isinstance(prepared.partition, ShardedOptimizer)
        return WholeGradients(prepared.partition)
    return prepared.partition


def has_own_step(prepared: PreparedModel) -> bool:
    """Whether a model is evaluated by its own ``test_step``, or trained by its own."""
    own = ("train_step", "test_step")
    return any(keras_compat.overrides(prepared.model, method) for method in own)


def make_evaluation(
    prepared: PreparedModel,
    backend: Backend,
    inputs: Input | Batches,
    steps: int | None = None,
    plan: StepPlan | None = None,
) -> BatchwiseEvaluation:
    """The evaluation that a model needs.

    Args:
        steps: Batches, at most.
        plan: How it computes what is not a sum over rows.

    Raises:
        UsageError: The plan cannot be followed on this backend.
    """
    if has_own_step(prepared):
        return CustomEvaluation(prepared, backend, inputs, steps)
    if plan is None or not (plan.gather_loss or plan.gather_metrics):
        return Evaluation(prepared, backend, inputs, steps)
    compatibility.check({"coupled"}, backend)
    sums = CoupledTestSums(prepared, backend, plan)
    return Evaluation(prepared, backend, inputs, steps, sums)
