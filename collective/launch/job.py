"""Processes of one host: started, watched, and ended all together.

Whatever kills the job or this process, nothing of it is left running. It starts the
ranks of a job on this host; across hosts it starts mpirun, and, beneath mpirun, the
single rank that each of its processes stands for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from collective.launch.cores import describe
from collective.launch.output import Output, Style, report, tell
from collective.launch.watchdog import Watchdog

GRACE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Member:
    """One process to start.

    Attributes:
        rank: Its number; the prefix of its lines.
        command: Program and arguments.
        variables: Added to the environment.
        cores: Those it is bound to; empty for all.
        takes_input: Whether it gets this process' standard input.
    """

    rank: int
    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    cores: Sequence[int] = ()
    takes_input: bool = False


class Job:
    """The processes of one job on this host.

    Args:
        members: What to start.
        size: Number of ranks in the whole job.
        style: How their output is shown.
        verbose: Whether to tell what is started and how it ends.
        inherit: Whether they get all open files, as the ranks of MPICH must.
    """

    def __init__(
        self,
        members: Sequence[Member],
        size: int,
        style: Style,
        verbose: bool = False,
        inherit: bool = False,
    ):
        self.members = members
        self.size = size
        self.style = style
        self.verbose = verbose
        self.inherit = inherit
        self.processes: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
        self.outputs: dict[int, Output] = {}
        self.ending = False
        self.exit_code = 0
        self.failed: tuple[int, str] | None = None

    def run(self) -> int:
        """Starts the processes and waits for them.

        Returns:
            0 if each returned 0; else what the first that failed returned, or 128 +
            the signal that ended it; 2 if the program cannot be started.
        """
        for number in _SIGNALS:
            signal.signal(number, self._forward)
        self.watchdog = Watchdog()
        try:
            for member in self.members:
                self._start(member)
            # After the last start only: a child of a threaded process must not
            # run Python between fork and exec, and here it does (_tie).
            for output in self.outputs.values():
                output.start()
            self._wait()
        except OSError as error:
            name = error.filename or self.members[0].command[0]
            program = error.filename is None or name == self.members[0].command[0]
            tell(
                f"cannot start {self.members[0].command[0]!r}: {error.strerror}\n"
                "HINT: give a program that is on the PATH"
                if program
                else f"cannot write {name}: {error.strerror}\n"
                "HINT: --output-filename DIR, with a folder that can be written"
            )
            self.exit_code = 2
        finally:
            self._signal_all(signal.SIGKILL)
            for output in self.outputs.values():
                output.finish(GRACE_SECONDS)
            self.watchdog.close()
        self._report()
        return self.exit_code

    def _start(self, member: Member, alone: bool = True) -> None:
        """Starts a process; ``alone``: while this one has no threads."""
        output = self._output(member.rank)
        pipe = subprocess.PIPE if self._captures() else None
        launcher = os.getpid()
        wants_input = member.takes_input and not sys.stdin.isatty()
        process = subprocess.Popen(
            list(member.command),
            env={**os.environ, **member.variables},
            stdin=None if wants_input else subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
            close_fds=not self.inherit,
            preexec_fn=(lambda: _tie(launcher, member.cores)) if alone else None,
        )
        if member.cores and not alone:
            os.sched_setaffinity(process.pid, member.cores)
        self.processes[process.pid] = (member.rank, process)
        self.watchdog.add(process.pid)
        self.outputs[member.rank] = output
        output.attach(process.stdout, process.stderr)
        if self.verbose:
            cores = f" on cores {describe(member.cores)}" if member.cores else ""
            who = self._who(member.rank)
            tell(f"{who} is process {process.pid}{cores}")

    def _output(self, rank: int) -> Output:
        return Output(rank, self.size, self.style)

    def _captures(self) -> bool:
        return self.style.captures

    def _who(self, rank: int) -> str:
        return f"rank {rank}"

    def _wait(self) -> None:
        while self.processes:
            pid, status = os.waitpid(-1, 0)
            if pid in self.processes:
                self._reap(pid, status)

    def _reap(self, pid: int, status: int) -> None:
        # Before it is forgotten, what it started is ended with it.
        _signal_group(pid, signal.SIGKILL)
        self.watchdog.forget(pid)
        rank, process = self.processes.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        process.returncode = code
        self._ended(rank, code)

    def _ended(self, rank: int, code: int) -> None:
        if self.verbose:
            tell(f"{self._who(rank)} ended with {code}")
        if code == 0 or self.ending:
            return
        rest = self._rest()
        if code < 0 and self.processes:
            rest += (
                "\nHINT: --min-np goes on without ranks that die (backends native and "
                "mpi); train.py --checkpoint-dir DIR --resume goes on from a checkpoint"
            )
        self._blame(rank, code, rest)
        self._end(signal.SIGTERM)

    def _blame(self, rank: int, code: int, rest: str) -> None:
        """Notes that a rank has failed, and tells what follows."""
        how = f"by {signal_name(-code)}" if code < 0 else f"with {code}"
        # One that ended by itself says more than one that was killed and survived.
        if not self.failed or (code > 0 and self.exit_code > 128):
            self.exit_code = 128 - code if code < 0 else code
            self.failed = (rank, how)
        tell(f"{self._who(rank)} ended {how}{rest}")

    def _rest(self) -> str:
        """What is to be told beside how a rank failed."""
        return "; ending the others" if self.processes else ""

    def _report(self) -> None:
        if self.failed:
            rank, how = self.failed
            errors = self.outputs[rank].last
            report(self._who(rank), how, errors)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if not self.ending:
            self.exit_code = 128 + number
        self._end(signal.Signals(number))

    def _end(self, number: signal.Signals) -> None:
        """Signals every process, and kills those still there after a while."""
        self._signal_all(number)
        self._signal_all(signal.SIGCONT)  # a rank that was stopped hears it, too
        if not self.ending:
            self.ending = True
            timer = threading.Timer(GRACE_SECONDS, self._signal_all, (signal.SIGKILL,))
            timer.daemon = True
            timer.start()

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in list(self.processes):
            _signal_group(pid, number)


def signal_name(number: int) -> str:
    """As ``SIGKILL``; a real-time signal is ``SIGRT36``: Python names but two."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRT{number}"


def _tie(launcher: int, cores: Sequence[int]) -> None:
    """In a new process: dies with the launcher, and runs on its cores."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if cores:
        os.sched_setaffinity(0, cores)
    if os.getppid() != launcher:
        os._exit(1)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
