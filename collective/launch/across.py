"""Ranks on several hosts: composes mpirun's line, prints it, runs it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from collective.environment.base import TABLE
from collective.hosts import Rank, slurm
from collective.launch import mpi, reachable
from collective.launch.job import GRACE_SECONDS, Job, Member
from collective.launch.output import KEPT_LINES, Output, Style, lines, report, tell

START_SECONDS = 120
LATE = 124  # the exit code of timeout(1)
# What collective.launch.rank tells of the rank that it watches.
_STARTED = re.compile(r"collective\.launch: rank (\d+) on \S+ started\s*$")
_ENDED = re.compile(
    r"collective\.launch: rank (\d+) on (\S+) ended ((?:with|by) ([1-9]\d*|SIG[A-Z]+\d*))\s*$"
)
_LINE = re.compile(r"\[(\d+)\] (.*)")


def run(
    ranks: Sequence[Rank],
    options: argparse.Namespace,
    style: Style,
    variables: Mapping[str, str],
) -> int:
    """Runs the ranks by mpirun, or with ``--dry-run`` only prints its line.

    Raises:
        UsageError: If there is no mpirun, it cannot do what is wanted, or a host does
            not answer.
    """
    counts: dict[str, int] = {}
    for rank in ranks:
        counts[rank.host.login] = rank.local_size
    hosts = [
        dataclasses.replace(rank.host, slots=counts[rank.host.login], max_slots=None)
        for rank in ranks
        if rank.local_rank == 0
    ]
    slots = [host.slots or 0 for host in hosts]
    variables = {**variables, TABLE: slurm.tasks(slots)}
    wanted = mpi.Wanted(
        hosts,
        [*_watched(options, style), *_found(options.command)],
        exported=[n for n in mpi.exported(os.environ) if n not in variables],
        variables=variables,
        nics=options.nics,
        remote_shell=options.remote_shell,
        ssh=reachable.ssh_options(options),
        tcp=options.tcp_flag,
        binding=shlex.split(options.binding_args),
        more=shlex.split(options.mpi_args),
    )
    words = mpi.compose(mpi.find(options.mpirun), wanted)
    if options.dry_run:
        print(mpi.shell(words))
        return 0
    tell(mpi.shell(words))
    reachable.check(hosts, options)
    with tempfile.TemporaryDirectory(prefix="collective-") as folder:
        file = Path(folder, "hosts")
        for word in words:
            if isinstance(word, mpi.Hostfile):
                file.write_text(word)
        words = [str(file) if isinstance(w, mpi.Hostfile) else w for w in words]
        seconds = options.start_timeout or START_SECONDS
        return Mpirun(words, ranks, seconds, options.verbose).run()


def _found(command: Sequence[str]) -> list[str]:
    """The command with its program's path: Open MPI puts itself first on the PATH."""
    return [shutil.which(command[0]) or command[0], *command[1:]]


def _watched(options: argparse.Namespace, style: Style) -> list[str]:
    """The start of each rank's command: our own watcher on its host."""
    words = [sys.executable, "-m", "collective.launch.rank", "--announce"]
    if not style.prefix:
        words.append("--no-prefix")
    if style.timestamp:
        words.append("--timestamp")
    if style.directory is not None:
        words += ["--directory", str(style.directory)]
    if options.binding_args:
        words.append("--no-binding")
    if options.verbose:
        words.append("--verbose")
    return [*words, "--"]


class Mpirun(Job):
    """mpirun as the only process; which rank failed is read from what it passes on."""

    def __init__(
        self, words: Sequence[str], ranks: Sequence[Rank], seconds: float, verbose: bool
    ):
        member = Member(0, words, takes_input=True)
        super().__init__([member], len(ranks), Style(prefix=False), verbose)
        self.relay = Relay(self._rank_failed)
        self.ranks = ranks
        self.seconds = seconds
        self.interrupted = False

    def _wait(self) -> None:
        patience = threading.Timer(self.seconds, self._look_who_started)
        patience.daemon = True
        patience.start()
        super()._wait()
        patience.cancel()

    def _look_who_started(self) -> None:
        """Ends the job if not all did: mpirun waits for ever for a host it cannot reach."""
        late = [r for r in self.ranks if r.rank not in self.relay.started]
        if not late or self.ending:
            return
        self.exit_code = LATE
        names = ", ".join(dict.fromkeys(r.host.name for r in late))
        tell(
            f"{len(late)} of {self.size} ranks did not start within {self.seconds:g} s, "
            f"on {names}\n"
            "HINT: python -m collective.doctor with the same hosts; a firewall between "
            "them, or the wrong interface (--network-interfaces), keeps mpirun waiting; "
            "a slow start is given more time by --start-timeout SECONDS"
        )
        self._end(signal.SIGTERM)

    def _output(self, rank: int) -> Output:
        return self.relay

    def _captures(self) -> bool:
        return True

    def _who(self, rank: int) -> str:
        return "mpirun"

    def _rank_failed(self) -> None:
        """Open MPI ends the others; MPICH leaves them, if the rank just ended."""
        patience = threading.Timer(GRACE_SECONDS, self._end, (signal.SIGTERM,))
        patience.daemon = True
        patience.start()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        super()._forward(number, frame)

    def _report(self) -> None:
        failed = self.relay.failed
        if failed is None or self.interrupted:
            return super()._report()
        self.exit_code = failed.code
        errors = self.relay.of_rank.get(failed.rank, ())
        report(
            f"rank {failed.rank} of {self.size} on {failed.host}", failed.how, errors
        )


@dataclasses.dataclass(frozen=True)
class Failed:
    """The first rank that failed: where, how it ended (``with 7``), its exit code."""

    rank: int
    host: str
    how: str
    code: int


class Relay(Output):
    """Passes mpirun's output on, and keeps the last lines of each rank's stderr."""

    def __init__(self, on_failure: Callable[[], None]) -> None:
        super().__init__(0, 1, Style(prefix=False))
        self.of_rank: dict[int, list[str]] = {}
        self.started: set[int] = set()
        self.failed: Failed | None = None
        self._on_failure = on_failure

    def _copy(self, pipe: IO[bytes], target: IO[str], is_error: bool) -> None:
        for line in lines(pipe):
            if is_error:
                told = _STARTED.search(line)
                if told:
                    self.started.add(int(told[1]))
                    continue
                self._note(line)
            with contextlib.suppress(OSError, ValueError):
                target.write(line)
                target.flush()

    def _note(self, line: str) -> None:
        ended = _ENDED.search(line)
        if ended and self.failed is None:
            code = (
                int(ended[4]) if ended[4].isdigit() else 128 + signal.Signals[ended[4]]
            )
            self.failed = Failed(int(ended[1]), ended[2], ended[3], code)
            self._on_failure()
        said = _LINE.search(line)
        if said:
            kept = self.of_rank.setdefault(int(said[1]), [])
            kept.append(said[2])
            del kept[:-KEPT_LINES]
        elif not ended:
            self.last.append(line)
