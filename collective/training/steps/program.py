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
from collective.training import keras_compat
from collective.training.input.plan import share
from collective.training.partition import devices, explain
from collective.training.partition.emission import Traffic
from collective.training.partition.exchange import BackendExchange
from collective.training.partition.layouts import ROWS, WHOLE
from collective.training.partition.method import names_of_first_sum
from collective.training.partition.partition import Partition
from collective.training.partition.plans import Rows
from collective.training.partition.shares import Share
from collective.training.step import finite
from collective.training.steps.settings import StepSettings
from collective.training.traced import traced
from collective.training.variables import captured_variables

#: A step of Keras: takes the data of one batch and returns a tree of tensors.
Step = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Kind:
    """The batches that one program serves.

    Attributes:
        spec: The tree of ``tf.TypeSpec`` of a batch, as Keras sees it.
        cut: For each dense tensor of it, whether it is cut by rows.
        rows: The length that the program is traced for, or None for any.
    """

    spec: Any
    cut: tuple[bool, ...]
    rows: int | None = None

    def specs(self) -> list[tf.TensorSpec]:
        """Return the specification of each dense tensor, the rows of this program open."""
        flat = tf.nest.flatten(self.spec, expand_composites=True)
        specs = [s for s in flat if isinstance(s, tf.TypeSpec)]
        return [
            tf.TensorSpec([self.rows, *s.shape[1:]], s.dtype) if is_cut else s
            for s, is_cut in zip(specs, self.cut, strict=True)
        ]

    def packed(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Return the batch that has these tensors."""
        given = iter(tensors)
        flat = tf.nest.flatten(self.spec, expand_composites=True)
        filled = [next(given) if isinstance(s, tf.TypeSpec) else s for s in flat]
        return tf.nest.pack_sequence_as(self.spec, filled, expand_composites=True)

    def fits(self, lengths: Sequence[int | None]) -> bool:
        """Return whether the leaves that are cut have one length, and that of ``rows``.

        Args:
            lengths: The length of each dense tensor, or None for a scalar.
        """
        found = set(itertools.compress(lengths, self.cut))
        return len(found) < 2 and (self.rows is None or found <= {self.rows})


class Program:
    """Keras' step for one kind of batch, emitted for this process.

    Args:
        step: Keras' step, with the model bound.
        model: Its model.
        kind: The batches that it serves.
        settings: The backend and the options of the training.
        checks: Whether sums that are not finite are reported: in training.
        expected: How many rows a batch mostly has, to weigh bytes by.
    """

    def __init__(
        self,
        step: Step,
        model: keras.Model,
        kind: Kind,
        settings: StepSettings,
        checks: bool,
        expected: int | None = None,
    ):
        self.kind, self.settings, self._checks = kind, settings, checks
        self.traffic = Traffic()
        self.is_explained = self.has_run = False
        self.attached: Sequence[tf.Tensor] = ()  # the sums of what the settings attach
        noted: list[tuple[Any, tf.Tensor]] = []

        def whole(*tensors: tf.Tensor) -> Any:
            return step(kind.packed(tensors))

        around = devices.on_first(model, settings.backend)
        with around, keras_compat.calls.record_gradients(noted):
            self.source = traced(whole).get_concrete_function(*kind.specs())
        by_name = {
            tensor.name: variable
            for variable, tensor in reversed(noted)
            if tensor.graph is self.source.graph
        }
        layouts = [ROWS if is_cut else WHOLE for is_cut in kind.cut]
        self.partition = Partition(self.source, layouts, self._rows(expected), by_name)
        self._names = [tensor.name for tensor in self.source.graph.outputs]
        self._run_overrun: Any = None
        self._run = traced(
            self._on_process,
            input_signature=[*kind.specs(), tf.TensorSpec([], tf.int64)],
        )

    def _rows(self, expected: int | None) -> Rows:
        rows = self.kind.rows
        known = Rows.unknown(expected) if rows is None else Rows(rows, rows)
        whole = bool(self.settings.backend.rounds_to)
        return dataclasses.replace(known, whole_gradients=whole)

    def __call__(self, tensors: Sequence[tf.Tensor], number: int) -> Any:
        """Run the step on a whole batch, which every rank has.

        Args:
            tensors: The dense tensors of the batch.
            number: The number of the step, for messages.

        Returns:
            The tree that Keras' step returns, of the whole batch.
        """
        args = [*tensors, tf.constant(number, tf.int64)]
        found, self.attached = self.settings.backend.call(
            self._run, args, self._explained
        )
        self.has_run = True
        return self._packed(found)

    def _explained(self, error: Exception) -> Exception:
        """Return an error that names rank and variable for a value that is not finite."""
        paths = names_of_first_sum(self.traffic)
        return finite.explain(error, self.settings.backend, paths)

    def overrun(self) -> None:
        """Make the writes of a step that Keras begins and finds no batch for.

        Keras asks for a batch within its function. Where the data do not say how many
        batches they have, the last call counts a step and draws its seeds, though it
        trains on nothing.
        """
        if self._run_overrun is None:
            self._run_overrun = traced(
                lambda: self.partition.emit_without_rows(
                    devices.exchange_of(self.settings.backend)
                )
            )
        self.settings.backend.call(self._run_overrun, ())

    def explain(self, name: str) -> None:
        """Log what is gathered and computed whole, once the step has run."""
        self.is_explained = True
        if self.settings.backend.rank == 0:
            explain.report(self.partition, self.traffic, name)

    @functools.cached_property
    def variables(self) -> list[tf.Variable]:
        """Return the variables that the step uses, in the order in which it met them."""
        return captured_variables(self.source.graph)

    @property
    def structure(self) -> Any:
        """Return what the step returned when it was traced."""
        return self.source.graph.structured_outputs

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
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Compute the step with the rows of this process, while it is traced.

        Returns:
            The tensors that the step returns, and the sums of what is attached.
        """
        *tensors, number = arguments
        settings = self.settings
        exchange = devices.exchange_of(
            settings.backend, number if self._checks else None
        )
        total = self._total(tensors)
        cuts = list(self._cuts(total, exchange))
        parts = [
            [tensor[begin:end] for begin, end in cuts] if is_cut else [tensor]
            for tensor, is_cut in zip(tensors, self.kind.cut, strict=True)
        ]
        replicas = [
            (begin, end - begin, self._is_first() if not i else tf.constant(False))
            for i, (begin, end) in enumerate(cuts)
        ]
        attached = [] if settings.attached is None else settings.attached()
        outputs, sums = self.partition.emit(
            parts,
            Share.of(total, replicas),
            exchange,
            self.traffic,
            attached=attached,
        )
        exchange.finish()
        return [output[0] for output in outputs], list(sums)

    def _total(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the rows of the batch, int64; 1 if it has none that could be cut."""
        for tensor in itertools.compress(tensors, self.kind.cut):
            return tf.shape(tensor, tf.int64)[0]
        return tf.constant(1, tf.int64)

    def _is_first(self) -> tf.Tensor:
        """Return whether this process has the first replica of the job."""
        backend = self.settings.backend
        if isinstance(backend, LocalDevices):
            return tf.constant(backend.local_replicas[0] == 0)
        return tf.equal(tf.cast(backend.replica(), tf.int64), 0)

    def _cuts(
        self, total: tf.Tensor, exchange: BackendExchange
    ) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        """Yield where each piece of the rows of this process begins and ends."""
        start, stop = self._own(total)
        rows = stop - start
        count = self.settings.options.accumulate * max(len(exchange.devices), 1)
        ends = [start + rows * j // count for j in range(count + 1)]
        yield from itertools.pairwise(ends)

    def _own(self, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return where the rows of this process begin and end."""
        backend = self.settings.backend
        if isinstance(backend, LocalDevices):
            held, count = backend.local_replicas, backend.replicas
            start, _ = share(total, held[0], count)
            _, stop = share(total, held[-1], count)
            return start, stop
        replica = tf.cast(backend.replica(), tf.int64)
        return share(total, replica, tf.cast(backend.replica_count(), tf.int64))
