"""What rank 0's callbacks remember, on every rank: any of them may become rank 0."""

from __future__ import annotations

from collective.training.loop.callbacks import Hooks
from collective.training.loop.observer import Observer


class CallbackMemory(Observer):
    """Gives every rank the state of the callbacks at the end of each epoch.

    So ``EarlyStopping`` continues to count when rank 0 dies. What hooks of batches have gathered
    since the last epoch is lost with rank 0.
    """

    def __init__(self, hooks: Hooks):
        self._hooks = hooks

    def end_epoch(self, epoch: int, logs: dict[str, float]) -> None:
        """Outside of the callbacks, which have ended the epoch then."""
        self._hooks.share_memory()
