"""Where the training is: a bar for people."""

from __future__ import annotations

import time

import keras

from collective.streams import is_terminal
from collective.training.input.plan import ENDLESS
from collective.training.loop.observer import FinishedStep, Observer
from collective.training.loop.position import Position


def verbosity(asked: str | int) -> int:
    """Return 0, 1 or 2, as for Keras; 2 in place of a bar if output is not a terminal.

    A bar is drawn with control characters, also where Keras would draw it into a file.
    """
    wanted = 1 if asked == "auto" else int(asked)
    return 2 if wanted == 1 and not is_terminal() else wanted


class ProgressBar(Observer):
    """Keras' own bar on rank 0, one an epoch, drawn each ``interval`` seconds.

    Keras computes all metrics for every batch to feed its bar; here they are computed
    only when the bar is drawn.
    """

    def __init__(
        self, position: Position, epochs: int, verbose: str | int, interval: float = 0.1
    ):
        self.position = position
        self.epochs = epochs
        self.verbose = verbosity(verbose)
        self.interval = interval
        self._bar: keras.utils.Progbar | None = None  # on rank 0, in an epoch
        self._first, self._drawn = 0, 0.0

    def begin_epoch(self, epoch: int, first: int, last: int) -> None:
        """Start the bar of an epoch."""
        if not self.verbose or self.position.backend.rank:
            return
        if self.epochs == ENDLESS:
            print(f"Epoch {epoch + 1}", flush=True)
        elif self.epochs > 1:
            print(f"Epoch {epoch + 1}/{self.epochs}", flush=True)
        steps = None if last == ENDLESS else last - first
        self._bar = keras.utils.Progbar(steps, verbose=self.verbose)
        self._first, self._drawn = first, time.monotonic()

    def after_step(self, step: FinishedStep) -> None:
        """Draw the bar when it is due."""
        if self._bar is None or self.verbose != 1:
            return
        if time.monotonic() - self._drawn >= self.interval:
            assert self.position.reports is not None
            logs = dict(sorted(self.position.reports.logs().items()))
            self._draw(self._bar, logs, finalize=False)
            self._drawn = time.monotonic()

    def end_epoch(self, epoch: int, logs: dict[str, float]) -> None:
        """Draw the bar for the last time, with the validation's results."""
        if self._bar is not None:
            self._draw(self._bar, logs, finalize=True)
            self._bar = None

    def _draw(
        self, bar: keras.utils.Progbar, logs: dict[str, float], finalize: bool
    ) -> None:
        # Averages already: Keras must show them as they are.
        bar.stateful_metrics = set(logs)
        done = self.position.step - self._first
        if finalize and bar.target is None:
            bar.target = done  # Keras prints no line of an epoch of unknown length
        bar.update(done, list(logs.items()), finalize=finalize)
