"""The methods of callbacks that are called for the batches of a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collective.training.loop.callbacks import CallbackMethods


class BatchMethods:
    """The methods of the batches of one pass: ``train``, ``test`` or ``predict``.

    Keras runs ``steps_per_execution`` batches at a time, and calls methods before the first
    and after the last of them.
    """

    def __init__(self, methods: CallbackMethods, what: str):
        self.methods = methods
        self._begin = f"on_{what}_batch_begin"
        self._end = f"on_{what}_batch_end"
        self._open: int | None = None  # the first batch of those that run
        self._ran = False  # whether any of them has run

    def before(self, batch: int, *place: int) -> None:
        """Act before a batch, counted from 0."""
        if not self._called:
            return
        if batch % self._together == 0:
            self._open, self._ran = batch, False
            self.methods.call(self._begin, (*place, batch), batch, {})

    def ends(self, batch: int, last: bool) -> bool:
        """Return whether methods follow a batch."""
        self.methods.batches = batch + 1
        if not self._called:
            return False
        self._ran = True
        return last or (batch + 1) % self._together == 0

    def after(self, logs: Callable[[], dict[str, Any]], *place: int) -> None:
        """Act after the last of the batches that Keras runs at a time; ``logs`` makes the logs."""
        if self._open is None or not self._ran:
            return
        methods, number, self._open = (
            self.methods,
            self._open + self._together - 1,
            None,
        )
        shown = self._end in methods.used and methods.backend.rank == 0
        sorted_logs = dict(sorted(logs().items())) if shown else {}
        methods.call(self._end, (*place, number), number, sorted_logs)

    @property
    def _called(self) -> bool:
        return bool({self._begin, self._end} & self.methods.used)

    @property
    def _together(self) -> int:
        return int(getattr(self.methods.model, "steps_per_execution", 1) or 1)
