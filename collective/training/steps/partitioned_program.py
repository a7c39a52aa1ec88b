"""One traced step, partitioned by the rows of a kind of batch, for this process.

Keras' step is traced once for the whole batch, as Keras itself would trace it. The graph
is then emitted for the rows of this process; see ``collective.training.partition``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from collective.backends.capabilities import LocalDevices
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.compression.compressed_exchange import HookExchange
from collective.training.compression.hook_state import HookState
from collective.training.input.plan import share
from collective.training.keras_compat.traced import traced
from collective.training.model.variables import captured_variables, written_variables
from collective.training.partition import devices, explain
from collective.training.partition.exchange import Message
from collective.training.partition.layouts import ROWS, WHOLE
from collective.training.partition.partition import Partition
from collective.training.partition.plans import Rows
from collective.training.partition.shares import Share
from collective.training.partition.timed_exchange import TimedExchange
from collective.training.partition.traffic import names_of_first_sum
from collective.training.sharding import held
from collective.training.steps import report
from collective.training.steps.mesh import over_model_axes
from collective.training.steps.program import KerasStep, Kind, Program
from collective.training.steps.settings import StepSettings


class PartitionedProgram(Program):
    """Keras' step for one kind of batch, partitioned by rows for this process.

    Args:
        step: Keras' step, with the model bound.
        model: Its model.
        kind: The batches that it serves.
        settings: The backend and the options of the training.
        checks: Whether a sum that is not finite is told, or ends the step: in training.
        reports: Whether the step also returns its report.
        expected: How many rows a batch mostly has, to weigh bytes by.
        make_hook: Returns what a communication hook keeps between steps, or None without
            a hook. It is called once the step is traced, so the model has its variables.
    """

    def __init__(
        self,
        step: KerasStep,
        model: keras.Model,
        kind: Kind,
        settings: StepSettings,
        *,
        checks: bool,
        reports: bool = False,
        expected: int | None = None,
        make_hook: Callable[[], HookState | None] = lambda: None,
    ):
        super().__init__(kind, settings, reports)
        self._checks = checks
        noted: list[tuple[Any, tf.Tensor]] = []

        def whole(*tensors: tf.Tensor) -> Any:
            with keras_compat.tracing.loss_of_step(model) as losses:
                outputs = step(kind.packed(tensors))
            return outputs, report.loss(losses, outputs) if self._reports else ()

        around = devices.on_first(model, settings.backend)
        with around, held.tracing(), keras_compat.calls.record_gradients(noted):
            self.source = traced(whole).get_concrete_function(*kind.whole_specs())
        gradients = [pair for pair in noted if pair[1].graph is self.source.graph]
        by_name = {tensor.name: variable for variable, tensor in reversed(gradients)}
        self.hook = make_hook()
        if self.hook is not None:
            self.hook.check(gradients)
        with held.tracing():
            self.mesh = over_model_axes(
                self.source, by_name, kind.cut, settings.backend
            )
        self._check_held()
        layouts = [ROWS if is_cut else WHOLE for is_cut in kind.cut]
        self.partition = Partition(
            self.mesh.function,
            layouts,
            self._rows(expected),
            self.mesh.gradients,
            self.mesh.placed,
            is_compiled=keras_compat.model.is_compiled(model),
        )
        self._names = [tensor.name for tensor in self.source.graph.outputs]
        self._run_overrun: Any = None

    def _check_held(self) -> None:
        """Refuse options that do not know that ranks hold variables in parts."""
        options = self.settings.options
        asked = {"virtual_replicas": options.virtual_replicas, "hook": options.hook}
        for name, value in asked.items():
            if value is not None and self.mesh.held:
                raise UsageError(
                    f"{name} does not work with variables that ranks hold in parts, as "
                    f"{self.mesh.held[0].path!r}",
                    hint=f"drop {name}; or the layout map, shard_weights or "
                    "shard_optimizer",
                )

    def _rows(self, expected: int | None) -> Rows:
        rows = self.kind.rows
        known = Rows.unknown(expected) if rows is None else Rows(rows, rows)
        whole = bool(self.settings.backend.rounds_to or self.settings.options.hook)
        return dataclasses.replace(known, whole_gradients=whole)

    @property
    def paths(self) -> Sequence[str]:
        """Return the paths of the variables of the first sum, in the order of numbers."""
        return names_of_first_sum(self.traffic)

    def overrun(self) -> None:
        """Make the writes of a step that has no batch; see ``Program.overrun``."""
        if self._run_overrun is None:
            self._run_overrun = traced(self._without_rows)
        self.settings.backend.call(self._run_overrun, ())

    def _without_rows(self) -> tf.Tensor:
        exchange = devices.exchange_of(self.mesh.rows, axes=self.mesh.axes)
        with held.tracing():
            return self.partition.emit_without_rows(exchange)

    def explain(self, name: str) -> None:
        """Log what is gathered and computed whole, once the step has run."""
        self.is_explained = True
        if self.settings.backend.rank == 0:
            self.mesh.explain(name)
            explain.report(self.partition, self.traffic, name)

    @functools.cached_property
    def variables(self) -> list[tf.Variable]:
        """Return the variables that the step uses and that are equal on every rank."""
        shared = [] if self.hook is None else self.hook.common
        return [*self._whole(captured_variables(self.source.graph)), *shared]

    @functools.cached_property
    def written(self) -> list[tf.Variable]:
        """Return the variables of the model, its optimizer and metrics that it writes."""
        return self._whole(written_variables(self.source.graph))

    def _whole(self, variables: Sequence[tf.Variable]) -> list[tf.Variable]:
        """Return those of some variables that each rank has whole."""
        stand_ins = {id(one.stand_in) for one in self.mesh.held}
        return [variable for variable in variables if id(variable) not in stand_ins]

    @property
    def own_variables(self) -> list[tf.Variable]:
        """Return the variables that the step uses and that each rank has for itself."""
        parts = [one.part for one in self.mesh.held]
        return parts if self.hook is None else [*parts, *self.hook.errors.values()]

    @property
    def structure(self) -> Any:
        """Return what the step returned when it was traced."""
        outputs, _ = self.source.graph.structured_outputs
        return outputs

    def _packed(self, tensors: Sequence[tf.Tensor]) -> Any:
        by_name = dict(zip(self._names, tensors, strict=True))
        flat = tf.nest.flatten(self.structure, expand_composites=True)
        return tf.nest.pack_sequence_as(
            self.structure,
            [by_name[t.name] if tf.is_tensor(t) else t for t in flat],
            expand_composites=True,
        )

    def _on_process(
        self, *arguments: tf.Tensor
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
        """Compute the step with the rows of this process; see ``Program``."""
        *tensors, number = arguments
        settings = self.settings
        exchange = self._exchange(number if self._checks else None)
        total = tensors.pop() if self.kind.is_read_cut else self._total(tensors)
        cuts = list(self._cuts(total, exchange))
        first = cuts[0][0] if self.kind.is_read_cut else 0
        parts = [
            [tensor[begin - first : end - first] for begin, end in cuts]
            if is_cut
            else [tensor]
            for tensor, is_cut in zip(tensors, self.kind.cut, strict=True)
        ]
        replicas = [
            (begin, end - begin, self._is_first() if not i else tf.constant(False))
            for i, (begin, end) in enumerate(cuts)
        ]
        attached = [] if settings.attached is None else settings.attached()
        with held.tracing():
            outputs, sums = self.partition.emit(
                parts,
                Share.of(total, replicas),
                exchange,
                self.traffic,
                attached=attached,
            )
        found = [output[0] for output in outputs]
        reports = []
        if self._reports:
            place = self._names.index(self.source.graph.structured_outputs[1].name)
            with tf.control_dependencies(found):
                reports = [report.line(found[place], total, exchange.span())]
        exchange.finish()
        return found, self._of_all_ranks(sums, found), reports

    def _of_all_ranks(
        self, sums: Sequence[tf.Tensor], before: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return what is attached, summed over the model axes, too, after the step."""
        found = list(sums)
        for along in self.mesh.axes.values():
            with tf.control_dependencies(before):
                own = [along.added("sum", [tensor]) for tensor in found]
                found = along.reduce(Message("sum", own))
            before = found
        return found

    def _exchange(self, number: tf.Tensor | None) -> TimedExchange:
        """Return the exchange of a step; with its number, sums are checked."""
        if self.hook is not None:
            return HookExchange(self.settings.backend, number, self.hook)
        rows, virtual = self.mesh.rows, self.settings.virtual
        return devices.exchange_of(rows, number, virtual, self.mesh.axes)

    def _is_first(self) -> tf.Tensor:
        """Return whether this process has the first replica of the job."""
        backend = self.mesh.rows
        if isinstance(backend, LocalDevices):
            return tf.constant(backend.local_replicas[0] == 0)
        return tf.equal(tf.cast(backend.replica(), tf.int64), 0)

    def _cuts(
        self, total: tf.Tensor, exchange: TimedExchange
    ) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        """Yield where each piece of the rows of this process begins and ends."""
        count = self.settings.options.accumulate
        if exchange.tree is None:
            pieces = [self._own(total)]
            count *= max(len(exchange.devices), 1)
        else:
            pieces = exchange.tree.bounds(total)
        for start, stop in pieces:
            rows = stop - start
            ends = [start + rows * j // count for j in range(count + 1)]
            yield from itertools.pairwise(ends)

    def _own(self, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return where the rows of this process begin and end."""
        backend = self.mesh.rows
        if isinstance(backend, LocalDevices):
            held, count = backend.local_replicas, backend.replicas
            start, _ = share(total, held[0], count)
            _, stop = share(total, held[-1], count)
            return start, stop
        replica = tf.cast(backend.replica(), tf.int64)
        return share(total, replica, tf.cast(backend.replica_count(), tf.int64))
