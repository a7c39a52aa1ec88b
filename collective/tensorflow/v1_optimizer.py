"""An optimizer of TensorFlow 1 (``tf.compat.v1.train``) that reduces its gradients."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective.errors import CollectiveError
from collective.tensorflow.gradients import GradientReduction


class DistributedV1Optimizer(tf.compat.v1.train.Optimizer):
    """Reduces in ``compute_gradients``; the rest is the wrapped optimizer's.

    Args:
        optimizer: The one that is wrapped.
        reduction: What is done with gradients.
        name: ``Distributed`` and the optimizer's class by default.
        use_locking: As for it.
    """

    def __init__(
        self,
        optimizer: tf.compat.v1.train.Optimizer,
        reduction: GradientReduction,
        name: str | None = None,
        use_locking: bool = False,
    ):
        super().__init__(use_locking, name or f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer
        self._reduction = reduction
        self._reduced = False

    def register_local_var(self, var: Any) -> None:
        """Leaves a variable's gradient to this process alone."""
        self._reduction.register_local(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The wrapped optimizer's, reduced over the ranks."""
        gradients, variables = zip(
            *self._optimizer.compute_gradients(*args, **kwargs), strict=True
        )
        self._reduced = True
        return list(zip(self._reduction(gradients, variables), variables, strict=True))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's.

        Raises:
            CollectiveError: If ``compute_gradients`` was never called.
        """
        if not self._reduced:
            raise CollectiveError(
                f"{self._name} got gradients that were not summed over the ranks",
                hint="call minimize() or compute_gradients(), or take them from "
                "hvd.DistributedGradientTape and apply them with the plain optimizer",
            )
        return self._optimizer.apply_gradients(*args, **kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.variables(*args, **kwargs)
