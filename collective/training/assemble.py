"""Chooses the parts of a training, once: the module that knows every variant.

``Assembly`` reads the options of a training and the table of compatibility. A step is
local sums, exchange and update (``collective.training.step.parts``): ``make_step`` takes
one of each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.fit_options import FitOptions
from collective.log import log
from collective.training import compatibility, host_random, keras_compat
from collective.training.compression import named, report
from collective.training.evaluation.exact import BatchwiseEvaluation, Evaluation
from collective.training.evaluation.partitioned import PartitionedEvaluation
from collective.training.input.batches import Batches
from collective.training.input.pipeline import Batch, Input
from collective.training.loop.observer import Observer
from collective.training.partition.method import has_numbers, supports
from collective.training.partition.step import PartitionedStep
from collective.training.prepare import features_of
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
from collective.training.training_data import TrainingData
from collective.training.variables import dtype_of_sums
from collective.training.variants.coupled import batch_norm
from collective.training.variants.coupled import look_ups as coupled_look_ups
from collective.training.variants.coupled import pieces as coupled_pieces
from collective.training.variants.coupled.checks import features as coupled_features
from collective.training.variants.coupled.evaluation import CoupledTestSums
from collective.training.variants.coupled.forward import CoupledForward
from collective.training.variants.coupled.micro_batches import CoupledMicroBatches
from collective.training.variants.coupled.sums import CoupledSums
from collective.training.variants.custom_step import own_batches
from collective.training.variants.custom_step.check import check_step
from collective.training.variants.custom_step.evaluation import CustomEvaluation
from collective.training.variants.custom_step.step import CustomStep
from collective.training.variants.memory.sharded_optimizer import (
    ReduceScatter,
    ShardedOptimizer,
    WholeGradients,
)
from collective.training.variants.parallel.partition import ByRank
from collective.training.variants.virtual import checks as virtual_checks
from collective.training.variants.virtual import settings
from collective.training.variants.virtual.pieces import VirtualReplicas
from collective.training.variants.virtual.sums import PieceSums, TreeExchange
from collective.training.verification import compare_graphs, is_wanted, verify_step


class Assembly:
    """The choices of one training.

    Args:
        features: That it has besides, by their names in the table of compatibility.

    Raises:
        UsageError: On every rank alike: two of them do not work together.
    """

    def __init__(self, options: FitOptions, backend: Backend, features: set[str]):
        self.options = options
        self.backend = backend
        self.features = options.features  # all that are known
        if backend.most_replicas == 1:  # which has whole batches as it is
            self.features.discard("per_replica")
        # Compresses gradients; None: they are summed as they are.
        self.hook = None if options.hook is None else named.make(options.hook)
        # The virtual replicas that share a batch; None: the backend's replicas.
        self.virtual = virtual_checks.check_count(options.virtual_replicas, backend)
        self.require(features)

    def require(self, features: set[str]) -> None:
        """Adds features, and refuses what does not work with the others."""
        self.features |= features
        compatibility.check(self.features, self.backend)

    @contextlib.contextmanager
    def numerics(self) -> Iterator[None]:
        """Around the training: operations give the bits that were promised."""
        if self.virtual is None:
            yield
            return
        settings.agree(self.virtual, self.backend)
        with settings.deterministic():
            yield

    def choose(
        self, prepared: PreparedModel, data: TrainingData, verbose: str | int
    ) -> StepPlan:
        """Decides what was left open; every rank calls it.

        Returns:
            How the step computes what is not a sum over rows.
        """
        if self.is_partitioned(prepared, data):
            return StepPlan()
        self.require(features_of(prepared.model))
        options, backend, features = self.options, self.backend, self.features
        per_replica = own_batches.chosen(
            options.per_replica, prepared.model, backend, data.replica_rows
        )
        wanted = options.sync_batch_norm
        self.options = options = dataclasses.replace(
            options,
            per_replica=per_replica,
            sync_batch_norm=batch_norm.chosen(
                False if per_replica and wanted == "auto" else wanted,
                *(prepared, backend, features),
            ),
        )
        own_step = keras_compat.overrides(prepared.model, "train_step")
        plan = verify_step(
            prepared,
            backend,
            data.inputs,
            data.validation,
            accumulate=options.accumulate,
            seed=options.seed,
            sync_batch_norm=options.sync_batch_norm is True,
            enabled=bool(options.verify)
            and not own_step,  # that one has a check of its own
            verbose=verbose,
            virtual=self.virtual,
        )
        # Of virtual replicas, tables travel whole.
        rows = data.batch_rows if self.virtual is None else None
        choice = options.embedding_gradients
        return coupled_look_ups.planned(plan, choice, prepared, backend, rows, features)

    def step(
        self,
        prepared: PreparedModel,
        data: TrainingData,
        plan: StepPlan,
        attachments: Sequence[Attachment],
        verbose: str | int,
    ) -> Step | CustomStep | PartitionedStep:
        """The step, compared with that of the other ranks; every rank calls it."""
        options, backend = self.options, self.backend
        self._warn(prepared)
        if self.is_partitioned(prepared, data):
            partitioned = PartitionedStep(
                prepared,
                backend,
                data.spec,
                attachments=attachments,
                expected_rows=data.batch_rows,
                micro_batches=options.accumulate,
                seed=options.seed,
            )
            compare_graphs(backend, partitioned.graph, False)
            return partitioned
        if prepared.hook is not None:
            raise UsageError(
                f"hook {prepared.hook.hook!r}: this step does not sum its gradients in a "
                f"way that a hook sees (backend {backend.name!r})",
                hint=f"drop --hook; or {compatibility.ONE_EACH}",
            )
        if keras_compat.overrides(prepared.model, "train_step"):
            custom = CustomStep(
                prepared,
                backend,
                data.spec,
                maybe_empty=data.maybe_empty(options.accumulate),
                accumulate=options.accumulate,
                gather_look_ups=plan.gather_look_ups,
                attachments=attachments,
                sync_batch_norm=options.sync_batch_norm is True,
                per_replica=options.per_replica,
                virtual=self.virtual,
            )
            compared = is_wanted(bool(options.verify)) and not options.per_replica
            for line in check_step(custom, data.inputs, compared):
                if backend.rank == 0 and str(verbose) != "0":
                    log.info(line)
            return custom
        before = host_random.state()
        step = make_step(
            prepared,
            backend,
            data.spec,
            options,
            plan=plan,
            maybe_empty=data.maybe_empty(),
            attachments=attachments,
        )
        drawn = host_random.drawn_since(before)
        compare_graphs(backend, step.graph, drawn)
        return step

    def _warn(self, prepared: PreparedModel) -> None:
        """Says what a training does not have as it was asked for."""
        if self.backend.rank != 0:
            return
        if prepared.hook is not None:
            log.warning(report.warning(prepared.hook.hook, prepared.trainable))
        asked = self.options.jit_compile
        if prepared.model.jit_compile if asked is None else asked:
            _say_not_compiled(log.warning if asked else log.info)

    def is_partitioned(self, prepared: PreparedModel, data: TrainingData) -> bool:
        """Whether Keras' own step is partitioned; else its parts are made again."""
        options, backend, model = self.options, self.backend, prepared.model
        others = (
            self.virtual,
            prepared.partition,
            options.per_replica,
            backend.tensor,
            backend.stages,
            model.run_eagerly,
        )
        return is_possible(backend, data.spec) and not any(others)

    def log(self, plan: StepPlan, observers: Sequence[Observer]) -> None:
        """Says in the log what was chosen."""
        backend = self.backend
        features = self.features | compatibility.of_backend(backend)
        log.debug(
            "backend %r (%s), %s; features: %s; plan of the step: %s; observers: %s",
            backend.name,
            backend.chosen_because,
            f"bucket_bytes={getattr(backend, 'bucket_bytes', None)}",
            ", ".join(sorted(features)) or "none",
            plan,
            ", ".join(type(observer).__name__ for observer in observers),
        )


