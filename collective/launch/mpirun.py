"""Watches mpirun: finds out which rank failed, and makes sure that the job ends."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from collective.elastic import generations
from collective.hosts import Rank
from collective.launch.mpi import HostfileText
from collective.launch.output import (
    OutputStyle,
    RankOutput,
    print_message,
    report_failure,
)
from collective.launch.relay import Relay
from collective.launch.supervisor import ProcessSpec, Supervisor

NOT_STARTED = 124  # the exit code of timeout(1)
_CALL_BACK_SECONDS = 5
# How long mpirun may live after the first failure. Open MPI ends the other ranks itself,
# at once, but its mpirun may stay; MPICH leaves the other ranks if one has just exited.
_STAY_SECONDS = 2.0


class MpirunSupervisor(Supervisor):
    """mpirun as the only process; its output reports how each rank fares.

    Args:
        words: The command.
        ranks: Those that it starts.
        start_seconds: How long they have to start.
        cut_off: Hosts that cannot open a connection to this one, each with the reason:
            mpirun would wait for them for ever.
        verbose: Whether to print what is started and how it ends.
        min_np: The job continues without ranks that fail, and has succeeded when so many
            have. None: the first failure ends it.
    """

    grows_by_itself = False  # ranks can join on other hosts by a restart only

    def __init__(
        self,
        words: Sequence[str],
        ranks: Sequence[Rank],
        *,
        start_seconds: float,
        cut_off: Mapping[str, str],
        verbose: bool,
        min_np: int | None = None,
    ):
        super().__init__(
            [],
            len(ranks),
            OutputStyle(prefix=False),
            verbose=verbose,
            elastic=min_np is not None,
        )
        self.words = words
        self.relay = Relay(self._on_rank_failure, self._end_hanging, verbose)
        self.min_np = min_np
        self.ranks = ranks
        self.cut_off = cut_off
        self.start_seconds = (
            min(start_seconds, _CALL_BACK_SECONDS) if cut_off else start_seconds
        )
        self.interrupted = self.lost_host = False

    def run(self, on_started: Callable[[], None] | None = None) -> int:
        """As of ``Supervisor``; 124 if not all ranks start in time."""
        words = list(self.words)
        for place, word in enumerate(words):
            if isinstance(word, HostfileText):
                # In memory: nothing is left behind, whatever kills this process.
                file = os.memfd_create("collective hosts", os.MFD_CLOEXEC)
                os.write(file, word.encode())
                words[place] = f"/proc/{os.getpid()}/fd/{file}"
        self.specs = [ProcessSpec(0, words, takes_input=True)]
        return super().run(on_started)

    def _wait(self) -> None:
        timer = _start_timer(self.start_seconds, self._end_if_not_all_started)
        super()._wait()
        timer.cancel()

    def request_restart(self) -> None:
        """Asks the ranks to end for the next generation; from any thread.

        To be called again until they have: a rank that has not joined the job yet takes
        no notice.
        """
        if not (self.not_started or self.ending):
            self._to_ranks(signal.SIGUSR1)

    def _end_hanging(self) -> None:
        """A rank waits too long: ends those for which it may wait (``rank.py``)."""
        if not self.ending:
            self._to_ranks(signal.SIGUSR2)

    def _to_ranks(self, number: signal.Signals) -> None:
        """A signal that mpirun passes on to the supervisor of each rank."""
        for pid in list(self.processes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    @property
    def finishing(self) -> bool:
        """Whether a rank has succeeded, or failed by itself: it would fail again."""
        ends = list(self.relay.ends.values())
        return any(not end.failed for end in ends) or bool(self.relay.gave_up)

    @property
    def lost_ranks(self) -> set[int]:
        """Ranks that have ended while the job continues without them."""
        return self.relay.lost_ranks

    @property
    def not_started(self) -> list[Rank]:
        """Ranks that have not started yet."""
        return [rank for rank in self.ranks if rank.rank not in self.relay.started]

    def _end_if_not_all_started(self) -> None:
        """Mpirun alone waits for ever for a host that it cannot reach."""
        if self.not_started and not self.ending:
            self.exit_code = NOT_STARTED
            self._end(signal.SIGTERM)

    def _output(self, rank: int) -> RankOutput:
        return self.relay

    def _captures(self) -> bool:
        return True

    def _name(self, rank: int) -> str:
        return "mpirun"

    def _on_rank_failure(self, early: bool) -> None:
        if self.min_np is None or early:
            _start_timer(_STAY_SECONDS, lambda: self._end(signal.SIGTERM))

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        super()._forward(number, frame)

    def _report(self) -> None:
        failed, unfinished = self.relay.failed, self.relay.unfinished
        if self.interrupted:
            return super()._report()
        if self.not_started and (self.cut_off or self.exit_code == NOT_STARTED):
            return self._report_not_started()
        if self.relay.restarts:
            self.exit_code = generations.EXIT_CODE
            return None
        if self.min_np is not None:
            if self.relay.succeeded >= self.min_np:
                self.exit_code = 0  # the job continued without the failed rank
                return None
            failed = self.relay.gave_up or failed
        if failed is not None:
            self.exit_code = failed.code
            errors = self.relay.errors_of_rank.get(failed.rank, ())
            rank = f"rank {failed.rank} of {self.size} on {failed.host}"
            return report_failure(rank, failed.how, errors)
        if self.relay.lost_hosts or (unfinished and self.exit_code == 0):
            return self._report_lost_host(unfinished)
        super()._report()

    def _report_not_started(self) -> None:
        self.exit_code = NOT_STARTED
        names = ", ".join(dict.fromkeys(rank.host.name for rank in self.not_started))
        reasons = "".join(f"\n  {name}: {why}" for name, why in self.cut_off.items())
        hint = "" if reasons else "; --start-timeout SECONDS allows a slow start"
        print_message(
            f"{len(self.not_started)} of {self.size} ranks did not start within "
            f"{self.start_seconds:g} s, on {names}{reasons}\n"
            "HINT: python -m collective.doctor with the same hosts; a firewall between "
            "them, or the wrong interface (--network-interfaces), keeps mpirun waiting"
            f"{hint}"
        )

    def _report_lost_host(self, unfinished: Sequence[int]) -> None:
        """Open MPI 5 exits with 0 when it has lost a host."""
        self.exit_code, self.lost_host = 1, True
        hosts = self.relay.lost_hosts  # by their own names, or as they were given
        given = {rank.rank: rank.host.name for rank in self.ranks}
        own = self.relay.started
        ranks = [r for r in unfinished if {own[r], given[r]} & {*hosts}] or unfinished
        names = hosts or [own[r] for r in ranks]
        print_message(
            f"the connection to {', '.join(dict.fromkeys(names))} was lost; what became "
            f"of rank {', '.join(map(str, ranks))} of {self.size} is not known\n"
            "HINT: see whether the host runs, and python -m collective.doctor with the "
            "same hosts; --mpi-args can give it more time (docs/how-to/launching.md)"
        )


def _start_timer(seconds: float, then: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, then)
    timer.daemon = True
    timer.start()
    return timer
