"""What a traced step is to the function of a batch, to observers and to units."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from collective.training.keras_compat.tensorflow_names import determinism
from collective.training.keras_compat.traced import traced
from collective.training.partition.traffic import Traffic
from collective.training.step import finite
from collective.training.steps.leaves import Leaves
from collective.training.steps.settings import StepSettings

#: A step of Keras: takes the data of one batch and returns a tree of tensors.
KerasStep = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Kind:
    """The batches that one program serves.

    Attributes:
        spec: The tree of ``tf.TypeSpec`` of a batch, as Keras sees it.
        cut: For each dense tensor of it, whether it is cut by rows.
        rows: The length that the program is traced for, or None for any.
        is_read_cut: Whether a process has read its own rows of what is cut only, and how
            many rows the whole batch has.
    """

    spec: Any
    cut: tuple[bool, ...]
    rows: int | None = None
    is_read_cut: bool = False

    def whole_specs(self) -> list[tf.TensorSpec]:
        """Return the specification of each dense tensor of a whole batch."""
        flat = tf.nest.flatten(self.spec, expand_composites=True)
        specs = [s for s in flat if isinstance(s, tf.TypeSpec)]
        return [
            tf.TensorSpec([self.rows, *s.shape[1:]], s.dtype) if is_cut else s
            for s, is_cut in zip(specs, self.cut, strict=True)
        ]

    def specs(self) -> list[tf.TensorSpec]:
        """Return the specification of what a process has of a batch; see ``Leaves``."""
        whole = self.whole_specs()
        if not self.is_read_cut:
            return whole
        own = [
            tf.TensorSpec([None, *s.shape[1:]], s.dtype) if is_cut else s
            for s, is_cut in zip(whole, self.cut, strict=True)
        ]
        return [*own, tf.TensorSpec([], tf.int64)]

    def packed(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Return the batch that has these tensors."""
        given = iter(tensors)
        flat = tf.nest.flatten(self.spec, expand_composites=True)
        filled = [next(given) if isinstance(s, tf.TypeSpec) else s for s in flat]
        return tf.nest.pack_sequence_as(self.spec, filled, expand_composites=True)

    def fits(self, batch: Leaves) -> bool:
        """Return whether the leaves that are cut have one length, and that of ``rows``."""
        found = set(itertools.compress(batch.lengths, self.cut))
        return len(found) < 2 and (self.rows is None or found <= {self.rows})


class Program:
    """Keras' step for one kind of batch, as this process runs it.

    A subclass traces the step as ``source``, and makes the graph of this process.

    Attributes:
        source: Keras' step, traced for whole batches.
        attached: The sums of what the settings attach, of the last step.
        report: Of the last step, if the settings ask for it; see
            ``collective.training.steps.report``.
        has_run: Whether it has made a step.
        traffic: What the replicas exchange.
    """

    source: Any

    def __init__(self, kind: Kind, settings: StepSettings, reports: bool):
        self.kind, self.settings = kind, settings
        self.traffic = Traffic()
        self.is_deterministic = determinism.is_enabled()
        self.is_explained = self.has_run = False
        self.attached: Sequence[tf.Tensor] = ()
        self.report: Any = None
        self._reports = reports
        self._runs: dict[Any, Any] = {}

    def _emitted(self) -> Any:
        """Return the emitted step; pieces of virtual replicas follow from the ranks."""
        key, backend = None, self.settings.backend
        if self.settings.virtual is not None:
            key = backend.local_replicas, backend.replicas
        if key not in self._runs:
            signature = [*self.kind.specs(), tf.TensorSpec([], tf.int64)]
            function = traced(self._on_process, input_signature=signature)
            # Its one graph: to look for it at each call takes as long as a small step.
            self._runs[key] = function.get_concrete_function()
        return self._runs[key]

    def trace(self) -> None:
        """Make the graph of this process, as the first call would, and run nothing."""
        self._emitted()

    def __call__(self, tensors: Sequence[tf.Tensor], number: int) -> Any:
        """Run the step on a batch.

        Args:
            tensors: What this process has of the batch; see ``Leaves``.
            number: The number of the step, for messages.

        Returns:
            The tree that Keras' step returns, of the whole batch.
        """
        args = [*tensors, tf.constant(number, tf.int64)]
        result = self.settings.backend.call(self._emitted(), args, self._explained)
        self.has_run = True
        return self._received(result)

    def _received(self, result: Any) -> Any:
        """Keep what the graph of this process gave beside the outputs; return these."""
        found, self.attached, reports = result
        self.report = next(iter(reports), None)
        return self._packed(found)

    def _on_process(
        self, *arguments: tf.Tensor
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
        """Compute the step with the rows of this process, while it is traced.

        Args:
            arguments: What this process has of the batch, and the number of the step.

        Returns:
            The tensors that the step returns, the sums of what is attached, and the
            report, if the settings ask for it.
        """
        raise NotImplementedError

    def _packed(self, tensors: Sequence[Any]) -> Any:
        """Return what Keras' step returns from what ``_on_process`` returned first."""
        raise NotImplementedError

    def _explained(self, error: Exception) -> Exception:
        """Return an error that names rank and variable for a value that is not finite."""
        return finite.explain(error, self.settings.backend, self.paths)

    @property
    def paths(self) -> Sequence[str]:
        """Return the paths of the variables of the first sum, in the order of numbers."""
        raise NotImplementedError

    @property
    def variables(self) -> list[tf.Variable]:
        """Return the variables that the step uses and that are equal on every rank."""
        raise NotImplementedError

    @property
    def written(self) -> list[tf.Variable]:
        """Return the variables of the model, its optimizer and metrics that it writes."""
        raise NotImplementedError

    @property
    def own_variables(self) -> list[tf.Variable]:
        """Return the variables that the step uses and that each rank has for itself."""
        return []

    def overrun(self) -> None:
        """Make the writes of a step that Keras begins and finds no batch for.

        Keras asks for a batch within its function. If the data do not say how many
        batches they have, the last call counts a step and draws its seeds, though it
        trains on nothing.
        """

    def explain(self, name: str) -> None:
        """Log what is gathered and computed whole, once the step has run."""
        self.is_explained = True

    def _total(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the rows of the batch, int64; 1 if it has none that could be cut."""
        for tensor in itertools.compress(tensors, self.kind.cut):
            return tf.shape(tensor, tf.int64)[0]
        return tf.constant(1, tf.int64)