@cache
def _say_not_compiled(say: Callable[[str], None]) -> None:
    """Once in a process, which may train many models."""
    say("jit_compile: XLA does not compile the step; it runs as TensorFlow's graph")


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
        spec: ``Batch`` of ``tf.TensorSpec`` with an open first dimension.
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
    dtype = dtype_of_sums(prepared.trainable)
    local_sums: LocalSums
    if coupling:
        if virtual is not None:
            plan = coupled_pieces.planned(plan)
        local_sums = _coupled_sums(prepared, backend, spec, options, plan, maybe_empty)
    else:
        local_sums = _micro_batches(prepared, backend, spec, options, plan, maybe_empty)
        if virtual is not None:
            local_sums = PieceSums(virtual, backend, local_sums, dtype)
    if backend.rank == 0 and not plan.gather_look_ups:
        combined = [prepared.trainable[i] for i in local_sums.traced.found.combined]
        look_ups.note(combined, optimizer)
    exchange = _exchange(prepared, backend, virtual, dtype, attachments)
    update = _update(prepared, backend, virtual)
    return Step(
        prepared,
        backend,
        spec,
        local_sums,
        exchange,
        update,
        attachments,
        Layout(prepared.model, plan.gather_metrics),
    )


def _micro_batches(
    prepared: PreparedModel,
    backend: Backend,
    spec: Batch,
    options: FitOptions,
    plan: StepPlan,
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
        None,
        plan,
    )
    return MicroBatches(backend, forward, spec, options.accumulate, maybe_empty, False)


