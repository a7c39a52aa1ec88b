"""Chooses the parts of a training, once, by its options and the table of compatibility."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from collective.backends.base import Backend
from collective.fit_options import FitOptions
from collective.log import log
from collective.training.calls.training_data import TrainingData
from collective.training.compression import named, savings
from collective.training.input.batches import Batches
from collective.training.loop.observer import Observer
from collective.training.model.prepared import PreparedModel
from collective.training.preparation import compatibility
from collective.training.preparation.prepare import features_of
from collective.training.step.attachments import Attachment
from collective.training.steps.choose_step import AnyStep, make_step
from collective.training.steps.partitioned_step import PartitionedStep
from collective.training.verification import compare_graphs, deterministic
from collective.training.virtual import checks as virtual_checks


class Assembly:
    """The choices of one training.

    Raises:
        UsageError: On every rank alike: two features do not work together.
    """

    def __init__(self, options: FitOptions, backend: Backend):
        self.options = options
        self.backend = backend
        self.features = options.features  # those that are known so far
        if backend.most_replicas == 1:  # one replica has whole batches anyway
            self.features.discard("per_replica")
        # Compresses gradients. If None, they are summed uncompressed.
        self.hook = None if options.hook is None else named.make(options.hook)
        # The virtual replicas that share a batch. If None, the backend's replicas.
        self.virtual = virtual_checks.check_count(options.virtual_replicas, backend)
        self.require(set())

    def require(self, features: set[str]) -> None:
        """Add features, and refuse them if they do not work with the others."""
        self.features |= features
        compatibility.check(self.features, self.backend)

    @contextlib.contextmanager
    def numerics(self) -> Iterator[None]:
        """Have operations give the promised bits while the context is open."""
        if self.virtual is None:
            yield
            return
        deterministic.agree(self.virtual, self.backend)
        with deterministic.deterministic():
            yield

    def choose(self, prepared: PreparedModel, data: TrainingData) -> None:
        """Decide what depends on the model and the data; every rank calls it."""
        self.require(features_of(prepared.model))

    def step(
        self,
        prepared: PreparedModel,
        data: TrainingData,
        attachments: Sequence[Attachment],
    ) -> AnyStep:
        """Return the step, compared with the other ranks' step; every rank calls it."""
        options, backend = self.options, self.backend
        step = make_step(
            prepared,
            backend,
            data.spec,
            options,
            attachments=attachments,
            expected_rows=data.batch_rows,
            is_stacked=isinstance(data.inputs, Batches) and data.inputs.is_stacked,
        )
        self._warn(prepared)
        if isinstance(step, PartitionedStep):
            compare_graphs(backend, step.graph)
        return step

    def _warn(self, prepared: PreparedModel) -> None:
        """Warn about options that do not do what the user may expect."""
        if self.backend.rank != 0:
            return
        if prepared.hook is not None:
            log.warning(savings.warning(prepared.hook.hook, prepared.trainable))
        asked = self.options.jit_compile
        if prepared.model.jit_compile if asked is None else asked:
            say_not_compiled(log.warning if asked else log.info)

    def log(self, observers: Sequence[Observer]) -> None:
        """Write into the log what was chosen."""
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


@cache
def say_not_compiled(say: Callable[[str], None]) -> None:
    """Say once in a process, which may train many models, that XLA compiles no step."""
    say("jit_compile: XLA does not compile the step; it runs as TensorFlow's graph")
