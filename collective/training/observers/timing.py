"""Takes the times of steps while they run."""

from __future__ import annotations

from collective.training.loop.observer import FinishedStep, Observer
from collective.training.loop.position import Position
from collective.training.loop.reports import Reports
from collective.training.loop.times import Timing
from collective.training.steps import report


class TimingObserver(Observer):
    """Fills in a ``Timing`` while the training runs."""

    def __init__(self, timing: Timing, position: Position):
        self.timing = timing
        self.position = position
        self._reports: Reports | None = None
        self._ended: list[
            float
        ] = []  # when the epoch's steps ended, by the report's clock

    def after_step(self, step: FinishedStep) -> None:
        """Take the times that are known without waiting for the report."""
        self.timing.input.append(step.ready - step.begin)
        self.timing.step.append(step.done - step.ready)
        self._ended.append(step.ended)
        self._reports = self.position.reports

    def end_epoch(self, epoch: int, logs: dict[str, float]) -> None:
        """Read the reports of the epoch's steps."""
        self._read_reports()

    def reconfigured(self, root: int) -> None:
        """Read the reports of the epoch's steps, if the change has ended it."""
        if self._reports is not self.position.reports:
            self._read_reports()

    def _read_reports(self) -> None:
        if self._reports is None:
            return
        timing = self.timing
        for values, end in zip(self._reports.read(), self._ended, strict=True):
            start, stop = values[report.REDUCE_START], values[report.REDUCE_STOP]
            timing.started.append(float(start))
            timing.all_reduce.append(float(stop - start))
            timing.update.append(max(0.0, float(end - stop)))
            timing.rows.append(int(values[report.ROWS]))
        self._reports, self._ended = None, []

    def end(self) -> None:
        """Exchange the times when each rank was ready."""
        backend = self.position.backend
        self.position.unit(lambda: self.timing.compute_wait(backend))
