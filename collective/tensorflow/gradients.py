"""The reduction of gradients, for every optimizer and for the tape."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import keras
import tensorflow as tf

from collective.operations.kinds import Average
from collective.tensorflow.collectives import Tensor, grouped_allreduce
from collective.tensorflow.compression import Compression, Compressor
from collective.tensorflow.functions import tf_variable
from collective.tensorflow.process_sets import ProcessSet, global_process_set, group_of
from collective.tensorflow.reductions import Reduction, chosen_reduction, combined_rows
from collective.tensorflow.signatures import ordered
from collective.tensorflow_ops import ranks

Groups = int | Sequence[Sequence[Any]]


@dataclass
class GradientReduction:
    """Reduces gradients over the ranks, with Horovod's options.

    Attributes:
        op: Average, Sum or Adasum.
        compression: How gradients are compressed on the way.
        sparse_as_dense: Turns ``tf.IndexedSlices`` into tensors before the reduction.
        gradient_predivide_factor: Divides before, and multiplies after, the average.
        groups: The number of calls that reduce the gradients, or lists of variables
            that share one call; one call by default.
        process_set: The ranks that take part; others keep their own gradients.
        scale_local_gradients: Whether gradients of local variables are divided by the
            number of ranks, as the average divides the others.
        device_dense, device_sparse: The device of the results.
        num_groups: The old name of ``groups``.
        local_layers: A layer or several, whose gradients stay this process' own.

    Raises:
        ValueError: If options do not go together; if an object is not a layer, or has
            no variables yet.
    """

    op: Reduction = Average
    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    groups: Groups | None = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    device_dense: str = ""
    device_sparse: str = ""
    num_groups: InitVar[int] = 0
    local_layers: InitVar[Any] = None
    local: set[int] = field(default_factory=set, init=False)

    def __post_init__(self, num_groups: int, local_layers: Any) -> None:
        self.op = chosen_reduction(self.op)
        if num_groups:
            warnings.warn(
                "Parameter `num_groups` has been replaced by `groups`",
                DeprecationWarning,
                stacklevel=6,
            )
            self.groups = num_groups if self.groups is None else self.groups
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise ValueError(
                "gradient_predivide_factor not supported with op != Average"
            )
        if isinstance(self.groups, int) and self.groups < 1:
            raise ValueError(
                "groups should be a positive integer or a list of list of variables."
            )
        for variable in _variables_of(local_layers):
            self.register_local(variable)

    def register_local(self, variable: Any) -> None:
        """Leave a variable's gradient to this process alone."""
        self.local.add(id(tf_variable(variable)))

    def is_local(self, variable: Any) -> bool:
        """Return whether a variable's gradient is left to this process alone."""
        return id(tf_variable(variable)) in self.local

    def __call__(
        self, gradients: Sequence[Tensor | None], variables: Sequence[Any]
    ) -> list[Tensor | None]:
        """Reduce the gradients of variables; None stays None if it is so everywhere.

        Raises:
            tf.errors.OpError: As for ``allreduce``.
            ValueError: Before ``init()``, or if the process set was not added.
        """
        results = list(gradients)
        group_of(self.process_set)  # it must have been added, also on other ranks
        # A single rank reduces, too: when the graph runs, there may be more ranks.
        if not self.process_set.included():
            # One process treats sparse gradients as several processes do.
            return [
                self._sent(combined_rows(gradient))
                if isinstance(gradient, tf.IndexedSlices)
                else gradient
                for gradient in results
            ]
        for group in self._groups(results, variables):
            reduced = grouped_allreduce(
                [self._sent(results[place]) for place in group],
                None,
                self.device_dense,
                self.device_sparse,
                self.compression,
                self.op,
                1 / self.gradient_predivide_factor,
                self.gradient_predivide_factor,
                self.process_set,
            )
            for place, result in zip(group, reduced, strict=True):
                results[place] = result
        self.scale_local(results, variables)
        return results

    def scale_local(
        self, gradients: list[Tensor | None], variables: Sequence[Any]
    ) -> None:
        """Divide the gradients of local variables in place, if the option is on."""
        local = [place for place, v in enumerate(variables) if self.is_local(v)]
        if self.scale_local_gradients and local:
            size = ranks.size(group_of(self.process_set))
            for place in local:
                gradients[place] = _divided(gradients[place], size)

    def _sent(self, gradient: Tensor) -> Tensor:
        if self.sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
            return tf.convert_to_tensor(gradient)
        return gradient

    def _groups(
        self, gradients: Sequence[Tensor | None], variables: Sequence[Any]
    ) -> list[list[int]]:
        """Return the indices of the gradients that are reduced together, by call."""
        places = [
            place
            for place, (gradient, variable) in enumerate(
                zip(gradients, variables, strict=True)
            )
            if gradient is not None and not self.is_local(variable)
        ]
        if self.groups is None:
            groups = [places]
        elif isinstance(self.groups, int):
            parts = min(self.groups, len(places)) or 1
            edges = [i * len(places) // parts for i in range(parts + 1)]
            groups = [places[a:b] for a, b in itertools.pairwise(edges)]
        else:
            place_of = {id(tf_variable(variables[place])): place for place in places}
            named = [[id(tf_variable(v)) for v in group] for group in self.groups]
            groups = [[place_of[n] for n in group if n in place_of] for group in named]
            taken = set(itertools.chain(*groups))
            groups.append([place for place in places if place not in taken])
        return [group for group in groups if group]


def _divided(gradient: Tensor | None, size: tf.Tensor) -> Tensor | None:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = _divided(gradient.values, size)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(size, gradient.dtype)


def _variables_of(local_layers: Any) -> list[Any]:
    if local_layers is None:
        return []
    layers = (
        [local_layers] if isinstance(local_layers, keras.Layer) else list(local_layers)
    )
    if not all(isinstance(layer, keras.Layer) for layer in layers):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
    for layer in layers:
        if not layer.built:
            raise ValueError(
                f"local layer {layer.name} has no variables yet, and would be summed\n"
                "HINT: build the model first, as by model.build(input_shape)"
            )
    return [variable for layer in layers for variable in layer.trainable_weights]


class _ReducingTape(tf.GradientTape):
    """Mixed into the class of the wrapped tape, whose recording it shares."""

    _reduction: GradientReduction

    def register_local_source(self, source: Any) -> None:
        """Leave a source's gradient to this process alone."""
        self._reduction.register_local(source)

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Return the result of ``tf.GradientTape.gradient``, reduced over the ranks.

        Args:
            target, sources, output_gradients, unconnected_gradients: As in TensorFlow;
                sources may be variables of Keras.
            use_generic_names: Not used: calls are always matched by their order.
        """
        gradients = super().gradient(
            target, sources, output_gradients, unconnected_gradients
        )
        flat = tf.nest.flatten(gradients)
        reduced = self._reduction(flat, tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(gradients, reduced)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return pairs of source and gradient: of local sources, and of others."""
        gradients = self.gradient(target, sources, output_gradients)
        pairs = list(
            zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True)
        )
        local = [pair for pair in pairs if self._reduction.is_local(pair[0])]
        others = [pair for pair in pairs if not self._reduction.is_local(pair[0])]
        return local, others


@ordered(
    "gradtape device_dense device_sparse compression sparse_as_dense op "
    "gradient_predivide_factor num_groups groups process_set scale_local_gradients "
    "local_layers",
    GradientReduction,
)
def DistributedGradientTape(
    gradtape: tf.GradientTape, **options: Any
) -> tf.GradientTape:
    """Wrap a tape: its ``gradient`` is reduced over the ranks.

    Args:
        gradtape: The tape, before or after its ``with`` block.
        **options: As for ``GradientReduction``.

    Raises:
        ValueError: If options do not go together.
    """
    reduction = GradientReduction(**options)
    kind = type(gradtape)
    tape: Any = object.__new__(type(kind.__name__, (_ReducingTape, kind), {}))
    tape.__dict__.update(gradtape.__dict__)
    tape._reduction = reduction
    return tape


@ordered(
    "gradtape device_dense device_sparse compression sparse_as_dense op "
    "gradient_predivide_factor num_groups groups process_set local_layers "
    "scale_local_gradients",
    DistributedGradientTape,
)
def PartialDistributedGradientTape(**options: Any) -> tf.GradientTape:
    """Call ``DistributedGradientTape`` with layers whose gradients stay local."""
    return DistributedGradientTape(**options)
