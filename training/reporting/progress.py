"""Keras' own progress bar on rank 0, drawn a few times a second.

Keras computes all metrics for every batch to feed its bar; here they are computed
only when the bar is drawn.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import keras

Logs = dict[str, float]


class Progress:
    """One progress bar per epoch.

    Args:
        epochs: Number of epochs.
        verbose: 0 prints nothing, 1 a bar, 2 a line per epoch; ``auto`` is a bar on a
            terminal and a line elsewhere.
        interval: Seconds between two drawings.
    """

    def __init__(self, epochs: int, verbose: str | int, interval: float = 0.1):
        self.epochs = epochs
        self.verbose = (
            (1 if sys.stdout.isatty() else 2) if verbose == "auto" else int(verbose)
        )
        self.interval = interval

    def begin(self, epoch: int, steps: int) -> None:
        """Starts the bar of an epoch."""
        if not self.verbose:
            return
        if self.epochs > 1:
            print(f"Epoch {epoch + 1}/{self.epochs}", flush=True)
        self.bar = keras.utils.Progbar(steps, verbose=self.verbose)
        self.drawn = time.monotonic()

    def update(self, done: int, logs: Callable[[], Logs]) -> None:
        """Draws the bar when it is due.

        Args:
            done: Steps done in this epoch.
            logs: Makes the averages of the epoch so far; called only when drawing.
        """
        if self.verbose == 1 and time.monotonic() - self.drawn >= self.interval:
            self._draw(done, logs(), finalize=False)
            self.drawn = time.monotonic()

    def end(self, done: int, logs: Logs) -> None:
        """Draws the final bar, with the results of validation."""
        if self.verbose:
            self._draw(done, logs, finalize=True)

    def _draw(self, done: int, logs: Logs, finalize: bool) -> None:
        # These are averages already; Keras must not average them again.
        self.bar.stateful_metrics = set(logs)
        self.bar.update(done, list(logs.items()), finalize=finalize)
