"""The next generation of a job, prepared while the present one trains.

While others train, its ranks start, load, build and trace, and wait for the state
(``collective.elastic.generations.wait_for_previous``). When all are ready, the present ranks
are asked to end, and the next ones continue at once. A failure before that ends the next
generation only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from collective.hosts import Host
from collective.launch.job import Generation
from collective.launch.mpirun import Mpirun
from collective.running_time import Deadline, Lasting

_POLL_SECONDS = 0.02
# Ranks that were connected to an ended rank end, too, maybe reported before it.
_CAUSE_SECONDS = 2.0
# How long ranks may take to end after they have handed over their training.
_END_SECONDS = 30.0


class Overlap:
    """The generation that is prepared while the present one trains.

    A thread of the launcher decides: ``prepare``, ``cancel``. The main thread, which alone
    starts processes, does the rest: ``look``, ``take``, ``end``.
    """

    def __init__(self) -> None:
        self.job: Mpirun | None = None  # the next generation, if there is one
        self.placed: Sequence[Host] = ()  # its hosts, as ``hosts.place`` returns them
        self._failed = False

    @property
    def ready(self) -> bool:
        """Return whether the next generation waits for the state, or was released."""
        job = self.job
        if job is None or job.interrupted:
            return False
        starts = job.ready and not job.supervisor.ending and not job.relay.ends
        return job.released or starts

    @property
    def has_begun(self) -> bool:
        """Return whether the next generation was released, so that this one ends."""
        return self.ready and self.job is not None and self.job.released

    @property
    def late(self) -> bool:
        """Return whether it was not released in time."""
        job = self.job
        if job is None or job.released or self._unwanted:
            return False
        return self._deadline.passed()

    def prepare(self, job: Mpirun, placed: Sequence[Host], seconds: float) -> None:
        """Have a generation started, on hosts that were checked.

        Args:
            seconds: How long it may take until the generation is released.
        """
        self._deadline = Deadline(seconds)
        self._incomplete = Lasting(_CAUSE_SECONDS)
        self._handed_over = Lasting(_END_SECONDS)
        self._started = self._unwanted = self._outlived = False
        self.placed, self.job = placed, job

    def failed(self) -> bool:
        """Return, once, whether the next generation failed before it was released."""
        failed, self._failed = self._failed, False
        return failed

    def cancel(self) -> None:
        """Have the next generation end, unless it was released."""
        self._unwanted = True

    def look(self, present: Generation) -> None:
        """Start, release or end the next generation if it is due.

        The caller repeats it many times a second while the present generation runs.
        """
        job = self.job
        if job is None:
            return
        if not self._started:
            self._started = True
            job.start(has_threads=True)
        supervisor, before = job.supervisor, present.supervisor
        supervisor.look()
        if before.ending and before.processes and not self._outlived:
            job.cancel()
        elif job.released:  # it has become the job
            if self._handed_over.since(True) or not supervisor.processes:
                self._outlived = True
                before.give_up()
            return
        elif self._unwanted:
            job.cancel()
        elif self._incomplete.since(bool(job.relay.ends)):
            supervisor.give_up()
        elif present.has_handed_over and self.ready:
            job.release()
        if not supervisor.processes:
            job.end()
            self.job, self._failed = None, not job.interrupted

    def take(self) -> Mpirun | None:
        """Return the generation that is ready, if there is one; the present one has ended."""
        job = self.job
        if job is None or not self.ready:
            self.end()
            return None
        job.release()
        self.job = None
        return job

    def end(self) -> None:
        """End the next generation, unless it was taken, and wait for its end."""
        job = self.job
        if job is None or not self._started:
            return
        job.cancel()
        while job.supervisor.processes:
            job.supervisor.look()
            time.sleep(_POLL_SECONDS)
        job.end()
        self.job = None