def _coupled_sums(
    prepared: PreparedModel,
    backend: Backend,
    spec: Batch,
    options: FitOptions,
    plan: StepPlan,
    maybe_empty: bool,
) -> LocalSums:
    """A pass with collectives over all rows of a replica, or its micro-batches."""
    count = options.virtual_replicas
    pieces = (count or backend.most_replicas, options.accumulate)
    draws = Draws(prepared, options.seed, by_piece=count is not None)
    if count is not None or options.accumulate > 1:
        kind: Callable[..., LocalSums] = CoupledMicroBatches
        if count is not None:
            virtual, dtype = VirtualReplicas(count), dtype_of_sums(prepared.trainable)
            kind = partial(coupled_pieces.CoupledPieces, virtual, dtype)
        return kind(
            *(prepared, backend, draws, pieces),
            None,
            *(plan, spec),
            maybe_empty=maybe_empty,
            jit_compile=False,
        )
    make = partial(CoupledForward, *(prepared, draws, pieces, None, plan))
    return CoupledSums(
        backend,
        Forward(prepared, draws, pieces, plan=plan),
        make,
        spec,
        metrics=MetricState(prepared.model) if plan.gather_metrics else None,
        sync_batch_norm=options.sync_batch_norm is True,
        maybe_empty=maybe_empty,
        jit_compile=False,
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
    prepared: PreparedModel,
    backend: Backend,
    virtual: VirtualReplicas | None,
) -> Update:
    if prepared.partition is None:
        return KerasUpdate(prepared, backend, False)
    if virtual is not None:
        assert isinstance(prepared.partition, ShardedOptimizer)
        return WholeGradients(prepared.partition)
    return prepared.partition


def has_own_step(prepared: PreparedModel) -> bool:
    """Whether a model is evaluated by its own ``test_step``, or trained by its own."""
    own = ("train_step", "test_step")
    return any(keras_compat.overrides(prepared.model, method) for method in own)


def is_possible(backend: Backend, spec: Batch) -> bool:
    """Whether a method of a model can be partitioned for batches on a backend."""
    wanted = os.environ.get("COLLECTIVE_PARTITION", "1") != "0"
    return wanted and supports(backend) and has_numbers(spec)


def can_evaluate(
    prepared: PreparedModel, backend: Backend, inputs: Input | Batches
) -> bool:
    """Whether the evaluation of a model can be partitioned."""
    model = prepared.model
    others: list[Any] = [prepared.partition, backend.tensor, backend.stages]
    others += [model.run_eagerly, own_batches.trained_with(model)]
    return is_possible(backend, inputs.spec) and not any(others)


def make_evaluation(
    prepared: PreparedModel,
    backend: Backend,
    inputs: Input | Batches,
    steps: int | None = None,
    plan: StepPlan | None = None,
) -> BatchwiseEvaluation:
    """The evaluation of a model; a UsageError where the backend cannot do it."""
    if can_evaluate(prepared, backend, inputs):
        return PartitionedEvaluation(prepared, backend, inputs, steps)
    if has_own_step(prepared):
        return CustomEvaluation(prepared, backend, inputs, steps)
    plan = plan or StepPlan()
    if not (plan.gather_loss or plan.gather_metrics or plan.whole_layers):
        return Evaluation(prepared, backend, inputs, steps, plan=plan)
    compatibility.check({"coupled"}, backend)
    sums = CoupledTestSums(prepared, backend, plan)
    return Evaluation(prepared, backend, inputs, steps, sums)
