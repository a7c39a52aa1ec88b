"""A step of a script's own loop, which each rank runs on its rows of the batch.

The rows of a rank -> the script's code, its gradients summed (``hooks``)
-> one all-reduce of what it returns and writes besides -> what one process has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from collective.errors import CollectiveError
from collective.training import keras_compat
from collective.training.failure import guarded
from collective.training.step import layer_state
from collective.training.traced import traced
from collective.training.unedited.job import LOOP, Job
from collective.training.unedited.loops import rows
from collective.training.unedited.loops.hooks import (
    LoopHooks,
    gather_rows,
)
from collective.training.unedited.loops.rows import Piece
from collective.training.unedited.loops.writes import live_metrics, recorded_writes
from collective.training.variants.custom_step.replica import OrderedSums
from collective.training.variants.custom_step.share import Share
from collective.training.written import written_variables

OTHER_DRAWS = "%s has %s: its numbers are not those of one process"
# What becomes of a value that leaves a step: by which it is that of the whole batch.
GLOBAL, METRIC, ROWS, MEAN, SUM = "global", "metric", "rows", "mean", "sum"


#: The outputs; the sum of the ranks' fingerprints of the batch, and this rank's.
Reduced = tuple[list[Any], Any, Any]


class Plan(NamedTuple):
    """What the first call of a step has shown."""

    rows: list[int]  # indices of the inputs that are rows
    sums_over_rows: bool  # whether gradients of ranks are added, not averaged
    rules: list[str]  # for each output how it becomes that of the whole batch
    certain: bool  # False: a rule was chosen by numbers that fit several


@dataclass(eq=False)
class LocalRun:
    """What the script's code returned for some rows."""

    outputs: Any  # as it returned them
    leaves: list[Any]  # the same, flat
    # The metric whose result a leaf is, by index.
    sources: dict[int, keras_compat.Source]
    summed: set[int]  # indices of leaves that are global gradients
    updated: set[int]  # ids of variables that optimizers have written


@dataclass(eq=False, repr=False)  # TensorFlow's warnings show it
class RowStep:
    """A function of a batch."""

    job: Job
    function: Callable[[Any], Any]  # takes the inputs, a tree, as one argument
    name: str  # for messages
    in_graph: bool  # whether it is traced, as a ``tf.function`` is
    agree: Callable[[RowStep, Any], Plan]  # ``check.agree``
    # Of the flat inputs, which may be rows; None: all.
    may_be_rows: Callable[[Any], list[int]] | None = None
    plan: Plan | None = None
    sums: OrderedSums = field(init=False)
    calls: int = 0

    def __post_init__(self) -> None:
        self.sums = OrderedSums(self.job.backend)
        self._traced = traced(self._in_graph)

    def __call__(self, inputs: Any) -> Any:
        """Runs it on this rank's rows; the outputs are those of the whole batch."""
        with running(), guarded(self.job.backend):
            if self.plan is None or not self.plan.certain:
                with self.job.calling(LOOP):
                    self.plan = self.agree(self, inputs)
            self.calls += 1
            number = tf.constant(self.calls, tf.int64)
            run = self._traced if self.in_graph else self._eagerly
            leaves, total, own = run(inputs, number)
            self._check_same_rows(float(total), float(own))
            for other in self._others:
                self.job.warn_once(self.name, OTHER_DRAWS, other)
            return tf.nest.pack_sequence_as(self._run.outputs, self._restored(leaves))

    def _check_same_rows(self, total: float, own: float) -> None:
        """Raises CollectiveError where ranks were given batches of different rows.

        Args:
            total: The sum of the ranks' fingerprints.
            own: This rank's.
        """
        size, rank = self.job.backend.size, self.job.backend.rank
        if abs(total - size * own) > 1e-9 * size * max(abs(own), abs(total) / size):
            raise CollectiveError(
                f"ranks have different rows in the same batch: call {self.calls} of "
                f"{self.name} (on rank {rank} their fingerprint is {own:.12g}, the mean "
                f"of all ranks is {total / size:.12g})",
                hint="read and shuffle data alike on every rank: seeds, and no "
                "deterministic=False in tf.data",
            )

    def _eagerly(self, inputs: Any, number: tf.Tensor) -> Reduced:
        assert self.plan is not None
        leaves = tf.nest.flatten(inputs)
        own, piece = rows.cut(leaves, self.plan.rows, self.job.backend, number)
        with recorded_writes() as written:
            self._run = run = self.local(
                inputs,
                self.plan.rows,
                own,
                piece.share,
                piece,
                self.plan.sums_over_rows,
            )
        writes = [w for w in written.values() if _is_summed(w.variable, run.updated)]
        variables = [w.variable for w in writes]
        before = [w.before for w in writes]
        after = [tf.identity(v) for v in variables]
        fingerprint = rows.fingerprint(leaves, self.plan.rows)
        return self.reduce(
            run.leaves, run, variables, before, after, piece, fingerprint
        )

    def _in_graph(self, inputs: Any, number: tf.Tensor) -> Reduced:
        assert self.plan is not None
        plan, leaves = self.plan, tf.nest.flatten(inputs)
        own, piece = rows.cut(leaves, plan.rows, self.job.backend, number)
        own = [tf.convert_to_tensor(t) for t in own]

        def local(own: list[tf.Tensor], share: Share) -> list[Any]:
            self._run = self.local(
                inputs, plan.rows, own, share, piece, plan.sums_over_rows
            )
            return [leaf if _is_tensor(leaf) else () for leaf in self._run.leaves]

        in_graph = traced(local).get_concrete_function(own, piece.share)
        run = self._run
        written = written_variables(in_graph.graph)
        variables = [v for v in written if _is_summed(v, run.updated, self.sums)]
        before = [tf.identity(v) for v in variables]
        with tf.control_dependencies(before):
            own = [tf.identity(t) for t in own]
        found = in_graph(own, piece.share)
        after = [tf.identity(v) for v in variables]
        fingerprint = rows.fingerprint(leaves, plan.rows)
        return self.reduce(found, run, variables, before, after, piece, fingerprint)

    def local(
        self,
        inputs: Any,
        indices: Sequence[int],
        own: Sequence[Any],
        share: Share,
        piece: Piece,
        sums_over_rows: bool,
    ) -> LocalRun:
        """The script's code on some rows; its gradients are summed.

        Args:
            share: That of the piece, in the graph that is traced.
        """
        hooks = LoopHooks(self.sums, share, sums_over_rows)
        given = rows.put(tf.nest.flatten(inputs), indices, own)
        metrics = live_metrics()
        with (
            keras_compat.intercept(hooks, metrics) as results,
            hooks.on_own_rows(piece) as others,
        ):
            outputs = self.function(tf.nest.pack_sequence_as(inputs, given))
        self._others = others
        return local_run(outputs, results, hooks.summed, hooks.updated)

    def reduce(
        self,
        leaves: Sequence[Any],
        run: LocalRun,
        variables: Sequence[tf.Variable],
        before: Sequence[tf.Tensor],
        after: Sequence[tf.Tensor],
        piece: Piece,
        fingerprint: tf.Tensor,
    ) -> Reduced:
        """Makes outputs and variables those of the whole batch."""
        assert self.plan is not None
        rules, share = self.plan.rules, piece.share
        metrics = {
            id(v)
            for m in live_metrics()
            for v in map(keras_compat.tf_variable, m.variables)
        }
        changes = [
            share.if_any(change) if id(variable) in metrics else share.of(change)
            for variable, change in zip(
                variables, map(_change, before, after), strict=True
            )
        ]
        scalars = [i for i, rule in enumerate(rules) if rule in (MEAN, SUM)]
        values = [
            (share.of if rules[i] == MEAN else share.if_any)(
                tf.cast(leaves[i], tf.float64)
            )
            for i in scalars
        ]
        *totals, fingerprints = self.sums([*changes, *values, fingerprint])
        for variable, old, total in zip(variables, before, totals, strict=False):
            variable.assign(layer_state.updated(old, total))
        result = list(leaves)
        for i, total in zip(scalars, totals[len(changes) :], strict=True):
            result[i] = tf.cast(total, tf.as_dtype(_dtype(leaves[i])))
        for i, rule in enumerate(rules):
            if rule == ROWS:
                own = tf.convert_to_tensor(leaves[i])[: piece.rows]
                result[i] = gather_rows(self.sums, own, piece.start, piece.total)
            if rule == METRIC:
                source = run.sources[i]
                result[i] = tf.convert_to_tensor(source.part(source.metric.result()))
        return result, fingerprints, fingerprint

    def _restored(self, leaves: Sequence[Any]) -> list[Any]:
        """The outputs, each of the type that the script's code has returned."""
        return [
            _as_type_of(given, leaf)
            for given, leaf in zip(self._run.leaves, leaves, strict=True)
        ]


