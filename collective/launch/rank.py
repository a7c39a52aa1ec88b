"""One rank under mpirun: ``python -m collective.launch.rank -- python train.py``.

Our launcher has mpirun start this in place of the program, so that on every host, and
under every MPI, output is whole lines with the rank's number, the rank runs on its
share of the cores, nothing that it started outlives it, and how it ended is told.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from collective.elastic import generations, membership_file
from collective.environment import Environment, detect
from collective.environment.base import MIN_NP
from collective.errors import CollectiveError
from collective.launch import cores
from collective.launch.job import Job, Member
from collective.launch.output import Style, last_words, tell
from collective.launch.relay import EARLY
from collective.streams import open_streams

_LOOK_SECONDS = 0.5


class WatchedRank(Job):
    """A rank and its output; the launcher that reads it makes the report."""

    def _who(self, rank: int) -> str:
        return f"rank {rank} on {socket.gethostname()}"

    announces = False
    # Where ranks may be lost: whether this one has met the others.
    met: membership_file.Board | None = None

    def _rest(self) -> str:
        return EARLY if self.met is not None and not self.met.told(0) else ""

    def _wait(self) -> None:
        if self.announces:
            tell(f"{self._who(self.members[0].rank)} started")
        threading.Thread(
            target=self._end_with, args=(os.getppid(),), daemon=True
        ).start()
        super()._wait()

    def _end_with(self, parent: int) -> None:
        """Ends the rank when mpirun's daemon is killed: it then has another parent.

        The kernel could tell us at once, but it means the death of the thread that
        started us, and which thread of an MPI's daemon that was is its own business.
        """
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        self._end(signal.SIGTERM)

    def _ended(self, rank: int, code: int) -> None:
        super()._ended(rank, code)
        if not self.announces or code:
            return
        if self.met is not None and self.met.told(0) == membership_file.LEFT:
            tell(f"{self._who(rank)} left")
        elif not self.verbose:
            tell(f"{self._who(rank)} ended with 0")  # else told already

    def _report(self) -> None:
        if self.failed and self.style.directory is not None:
            rank = self.failed[0]
            for line in last_words(self.outputs[rank].last):
                print(f"[{rank}] {line}", file=sys.stderr)
            sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the rank; returns its exit code."""
    open_streams()
    parser = argparse.ArgumentParser("python -m collective.launch.rank")
    parser.add_argument("--no-prefix", action="store_true")
    parser.add_argument("--timestamp", action="store_true")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--no-binding", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--announce", action="store_true")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    try:
        place = detect()
    except CollectiveError as error:
        tell(str(error))
        return error.exit_code
    style = Style(not options.no_prefix, options.timestamp, options.directory)
    met = membership_file.Board(1)
    member = Member(
        place.rank,
        options.command,
        {membership_file.VARIABLE: met.path},
        cores=() if options.no_binding else _cores(place),
        takes_input=place.rank == 0,
    )
    job = WatchedRank([member], place.size, style, options.verbose, inherit=True)
    job.announces = options.announce
    job.met = met if MIN_NP in os.environ else None
    if generations.there():
        signal.signal(signal.SIGUSR1, lambda *_: _ask_to_renew(met))
    code = job.run()
    if code == generations.EXIT_CODE:
        return 0
    if code and job.met is not None:
        # mpirun ends all ranks where one ends with another code than 0, but lets
        # them go on where one was killed.
        os.kill(os.getpid(), signal.SIGKILL)
    return code


def _ask_to_renew(met: membership_file.Board) -> None:
    """What mpirun passes on; again and again, so a rank may not be there yet."""
    if met.told(0):
        met.ask_to_renew(0)


def _cores(place: Environment) -> list[int]:
    return cores.share(place.local_size)[place.local_rank]


if __name__ == "__main__":
    sys.exit(main())
