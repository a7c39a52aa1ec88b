"""What a training returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import keras

from collective.backends.base import Backend
from collective.training.compression.hook import CommunicationHook
from collective.training.compression.savings import gradient_bytes
from collective.training.loop.position import Position
from collective.training.loop.state import state_sha256
from collective.training.loop.times import Timing
from collective.training.model.record import trainable_variables
from collective.training.model.variables import is_in_parts

T = TypeVar("T")


class Result(keras.callbacks.History):
    """What ``collective.fit`` returns: Keras' ``History``, and more. Equal on all ranks.

    Attributes:
        model: The trained model, the same on every rank.
        history: Logs of each epoch by name.
        epoch: The numbers of the epochs in ``history``.
        params: ``verbose``, ``epochs`` and ``steps``, as Keras has them.
        backend: The backend it ran on.
        losses: The loss of every step, over its whole global batch; includes the steps
            before the checkpoint that this training resumed from.
        timing: Seconds of every step that this process made.
        per_replica: The option, where each replica had batches of its own: the model is
            then another than that of one process. False otherwise.
        not_equal_to_one_process: Why the model is not that of one process by design:
            the communication hook. None otherwise.
    """

    def __init__(
        self,
        position: Position,
        params: dict[str, Any],
        per_replica: bool | str = False,
        hook: CommunicationHook | None = None,
    ):
        super().__init__()
        self.set_model(position.model)
        self.set_params(params)
        self.history: dict[str, list[Any]] = position.history
        self.epoch: list[int] = position.epochs
        self.backend: Backend = position.backend
        self.losses: list[float] = position.losses
        self.timing = Timing()
        self.per_replica = per_replica
        self.not_equal_to_one_process = None if hook is None else f"hook {hook!r}"
        self._hook = hook
        self._repeat: Callable[[Callable[[], Any]], Any] | None = None

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of gradients that a replica sends in a step, about."""
        trained = trainable_variables(self.model)
        return gradient_bytes(trained, self._hook, self.backend.rounds_to)

    @property
    def state_sha256(self) -> str | None:
        """Return the SHA-256 of the model's weights, layer state and optimizer state now.

        None where ranks have parts of them.
        """
        if is_in_parts(self.model):
            return None
        return state_sha256(self.model)

    def afterwards(self, action: Callable[[], T]) -> T:
        """Run what all ranks do together after the training, as an evaluation.

        In an elastic job, the remaining ranks repeat it when a rank dies meanwhile
        (``collective.training.observers.elastic.fit_units``). Every rank calls it with the same
        action, which may use collectives.
        """
        return action() if self._repeat is None else self._repeat(action)

    def repeat_afterwards(self, repeat: Callable[[Callable[[], Any]], Any]) -> None:
        """Have ``afterwards`` call this with each action, in an elastic job."""
        self._repeat = repeat
