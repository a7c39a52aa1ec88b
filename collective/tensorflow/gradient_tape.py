"""A gradient tape whose gradients are those of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective.tensorflow.gradients import GradientReduction
from collective.tensorflow.signatures import ordered


class _ReducingTape(tf.GradientTape):
    """Mixed into the class of the tape that is wrapped; shares its recording."""

    _reduction: GradientReduction

    def register_local_source(self, source: Any) -> None:
        """Leaves a source's gradient to this process alone."""
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
        """As ``tf.GradientTape.gradient``, reduced over the ranks.

        Args:
            target, sources, output_gradients, unconnected_gradients: As there; sources
                may be variables of Keras.
            use_generic_names: Nothing: calls are always known by their order.
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
        """Pairs of source and gradient: the local sources', and the others'."""
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
    """Wraps a tape: its ``gradient`` is reduced over the ranks.

    Args:
        gradtape: The tape, before or after its ``with`` block.
        **options: As for ``GradientReduction``.

    Raises:
        ValueError: For options that do not go together.
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
    """As ``DistributedGradientTape``, but for the gradients of ``local_layers``."""
    return DistributedGradientTape(**options)