def local_run(
    outputs: Any,
    results: keras_compat.Results,
    summed: dict[int, Any],
    updated: set[int],
) -> LocalRun:
    """What is known of outputs, just returned."""
    leaves = tf.nest.flatten(outputs)
    found = {i: results[id(v)][1] for i, v in enumerate(leaves) if id(v) in results}
    sums = {i for i, leaf in enumerate(leaves) if id(leaf) in summed}
    return LocalRun(outputs, leaves, found, sums, updated)


_running = False


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Around a step: inside, no other step begins."""
    global _running
    before, _running = _running, True
    try:
        yield
    finally:
        _running = before


def is_running() -> bool:
    """Whether a step runs, or is traced."""
    return _running


def is_numeric(leaf: Any) -> bool:
    """Whether an output is a number or numbers that depend on rows."""
    if isinstance(leaf, tf.Tensor):
        return bool(
            leaf.dtype.is_floating or leaf.dtype.is_integer or leaf.dtype.is_bool
        )
    return isinstance(leaf, float | np.ndarray | np.generic)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor | tf.IndexedSlices)


def _dtype(leaf: Any) -> Any:
    return getattr(leaf, "dtype", tf.float64)


def _as_type_of(given: Any, leaf: Any) -> Any:
    if isinstance(leaf, tuple) and not leaf:  # it left the graph as nothing
        return given
    if isinstance(given, np.ndarray | np.generic) and isinstance(leaf, tf.Tensor):
        array = leaf.numpy()
        return array if isinstance(given, np.ndarray) else array[()]
    return float(leaf) if isinstance(given, float) else leaf


def _change(before: tf.Tensor, after: tf.Tensor) -> tf.Tensor:
    return tf.cast(after, tf.float64) - tf.cast(before, tf.float64)


def _is_summed(
    variable: tf.Variable, updated: set[int], sums: OrderedSums | None = None
) -> bool:
    """Whether ranks may have written different values."""
    if id(variable) in updated or (sums and variable is sums.order):
        return False
    dtype = variable.dtype
    number = dtype.is_floating or dtype.is_integer or dtype.is_bool
    return number and keras_compat.SEED_STATE not in variable.name
