"""What layers whose weights lie in parts on the ranks of a tensor group have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import keras
import tensorflow as tf

from collective.backends import tensor_group
from collective.backends.tensor_group import TensorGroup
from collective.errors import UsageError
from collective.training.input.plan import share

SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


class Cut(NamedTuple):
    """How a weight is cut: along which axis, and its whole shape."""

    axis: int
    shape: tuple[int, ...]

    def part(self, value: Any, group: TensorGroup) -> Any:
        """This rank's part of a whole value."""
        start, stop = share(self.shape[self.axis], group.part, group.parts)
        return value[(slice(None),) * self.axis + (slice(start, stop),)]


class Parallel(keras.layers.Layer):
    """Mixed into a Keras layer: its weights named in ``cut`` lie in parts.

    The layer takes the group of the backend in whose scope it is built; without one, it
    is the Keras layer that it is derived from.
    """

    cut: ClassVar[dict[str, int]]  # by name of a weight: the axis
    group: TensorGroup | None = None

    def build(self, input_shape: Any = None) -> None:
        """Makes the weights: of those that are cut, this rank's part."""
        self.group = tensor_group.current()
        if self.group is not None and (self.lora_rank or self.quantization_mode):
            self._refuse("is made with LoRA or quantization", "leave it out")
        super().build(input_shape)

    def add_weight(  # type: ignore[override]
        self,
        shape: Sequence[int],
        initializer: Any,
        name: str,
        regularizer: Any = None,
        constraint: Any = None,
        **more: Any,
    ) -> keras.Variable:
        """As of every layer; the part is that of what the whole would be."""
        group = self.group
        if group is None or name not in self.cut:
            return super().add_weight(
                shape=shape,
                initializer=initializer,
                name=name,
                regularizer=regularizer,
                constraint=constraint,
                **more,
            )
        cut = Cut(self.cut[name], tuple(shape))
        if shape[cut.axis] < group.parts:
            self._refuse(
                f"has {name} of {shape[cut.axis]} along the axis that is cut",
                f"--tensor-parallel {shape[cut.axis]} or less",
            )
        if constraint is not None:
            self._refuse(f"has a constraint, which looks at all of {name}", "drop it")
        if regularizer is not None:
            if not isinstance(regularizer, SUMS):
                self._refuse(
                    f"has a regularizer that is no sum over {name}",
                    "keras.regularizers.L1, L2 or L1L2",
                )
            regularizer = _summed(regularizer, group)

        def part(_: Any, dtype: Any = None, **__: Any) -> Any:
            # The whole is made on the host, once, and let go.
            with tf.init_scope(), tf.device("/cpu:0"):
                return cut.part(initializer(cut.shape, dtype=dtype), group)

        start, stop = share(shape[cut.axis], group.part, group.parts)
        own = list(shape)
        own[cut.axis] = stop - start
        variable = super().add_weight(
            shape=tuple(own),
            initializer=part,
            name=name,
            regularizer=regularizer,
            **more,
        )
        variable.tensor_cut = cut
        return variable

    def _refuse(self, what: str, instead: str) -> None:
        raise UsageError(
            f"layer {self.name!r} {what}: with --tensor-parallel it cannot be",
            hint=instead,
        )


def _summed(regularizer: Any, group: TensorGroup) -> Callable[[Any], Any]:
    """Of a part, the penalty of the whole."""
    return lambda part: group.leave(regularizer(part))
