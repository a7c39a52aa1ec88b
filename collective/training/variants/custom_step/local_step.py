"""A user's own step on one replica's rows: traced, called, and what it has changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.input.pipeline import Batch
from collective.training.step.inputs import ReplicaRows, replica_rows
from collective.training.step.rows import Rows
from collective.training.variants.coupled import batch_norm
from collective.training.variants.coupled.replica import entered
from collective.training.variants.custom_step.additive import Additive
from collective.training.variants.custom_step.building import packed
from collective.training.variants.custom_step.replica import (
    ApplyBy,
    OrderedReplica,
    OrderedSums,
    ReplicaHooks,
)
from collective.training.variants.custom_step.share import Share
from collective.training.written import following, written_variables

Logs = dict[str, tf.Tensor]
#: From the sums, the share of the replica, and what applies gradients.
MakeHooks: TypeAlias = Callable[..., ReplicaHooks]


class Contribution(NamedTuple):
    """What a replica adds to the sums over replicas."""

    logs: Logs  # as the step has returned them
    # Changes of state, and of the metrics' variables, in float64; and returned values
    # that are not a metric's result, by name.
    sums: tuple[list[tf.Tensor], list[tf.Tensor], Logs]


@dataclass(eq=False)
class LocalStep:
    """Calls ``train_step`` or ``test_step`` of a model on one replica's rows."""

    model: keras.Model
    method: Callable[[Any], Any]
    sums: OrderedSums
    hooks: MakeHooks = ReplicaHooks  # makes what is done at the intercepted calls
    # Which numbers are sums over rows.
    additive: Additive = field(default_factory=Additive)
    # For each returned name, the metric whose result it is; None for others. Known
    # after the first call, as the next two.
    sources: dict[str, keras_compat.Source | None] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)  # see ``ReplicaHooks.paths``
    # The variables that the method writes, other than those of optimizers and metrics:
    # each replica may have another value afterwards.
    state: list[tf.Variable] = field(default_factory=list)
    # What it writes and every replica writes alike: states of random generators, and
    # what ``following`` finds.
    alike: list[tf.Variable] = field(default_factory=list)
    # What is drawn otherwise than in one process, a few words each.
    others: list[str] = field(default_factory=list)
    apply_by: ApplyBy | None = None  # as of ``ReplicaHooks``
    # Whether layers of batch normalization have the statistics of the whole global
    # batch.
    synchronizes: bool = False
    # Whether the method is traced in the graph of the whole step: replicas of one
    # process cannot meet in another one. Then ``note_written`` is called with that
    # graph, and the step is traced again.
    inline: bool = False
    _updated: set[int] = field(default_factory=set)

    def rows(self, batch: Batch, replica: tf.Tensor) -> ReplicaRows:
        """Inside ``Backend.run``: the rows of a replica, out of its process'."""
        return replica_rows(self.sums.backend, batch, replica)

    def trace(self, rows: Rows, share: Share) -> Callable[[Rows, Share], Logs]:
        """Traces the method inside the current graph; call the result there.

        Where a model that runs eagerly trains, nothing is traced: it has been, once.
        """
        if tf.executing_eagerly() or self.inline:
            return self
        function = tf.function(self.__call__, autograph=False)
        traced = function.get_concrete_function(rows, share)
        self.note_written(traced.graph)
        return lambda rows, share: traced(rows, share)

    def contribution(
        self,
        call: Callable[..., Any],
        rows: Rows,
        share: Share,
        before: Sequence[tf.Tensor],
    ) -> Contribution:
        """Runs the method on the rows of a replica.

        Args:
            call: As of ``trace``.
            before: Values of ``state``, then of ``metrics``.
        """
        return self.changes(call(rows, share), share, before)

    def totals(self, sums: Any, attached: Any) -> tuple[Any, Any]:
        """The sums over replicas; those of attached tensors are in float64."""
        local = sums, attached
        flat = tf.nest.flatten(local)
        if self.is_whole or not flat:
            return local
        found: tuple[Any, Any] = tf.nest.pack_sequence_as(local, self.sums(flat))
        return found

    @property
    def is_whole(self) -> bool:
        """Whether a call leaves what it would leave on the rows of the global batch."""
        return self.sums.backend.most_replicas == 1

    def changes(
        self, logs: Logs, share: Share, before: Sequence[tf.Tensor]
    ) -> Contribution:
        """After a call on the rows of a share: what it has changed since ``before``."""
        after = [tf.identity(v) for v in [*self.state, *self.metrics]]
        changes = [
            tf.cast(new, tf.float64) - tf.cast(old, tf.float64)
            for new, old in zip(after, before, strict=True)
        ]
        states, metrics = changes[: len(self.state)], changes[len(self.state) :]
        others, weighed = self.others_of(logs), self.additive.weighed
        for i, change in enumerate(states):
            self.additive.record(("state", i), share, [change])
        for name in others:
            self.additive.record(("log", name), share, [logs[name]])
        sums = (
            [weighed(("state", i), share, c) for i, c in enumerate(states)],
            [share.if_any(change) for change in metrics],
            {n: weighed(("log", n), share, logs[n], tf.float64) for n in others},
        )
        return Contribution(logs, sums)

    def others_of(self, logs: Logs) -> list[str]:
        """The returned values that are not a metric's result."""
        return [name for name in logs if self.sources[name] is None]

    def __call__(self, rows: Rows, share: Share) -> Logs:
        """The method on these rows; what it returned, by name."""
        return self.with_hooks(self.hooks(self.sums, share, self.apply_by), rows)

    def with_hooks(self, hooks: ReplicaHooks, rows: Rows) -> Logs:
        """The method on these rows, with these hooks."""
        hooks.additive = self.additive.begin()
        if tf.executing_eagerly() and self.inline:
            share = hooks.share
            keras_compat.move_noise(int(share.first_row), int(share.rows))
        drawing, normalizing = hooks.drawing(rows), self._normalizing(hooks.share)
        intercepted = keras_compat.intercept(hooks, self.model.metrics)
        whole, kept = keras_compat.whole_losses(), keras_compat.own_losses(self.model)
        with drawing as self.others, normalizing, whole, kept, intercepted as results:
            logs = self.method(packed(rows))
            if not isinstance(logs, dict):
                raise UsageError(
                    f"{self.method.__name__} of model {self.model.name!r} returned "
                    f"{type(logs).__name__}, not a dict",
                    hint="return {m.name: m.result() for m in self.metrics}",
                )
        logs = flat_logs(logs)
        sources = {n: results.get(id(value)) for n, value in logs.items()}
        self.sources = {n: found and found[1] for n, found in sources.items()}
        self.paths, self._updated = hooks.paths, hooks.updated
        return {name: tf.convert_to_tensor(value) for name, value in logs.items()}

    @property
    def metrics(self) -> list[tf.Variable]:
        """The variables of the model's metrics."""
        return [keras_compat.tf_variable(v) for v in self.model.metrics_variables]

    @contextlib.contextmanager
    def _normalizing(self, share: Share) -> Iterator[None]:
        """Around the method: batch normalization, if over all replicas."""
        if not self.synchronizes:
            yield
            return
        place = share.replica, share.rows, share.global_rows
        replica = OrderedReplica(
            self.sums.backend, *place, maybe_empty=True, sums=self.sums, share=share
        )
        with entered(replica), batch_norm.synchronized(True):
            yield

    def note_written(self, graph: Any) -> None:
        """Notes the state that a traced call writes."""
        equal = self._updated | {id(v) for v in [self.sums.order, *self.metrics]}
        written = written_variables(graph)
        if self.inline:  # with one for each replica of this process
            whole = map(keras_compat.with_copies, written)
            written = list({id(v): v for v in whole}.values())
        written = [v for v in written if id(v) not in equal]
        self.alike = [v for v in written if keras_compat.SEED_STATE in v.name]
        if not self.inline:  # there other graphs inside this one run the method
            self.alike += following(graph, written, self._updated)
        alike = {id(v) for v in self.alike}
        self.state = [v for v in written if id(v) not in alike and _is_summed(v)]

    @property
    def written(self) -> list[tf.Variable]:
        """What the method writes, other than variables of optimizers and metrics."""
        return [*self.state, *self.alike]


def flat_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returned values by name, as Keras shows them: a metric's result may be a dict.

    As that of all compiled metrics is, in ``{m.name: m.result() for m in self.metrics}``.
    """
    found: dict[str, Any] = {}
    for name, value in logs.items():
        found |= flat_logs(value) if isinstance(value, Mapping) else {name: value}
    return found


def _is_summed(variable: tf.Variable) -> bool:
    """Texts and handles have no sum."""
    dtype = variable.dtype
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_bool)
