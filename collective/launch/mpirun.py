"""mpirun, started and watched: which rank failed, and that it comes to an end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from collective.elastic import generations
from collective.hosts import Rank
from collective.launch.job import Job, Member
from collective.launch.output import Output, Style, report, tell
from collective.launch.relay import Relay

LATE = 124  # the exit code of timeout(1)
_CALL_BACK_SECONDS = 5
# After the first failure. Open MPI ends the others itself, at once, but its mpirun
# may stay behind; MPICH leaves the others if the rank just ended.
_STAY_SECONDS = 2.0


class Mpirun(Job):
    """mpirun as the only process; how ranks fare is read from what it passes on.

    Args:
        words: Its command.
        ranks: Those that it starts.
        seconds: How long they have to start.
        cut_off: Hosts that cannot open a connection to this one, each with why:
            mpirun would wait for them for ever.
        verbose: Whether to tell what is started and how it ends.
        least: The job goes on without ranks that fail, and has gone well where so
            many end well. None: when one fails, it ends the others.
    """

    def __init__(
        self,
        words: Sequence[str],
        ranks: Sequence[Rank],
        seconds: float,
        cut_off: Mapping[str, str],
        verbose: bool,
        least: int | None = None,
    ):
        member = Member(0, words, takes_input=True)
        super().__init__([member], len(ranks), Style(prefix=False), verbose)
        self.relay = Relay(self._rank_failed, verbose)
        self.least = least
        self.ranks = ranks
        self.cut_off = cut_off
        self.seconds = min(seconds, _CALL_BACK_SECONDS) if cut_off else seconds
        self.interrupted = self.lost_host = False

    def _wait(self) -> None:
        patience = _timer(self.seconds, self._look_who_started)
        super()._wait()
        patience.cancel()

    def renew(self) -> None:
        """Has the ranks end for the next round, from whatever thread.

        To be called again until they have: a rank that has not met the others yet
        takes no notice.
        """
        if self.late or self.ending:
            return
        for pid in list(self.processes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)

    @property
    def late(self) -> list[Rank]:
        """Ranks that have not started."""
        return [rank for rank in self.ranks if rank.rank not in self.relay.started]

    def _look_who_started(self) -> None:
        """Ends the job if not all did: mpirun waits for ever for a host it cannot reach."""
        if self.late and not self.ending:
            self.exit_code = LATE
            self._end(signal.SIGTERM)

    def _output(self, rank: int) -> Output:
        return self.relay

    def _captures(self) -> bool:
        return True

    def _who(self, rank: int) -> str:
        return "mpirun"

    def _rank_failed(self, early: bool) -> None:
        if self.least is None or early:
            _timer(_STAY_SECONDS, lambda: self._end(signal.SIGTERM))

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        super()._forward(number, frame)

    def _report(self) -> None:
        failed, lost = self.relay.failed, self.relay.unfinished
        if self.interrupted:
            return super()._report()
        if self.late and (self.cut_off or self.exit_code == LATE):
            return self._report_late()
        if self.relay.renewed:
            self.exit_code = generations.EXIT_CODE
            return None
        if self.least is not None:
            if self.relay.well >= self.least:
                self.exit_code = 0  # the others went on without it
                return None
            failed = self.relay.gave_up or failed
        if failed is not None:
            self.exit_code = failed.code
            errors = self.relay.of_rank.get(failed.rank, ())
            who = f"rank {failed.rank} of {self.size} on {failed.host}"
            return report(who, failed.how, errors)
        if self.relay.lost_hosts or (lost and self.exit_code == 0):
            return self._report_lost(lost)
        super()._report()

    def _report_late(self) -> None:
        self.exit_code = LATE
        names = ", ".join(dict.fromkeys(rank.host.name for rank in self.late))
        why = "".join(f"\n  {name}: {said}" for name, said in self.cut_off.items())
        hint = (
            ""
            if why
            else "; a slow start is given more time by --start-timeout SECONDS"
        )
        tell(
            f"{len(self.late)} of {self.size} ranks did not start within "
            f"{self.seconds:g} s, on {names}{why}\n"
            "HINT: python -m collective.doctor with the same hosts; a firewall between "
            "them, or the wrong interface (--network-interfaces), keeps mpirun waiting"
            f"{hint}"
        )

    def _report_lost(self, ranks: Sequence[int]) -> None:
        """Open MPI 5 ends with 0 when it has lost a host."""
        self.exit_code, self.lost_host = 1, True
        hosts = self.relay.lost_hosts  # by their own names, or as they were given
        given = {rank.rank: rank.host.name for rank in self.ranks}
        calls_itself = self.relay.started
        there = [r for r in ranks if {calls_itself[r], given[r]} & {*hosts}] or ranks
        names = hosts or [calls_itself[r] for r in there]
        tell(
            f"the connection to {', '.join(dict.fromkeys(names))} was lost; what became "
            f"of rank {', '.join(map(str, there))} of {self.size} is not known\n"
            "HINT: see whether the host runs, and python -m collective.doctor with the "
            "same hosts; --mpi-args can give it more time (docs/how-to/launching.md)"
        )


def _timer(seconds: float, then: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, then)
    timer.daemon = True
    timer.start()
    return timer
