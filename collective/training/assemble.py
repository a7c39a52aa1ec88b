"""Chooses the parts of a training, once, by its options and the table of compatibility."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from collective.backends.base import Backend
from collective.fit_options import FitOptions
from collective.log import log
from collective.training import compatibility
from collective.training.compression import named, report
from collective.training.evaluation.evaluation import Evaluation
from collective.training.input.batches import Batches
from collective.training.input.pipeline import Batch, Input
from collective.training.loop.observer import Observer
from collective.training.partition.step import PartitionedStep
from collective.training.partition.whole import WholeStep
from collective.training.prepare import features_of
from collective.training.prepared import PreparedModel
from collective.training.step.attachments import Attachment
from collective.training.training_data import TrainingData
from collective.training.verification import compare_graphs
from collective.training.virtual import checks as virtual_checks
from collective.training.virtual import settings
from collective.training.virtual.pieces import VirtualReplicas


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

    def step(
        self,
        prepared: PreparedModel,
        data: TrainingData,
        attachments: Sequence[Attachment],
    ) -> PartitionedStep | WholeStep:
        """The step, compared with that of the other ranks; every rank calls it."""
        options, backend = self.options, self.backend
        self.require(features_of(prepared.model))
        step = make_step(
            prepared,
            backend,
            data.spec,
            options,
            attachments=attachments,
            expected_rows=data.batch_rows,
        )
        self._warn(prepared)
        if isinstance(step, PartitionedStep):
            compare_graphs(backend, step.graph)
        return step

    def _warn(self, prepared: PreparedModel) -> None:
        """Says what a training does not have as it was asked for."""
        if self.backend.rank != 0:
            return
        if prepared.hook is not None:
            log.warning(report.warning(prepared.hook.hook, prepared.trainable))
        asked = self.options.jit_compile
        if prepared.model.jit_compile if asked is None else asked:
            (log.warning if asked else log.info)(
                "jit_compile: XLA does not compile the step; it runs as TensorFlow's graph"
            )

    def log(self, observers: Sequence[Observer]) -> None:
        """Says in the log what was chosen."""
        backend = self.backend
        features = self.features | compatibility.of_backend(backend)
        log.debug(
            "backend %r (%s), %s; features: %s; observers: %s",
            backend.name,
            backend.chosen_because,
            f"bucket_bytes={getattr(backend, 'bucket_bytes', None)}",
            ", ".join(sorted(features)) or "none",
            ", ".join(type(observer).__name__ for observer in observers),
        )


def make_step(
    prepared: PreparedModel,
    backend: Backend,
    spec: Batch,
    options: FitOptions | None = None,
    *,
    attachments: Sequence[Attachment] = (),
    expected_rows: int | None = None,
) -> PartitionedStep | WholeStep:
    """The step of a model.

    Args:
        spec: ``Batch`` of ``tf.TensorSpec`` with an open first dimension.
        attachments: What else travels in the exchange.
        expected_rows: How many rows a batch mostly has.
    """
    options = options or FitOptions()
    if prepared.model.run_eagerly:
        return WholeStep(
            *(prepared, backend, spec),
            attachments=attachments,
            micro_batches=options.accumulate,
            seed=options.seed,
        )
    count = options.virtual_replicas
    return PartitionedStep(
        prepared,
        backend,
        spec,
        attachments=attachments,
        expected_rows=expected_rows,
        micro_batches=options.accumulate,
        seed=options.seed,
        virtual=None if count is None else VirtualReplicas(count),
    )


def make_evaluation(
    prepared: PreparedModel,
    backend: Backend,
    inputs: Input | Batches,
    steps: int | None = None,
) -> Evaluation:
    """The evaluation of a model."""
    return Evaluation(prepared, backend, inputs, steps)
