"""Reports to the flight recorder in which step this rank is."""

from __future__ import annotations

import time

from collective import recorder
from collective.training.observer import FinishedStep, Observer


class Heartbeat(Observer):
    """Writes the position of the training into the recorder's shared memory.

    From it the watchdog and the dumps of other ranks know where this rank stalled.
    """

    def before_input(self, number: int) -> None:
        """This rank waits for its batch."""
        recorder.waits_for_input(number, time.perf_counter())

    def before_step(self, number: int) -> None:
        """This rank is within the step."""
        recorder.in_step(number, time.perf_counter())

    def after_step(self, step: FinishedStep) -> None:
        """This rank is between two steps."""
        recorder.in_no_step()

    def interrupted(self) -> None:
        """The step did not return."""
        recorder.in_no_step()
