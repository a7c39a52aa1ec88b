"""One rank under mpirun: ``python -m collective.launch.rank -- python train.py``.

The launcher has mpirun start this in place of the program, so that on every host, and
under every MPI, output is whole lines with the rank's number, the rank runs on its share
of the cores, nothing that it started outlives it, and its end is reported.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from collective.elastic import generations, membership_file, wait_report
from collective.elastic.membership_file import MembershipFile
from collective.elastic.wait_report import WaitReport
from collective.environment import detect
from collective.environment.base import MIN_NP, RANK_TIMEOUT
from collective.errors import CollectiveError
from collective.launch import cores, horovod_settings, memory_kills, processes
from collective.launch.options import LaunchOptions
from collective.launch.output import (
    OutputStyle,
    last_error_lines,
    print_message,
    settled,
)
from collective.launch.relay import EARLY
from collective.launch.supervisor import ProcessSpec, Supervisor
from collective.running_time import Lasting, Stops
from collective.streams import open_streams

_POLL_SECONDS = 0.5
# States that the launcher learns of at once.
_REPORTED = {
    membership_file.READY: "ready",
    membership_file.TRAINS: "trains",
    membership_file.HANDED_OVER: "handed over",
}


class RankSupervisor(Supervisor):
    """One rank and its output; the launcher that reads it makes the report."""

    inherits_files = True  # as the ranks of MPICH must
    # Where the rank reports since when it waits; None: it may wait for ever.
    report: WaitReport | None = None
    timeout = math.inf  # for how long it waits before the launcher hears of it
    works = 0.0  # for how long it has not waited, while this process ran
    score = "0"  # before memory_kills.set_oom_score
    reported_state = b""  # the last that the launcher knows of
    word = ""  # that its messages carry (relay)
    stands_still = False  # no thread of it has run for longer than the time-out

    def start_watch(self) -> None:
        """To be called when the rank is started."""
        parent = os.getppid()
        self._print("started")
        threading.Thread(target=self._watch, args=(parent,), daemon=True).start()

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {socket.gethostname()}{self.word}"

    def _print(self, what: str) -> None:
        """Prints a message of this rank, for ``relay`` to read."""
        print_message(f"{self._name(self.specs[0].rank)} {what}")

    def _consequence(self) -> str:
        assert self.membership is not None
        return "" if not self.elastic or self.membership.has_joined(0) else EARLY

    def _watch(self, parent: int) -> None:
        """Ends the rank when mpirun's daemon is killed: it then has another parent.

        The parent-death signal of the kernel is of no use here: it means the death of the
        thread that started this process, and a daemon may end that thread any time.
        Meanwhile it reports to the launcher a rank that waits too long for others.
        """
        reported, activity, still = 0.0, 0, Lasting(self.timeout)
        stops = Stops()
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
            now = stops.look()
            if self.report is None:
                continue
            waits = self.report.waits()
            waits -= stops.since(now - waits)
            self.works = self.report.works()
            self.works -= stops.since(now - self.works)
            before, activity = activity, sum(map(processes.activity, self.processes))
            self.stands_still = still.since(activity == before)
            reported = min(reported, waits)
            if waits - reported > self.timeout and not self._is_stopped():
                self._print("waits")
                reported = waits
        self._end(signal.SIGTERM)

    def _look_after(self) -> None:
        super()._look_after()
        assert self.membership is not None
        state = self.membership.read(0)
        if state != self.reported_state and state in _REPORTED:
            self._print(_REPORTED[state])
            self.reported_state = state

    def end_if_hanging(self) -> None:
        """Kills the rank, for which others wait, if it does not wait for others itself.

        One that has been at work for less than the time-out may just have been awaited,
        and is not to blame. To the launcher, the answer shows that this host runs.

        The launcher sends the same signal to let a rank continue that is ready.
        """
        assert self.membership is not None
        if self.membership.read(0) == membership_file.READY:
            for process in ("self", *self.processes):
                memory_kills.set_oom_score(process, self.score)
            self.membership.release(0)
            return
        self._print("answers")
        hangs = self.works > self.timeout or self._is_stopped() or self.stands_still
        if self.ending or not hangs:
            return
        self._print(
            "makes no progress, and others have waited for it for "
            f"{self.timeout:g} s: killed it\n"
            "HINT: --rank-timeout SECONDS gives a rank that is only slow more time"
        )
        self._signal_all(signal.SIGKILL)

    def _is_stopped(self) -> bool:
        return any(map(processes.is_stopped, list(self.processes)))

    def _on_exit(self, rank: int, code: int) -> None:
        super()._on_exit(rank, code)
        if code:
            return
        assert self.membership is not None
        if self.elastic and self.membership.read(0) == membership_file.LEFT:
            self._print("left")
        elif not self.verbose:  # else it is printed already
            self._print("ended with exit code 0")

    def _report(self) -> None:
        if self.failed and self.style.directory is not None:
            rank = self.failed[0]
            for line in last_error_lines(self.outputs[rank].last_errors):
                print(f"[{rank}] {line}", file=sys.stderr)
            sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the rank; returns its exit code."""
    open_streams()
    parser = argparse.ArgumentParser("python -m collective.launch.rank")
    parser.add_argument("--no-prefix", action="store_true")
    parser.add_argument("--plain-stdout", action="store_true")
    parser.add_argument("--timestamp", action="store_true")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--no-binding", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--word", default="")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    try:
        environment = detect()
        end_seconds = LaunchOptions().end_seconds
    except CollectiveError as error:
        print_message(str(error))
        return error.exit_code
    membership, report = MembershipFile(1), WaitReport()
    elastic = MIN_NP in os.environ
    bound = [] if options.no_binding else cores.share(environment.local_size)
    spec = ProcessSpec(
        environment.rank,
        options.command,
        {
            **horovod_settings.place(environment),
            membership_file.VARIABLE: membership.path,
            wait_report.VARIABLE: report.path,
        },
        bound[environment.local_rank] if bound else (),
        takes_input=environment.rank == 0,
    )
    style = OutputStyle(
        not options.no_prefix,
        options.timestamp,
        options.directory,
        generations.number() > 0,
        options.plain_stdout,
    )
    job = RankSupervisor(
        [spec],
        environment.size,
        style,
        verbose=options.verbose,
        elastic=elastic,
        membership=membership,
        end_seconds=end_seconds,
    )
    job.word = options.word and f" {options.word}"
    if elastic and RANK_TIMEOUT in os.environ:
        job.report, job.timeout = report, float(os.environ[RANK_TIMEOUT])
        signal.signal(signal.SIGUSR2, lambda *_: job.end_if_hanging())
    if generations.overlaps():  # those that train are not to be killed for its sake
        job.score = memory_kills.set_oom_score("self", "1000") or job.score
    if generations.may_restart():
        # mpirun passes it on, repeatedly: the rank may not have joined yet.
        signal.signal(signal.SIGUSR1, lambda *_: membership.ask_to_restart(0))
    code = job.run(on_started=job.start_watch)
    if code == generations.EXIT_CODE:
        return settled(0)
    if code and elastic:
        # mpirun ends all ranks where one exits with another code than 0, but lets the
        # other ranks continue where one was killed.
        os.kill(os.getpid(), signal.SIGKILL)
    return settled(code)


if __name__ == "__main__":
    sys.exit(main())
