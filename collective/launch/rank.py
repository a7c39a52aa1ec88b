"""One rank under mpirun: ``python -m collective.launch.rank -- python train.py``.

The launcher has mpirun start this in place of the program. So, on every host and under every
MPI, output is whole lines with the rank's number, the rank runs on its share of the cores,
no process that it started outlives it, and its end is reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import signal
import socket
import sys
from collections.abc import Sequence

from collective.elastic import generations, membership_file, wait_report
from collective.elastic.membership_file import MembershipFile
from collective.elastic.wait_report import WaitReport
from collective.environment import Environment, detect
from collective.environment.base import MIN_NP, RANK_TIMEOUT
from collective.errors import CollectiveError
from collective.launch import cores, endings, horovod_settings, processes
from collective.launch.options import (
    OF_A_RANK,
    LaunchOptions,
    add_options,
    from_parsed,
)
from collective.launch.output import last_error_lines, print_message, settled
from collective.launch.relay import EARLY, STILL_WAITS_SECONDS
from collective.launch.supervisor import ProcessSpec, Supervisor
from collective.running_time import Lasting, Stops
from collective.streams import open_streams

_POLL_SECONDS = 0.5
# States that are reported to the launcher at once.
_REPORTED = {
    membership_file.READY: "ready",
    membership_file.TRAINS: "trains",
    membership_file.HANDED_OVER: "handed over",
}


class RankWatch:
    """One rank and its output; the launcher reads the output and makes the report.

    Args:
        options: The launcher's options that concern a rank.
        environment: The number of this rank, and the number of ranks.
        word: The word in its messages; see ``Relay``.

    Raises:
        UsageError: If COLLECTIVE_TIMEOUT is not a time.
    """

    def __init__(
        self, options: LaunchOptions, environment: Environment, word: str = ""
    ):
        self.rank, self.elastic = environment.rank, options.min_np is not None
        self.membership = MembershipFile(1, first=self.rank)
        self.wait_report = WaitReport()
        # For how many seconds the rank waits before the launcher gets a message.
        self.timeout = math.inf
        if self.elastic and RANK_TIMEOUT in os.environ:
            self.timeout = float(os.environ[RANK_TIMEOUT])
        bound = cores.share(environment.local_size)[environment.local_rank]
        spec = ProcessSpec(
            self.rank,
            options.command,
            {
                **horovod_settings.place(environment),
                wait_report.VARIABLE: self.wait_report.path,
            },
            () if options.binding_args else bound,
            takes_input=self.rank == 0,
        )
        self.supervisor = Supervisor(
            [spec],
            environment.size,
            options,
            self,
            name=lambda rank: f"rank {rank} on {socket.gethostname()}{word}",
            membership=self.membership,
            inherits_files=True,  # which the ranks of MPICH need
        )
        self.parent, self.stops, self.looked = os.getppid(), Stops(), 0.0
        self.reported_wait = 0.0
        # A number that changes while the rank runs, and the time of its last change.
        self.activity, self.still = 0, Lasting(self.timeout)
        self.works = 0.0  # seconds without a wait, while this process ran
        self.score = "0"  # the score before endings.set_oom_score
        self.reported_state = b""  # the last state that the launcher knows
        # Whether none of its threads has run for longer than the time-out.
        self.stands_still = False

    def report_state(self, what: str) -> None:
        """Print a message of this rank, for ``relay`` to read."""
        print_message(f"{self.supervisor.name(self.rank)} {what}")

    def look(self) -> None:
        """Report to the launcher a new state of the rank, and that it waits too long.

        This ends the rank if mpirun's daemon was killed, since this process then has another
        parent. The kernel's parent-death signal does not help: it means the death of the
        thread that started this process, and a daemon may end that thread at any time.
        """
        state = self.membership.read(self.rank)
        if state != self.reported_state and state in _REPORTED:
            self.report_state(_REPORTED[state])
            self.reported_state = state
        now = self.stops.look()
        if now < self.looked + _POLL_SECONDS:
            return
        self.looked = now
        if os.getppid() != self.parent:
            self.supervisor.give_up()
        if self.timeout < math.inf:
            self._look_whether_it_waits(now)

    def _look_whether_it_waits(self, now: float) -> None:
        waits, self.works = (
            seconds - self.stops.since(now - seconds)
            for seconds in (self.wait_report.waits(), self.wait_report.works())
        )
        before = self.activity
        self.activity = sum(map(processes.activity, self.supervisor.processes))
        self.stands_still = self.still.since(self.activity == before)
        self.reported_wait = min(self.reported_wait, waits)
        due = self.timeout
        if self.reported_wait:
            due = self.reported_wait + min(self.timeout, STILL_WAITS_SECONDS)
        if waits > due and not self._is_stopped():
            self.report_state("waits")
            self.reported_wait = waits

    def end_if_hanging(self) -> None:
        """Kill the rank, for which others wait, if it does not wait for others itself.

        A rank that has worked for less than the time-out may have been awaited until just
        now, and is not to blame. The answer shows the launcher that this host runs.

        The launcher sends the same signal to let a rank continue that is ready.
        """
        if self.membership.read(self.rank) == membership_file.READY:
            for process in ("self", *self.supervisor.processes):
                endings.set_oom_score(process, self.score)
            self.membership.release(self.rank)
            return
        self.report_state("answers")
        hangs = self.works > self.timeout or self._is_stopped() or self.stands_still
        if self.supervisor.ending or not hangs:
            return
        self.report_state(
            "makes no progress, and others have waited for it for "
            f"{self.timeout:g} s: killed it\n"
            "HINT: --rank-timeout SECONDS gives a rank that is only slow more time"
        )
        self.supervisor.signal_all(signal.SIGKILL)

    def _is_stopped(self) -> bool:
        return any(map(processes.is_stopped, list(self.supervisor.processes)))

    def on_exit(self, rank: int, code: int) -> None:
        """Report the end of the rank to the launcher."""
        job = self.supervisor
        if code:
            if not job.ending:
                early = self.elastic and not self.membership.has_joined(self.rank)
                job.note_failure(rank, code, EARLY if early else "")
                job.end(signal.SIGTERM)
        elif self.elastic and self.membership.read(self.rank) == membership_file.LEFT:
            self.report_state("left")
        elif not job.verbose:  # otherwise it is printed already
            self.report_state("ended with exit code 0")

    def report(self) -> None:
        """Show the launcher the last errors of a rank whose output is in files."""
        job = self.supervisor
        if job.failed and job.style.directory is not None:
            for line in last_error_lines(job.outputs[self.rank].last_errors):
                print(f"[{self.rank}] {line}", file=sys.stderr)
            sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rank; return its exit code."""
    open_streams()
    parser = argparse.ArgumentParser("python -m collective.launch.rank")
    add_options(parser, OF_A_RANK)
    parser.add_argument("--word", default="")
    parser.add_argument("command", nargs="+")
    parsed = parser.parse_args(arguments)
    options = from_parsed(parsed)
    if MIN_NP in os.environ:
        options = dataclasses.replace(options, min_np=int(os.environ[MIN_NP]))
    options = dataclasses.replace(options, appends=generations.number() > 0)
    try:
        rank = RankWatch(options, detect(), parsed.word and f" {parsed.word}")
    except CollectiveError as error:
        print_message(str(error))
        return error.exit_code
    if rank.timeout < math.inf:
        signal.signal(signal.SIGUSR2, lambda *_: rank.end_if_hanging())
    if generations.overlaps():  # so the kernel spares the ranks that train
        rank.score = endings.set_oom_score("self", "1000") or rank.score
    if generations.may_restart():
        # mpirun passes it on repeatedly, because the rank may not have joined yet.
        signal.signal(
            signal.SIGUSR1, lambda *_: rank.membership.ask_to_restart(rank.rank)
        )
    job = rank.supervisor
    job.start()
    rank.report_state("started")
    job.watch()
    code = job.finish()
    if code == generations.EXIT_CODE:
        return settled(0)
    if code and rank.elastic:
        # mpirun ends all ranks if one exits with a code other than 0, but lets the other
        # ranks continue if one was killed.
        os.kill(os.getpid(), signal.SIGKILL)
    return settled(code)


if __name__ == "__main__":
    sys.exit(main())
