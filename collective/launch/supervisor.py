"""Starts the processes of a job on this host, watches them, and ends them together.

No process of a job stays if the job or this process is killed. On one host the processes
are the ranks. Across hosts there is one, mpirun, and under mpirun each rank has a supervisor
of its own. The meaning of a process's end differs between them, so each passes a policy:
``single_host.EndTogether``, ``elastic.ElasticRanks``, ``mpirun.Mpirun`` and
``rank.RankWatch``.
"""

from __future__ import annotations

import errno
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Protocol

from collective.elastic import membership_file
from collective.elastic.membership_file import MembershipFile
from collective.launch import containment, endings, processes, terminal
from collective.launch.cores import describe
from collective.launch.endings import Lingering, Undead
from collective.launch.options import LaunchOptions
from collective.launch.output import (
    OutputStyle,
    RankOutput,
    never_block,
    print_message,
    report_failure,
)
from collective.launch.screen import Screen
from collective.running_time import Deadline, Lasting

GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.02
# How a rank ends that KeyboardInterrupt has ended.
_INTERRUPTED = (128 + signal.SIGINT, -signal.SIGINT)
# Errors for limits of the system, not of the program: see _why_not_started.
_OUT_OF = {errno.EMFILE: "ulimit -n", errno.EAGAIN: "ulimit -u"}


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start."""

    rank: int  # it is the prefix of its lines
    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)  # added to ours
    cores: Sequence[int] = ()  # logical cores that it runs on; empty for all
    takes_input: bool = False  # gets the standard input of this process
    hidden: Sequence[str] = ()  # our variables that it does not get


class Policy(Protocol):
    """Decides for a kind of job how to react to its processes."""

    def on_exit(self, rank: int, code: int) -> None:
        """React to the end of a process: ``code`` is its exit code, or minus the signal."""

    def look(self) -> None:
        """Look for events that are late; called many times a second."""

    def report(self) -> None:
        """Print the report when all have ended, and settle the supervisor's exit code."""


class Supervisor:
    """The processes of one job on this host.

    Args:
        size: Number of ranks in the whole job.
        options: They say how output is shown and whether ranks may be lost.
        policy: Decides how to react to the end of a process, and which actions are due.
        name: Returns the name of a process in messages, from its rank.
        output: Shows the output of all processes; by default each has a ``RankOutput``.
        membership: The file in which ranks note that they wait for each other or have joined.
        contains: Whether processes that a process has started end with it.
        inherits_files: Whether processes get all open files.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        size: int,
        options: LaunchOptions,
        policy: Policy,
        *,
        name: Callable[[int], str] = "rank {}".format,
        output: RankOutput | None = None,
        membership: MembershipFile | None = None,
        contains: bool = True,
        inherits_files: bool = False,
    ):
        self.specs, self.size, self.policy = specs, size, policy
        self.name, self.output, self.membership = name, output, membership
        self.verbose = options.verbose
        self.style = options.style if output is None else OutputStyle()
        # With this, ranks save their state on SIGTERM, and a closed terminal (SIGHUP)
        # reaches them as SIGTERM.
        self.elastic = options.min_np is not None
        self.contains, self.inherits_files = contains, inherits_files
        self.processes: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}  # by pid
        self.outputs: dict[int, RankOutput] = {}  # by rank
        shares = size > 1 and self.style.prefix and self.style.directory is None
        self._typed_to: IO[bytes] | None = None  # the process that the terminal is for
        self.screen = Screen(self.style.one_program) if shares else None
        self.ending = self.interrupted = False
        self.script_decides = False  # when it ends, after Ctrl-C
        self.signals: list[int] = []  # signals that this process got
        self.exit_code = 0
        self.failed: tuple[int, str] | None = None  # rank, and how it ended
        self.undead, self.killed = Undead(), set[int]()
        self.marks = containment.Marks()
        self.mark_of: dict[int, str] = {}  # by pid
        self.memory_kills = endings.count_memory_kills()
        self.grace = Lasting(GRACE_SECONDS)
        self.lingering = membership and Lingering(membership, options.end_seconds)
        # Called many times a second while the job runs.
        self.meanwhile: Callable[[], None] = lambda: None

    def commands(self) -> str:
        """Return what would be started, as shell commands."""
        lines = []
        for spec in self.specs:
            variables = sorted(spec.variables.items())
            assigned = [f"{name}={shlex.quote(value)}" for name, value in variables]
            lines.append(
                f"[{spec.rank}] {' '.join(assigned)} {shlex.join(spec.command)}"
            )
        return "\n".join(lines)

    def start(self, has_threads: bool = False) -> None:
        """Start the processes; if one cannot be started, print why and kill the others.

        Args:
            has_threads: As for ``processes.start``. It is true for a job that is prepared
                while another one runs, which keeps the signals of this process.
        """
        if not has_threads:
            self._take_signals()
        self.watchdog = processes.Watchdog()
        try:
            for spec in self.specs:
                self.start_process(spec, has_threads)
        except OSError as error:
            self._note_not_started(error)
        never_block()
        if self._typed_to is not None:
            terminal.pass_on(self._typed_to)
        for output in self.outputs.values():
            output.start()

    def _take_signals(self) -> None:
        """Pass signals that this process gets from now on to this job."""
        for number in processes.ending_signals():
            signal.signal(number, self._forward)
        if self.contains:
            signal.signal(signal.SIGTSTP, self._suspend)

    def watch(self) -> None:
        """Watch the processes until all have ended."""
        self._take_signals()
        try:
            while self.processes:
                self.look()
                self.meanwhile()
                time.sleep(_POLL_SECONDS)
        except OSError as error:  # of a rank that was started late
            self._note_not_started(error)

    def _note_not_started(self, error: OSError) -> None:
        print_message(_why_not_started(error, self.specs[0].command[0]))
        self.exit_code, self.ending = 2, True
        self.signal_all(signal.SIGKILL)

    def look(self) -> None:
        """Reap ended processes and take due actions; called many times a second."""
        self._let_script_decide()
        # Not waitpid(-1), because host discovery has children of its own.
        for pid in list(self.processes):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._reap(pid, os.waitstatus_to_exitcode(status))
        if self.grace.since(self.ending):
            self.signal_all(signal.SIGKILL)
        for pid in self.undead.look(self.processes, self.killed):
            self.undead.leave(pid, self.name(self.processes[pid][0]))
            self._reap(pid, -signal.SIGKILL)
        if self.lingering:
            ranks = [(rank, pid) for pid, (rank, _) in self.processes.items()]
            for rank in self.lingering.look(ranks, self.name):
                self.signal_all(signal.SIGKILL, rank)
        self.policy.look()

    def give_up(self) -> None:
        """End all processes, unless they are being ended."""
        if not self.ending:
            self.end(signal.SIGTERM)

    def finish(self) -> int:
        """Kill processes that still run, and report how the job ended.

        Returns:
            0 if each process returned 0; else the exit code of the first that failed, or
            128 + the signal that ended it; 2 if the program cannot be started.
        """
        self.close()
        self.policy.report()
        return self.exit_code

    def close(self) -> None:
        """Kill processes that still run, and show the rest of the output."""
        self.signal_all(signal.SIGKILL)
        if self.contains:
            containment.kill(self.marks.job)
        deadline = Deadline(GRACE_SECONDS)
        for output in self.outputs.values():
            output.finish(deadline)
        if self.screen is not None:
            self.screen.flush()
        self.undead.report(GRACE_SECONDS)
        self.watchdog.close()

    def start_process(self, spec: ProcessSpec, has_threads: bool = False) -> None:
        """Start one process, whose output waits for ``RankOutput.start``."""
        output = self.output or RankOutput(
            spec.rank, self.size, self.style, self.screen
        )
        pipe = subprocess.PIPE if self.style.captures else None
        stdin = self._stdin(spec)
        ours = {k: v for k, v in os.environ.items() if k not in spec.hidden}
        variables = {**ours, **spec.variables}
        if self.membership is not None:
            variables[membership_file.VARIABLE] = self.membership.path
        mark = self.marks.make() if self.contains else ""
        if mark:
            variables[containment.VARIABLE] = mark
        process = processes.start(
            spec.command,
            has_threads=has_threads,
            cores=spec.cores,
            env=variables,
            stdin=stdin,
            stdout=None if self.style.plain_stdout else pipe,
            stderr=pipe,
            close_fds=not self.inherits_files,
        )
        self.processes[process.pid] = (spec.rank, process)
        self.mark_of[process.pid] = mark
        self.watchdog.add(process.pid, mark)
        self.outputs[spec.rank] = output
        output.attach(process.stdout, process.stderr, process.pid)
        if process.stdin is not None:
            self._typed_to = process.stdin
        if self.verbose:
            cores = f" on cores {describe(spec.cores)}" if spec.cores else ""
            print_message(f"{self.name(spec.rank)} is process {process.pid}{cores}")

    def _stdin(self, spec: ProcessSpec) -> int | None:
        """Return what ``Popen`` takes: our own input, a pipe from the terminal, or none."""
        if not spec.takes_input:
            return subprocess.DEVNULL
        if not sys.stdin.isatty():
            return None
        return subprocess.PIPE if self.style.one_program else subprocess.DEVNULL

    def report_failure(self, hint: str = "") -> None:
        """Print that the job was interrupted, or which process failed.

        Args:
            hint: The HINT; by default the one for such an end, if there is one.
        """
        if self.interrupted:
            print_message("interrupted")
        elif self.failed:
            rank, how = self.failed
            report_failure(self.name(rank), how, self.outputs[rank].unseen_errors, hint)

    def _reap(self, pid: int, code: int) -> None:
        # Before the process is forgotten, end all that it has started.
        processes.signal_group(pid, signal.SIGKILL)
        mark = self.mark_of.pop(pid)
        if mark and self.elastic:  # otherwise when the job ends, for all ranks at once
            containment.kill(mark)
        self.watchdog.forget(pid)
        rank, process = self.processes.pop(pid)
        process.returncode = code
        if self.verbose:
            print_message(f"{self.name(rank)} ended {how_ended(code)}")
        self._let_script_decide()
        if code in _INTERRUPTED and not self.ending and self._has_heard(rank):
            self.exit_code = 128 + signal.SIGINT
            self.interrupted = self.script_decides = True
            self.end(signal.SIGKILL)
        self.policy.on_exit(rank, code)

    def _has_heard(self, rank: int) -> bool:
        """Return whether a rank has raised KeyboardInterrupt in its script."""
        if self.membership is None:
            return False
        is_alone = self.size == 1 and signal.SIGINT in self.signals
        return is_alone or self.membership.read(rank) == membership_file.INTERRUPTED

    def _let_script_decide(self) -> None:
        """Kill no rank after Ctrl-C whose script may catch it: as with Python alone."""
        if not self.interrupted or self.script_decides:
            return
        if any(self._has_heard(spec.rank) for spec in self.specs):
            self.script_decides = True
            self.ending = self.interrupted = False
            self.exit_code = 0

    def note_failure(self, rank: int, code: int, consequence: str = "") -> None:
        """Print how a process ended, and what follows; keep it for the report."""
        how = how_ended(code)
        # A rank that ended by itself explains more than one that was killed.
        if not self.failed or (code > 0 and self.exit_code > 128):
            self.exit_code = 128 - code if code < 0 else code
            self.failed = (rank, how)
        if self.screen is not None:
            self.screen.flush()
        if code == -signal.SIGKILL and endings.count_memory_kills() > self.memory_kills:
            consequence += endings.MEMORY_HINT
        print_message(f"{self.name(rank)} ended {how}{consequence}")

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal of this process on to the job."""
        self.signals.append(number)
        if not self.ending:
            self.exit_code = 128 + number
            self.interrupted = number == signal.SIGINT
            if self.interrupted and self.script_decides:
                number = signal.SIGKILL
        elif number == signal.SIGINT and self.contains:  # a second Ctrl-C
            number = signal.SIGKILL
        if number == signal.SIGHUP and self.elastic:
            number = signal.SIGTERM
        self.end(signal.Signals(number))

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Stop the ranks with this process on Ctrl-Z, and continue them with it."""
        self.signal_all(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self.signal_all(signal.SIGCONT)

    def end(self, number: signal.Signals) -> None:
        """Signal every process, and kill those that still run after a while."""
        self.signal_all(number)
        self.signal_all(signal.SIGCONT)  # a stopped process gets the signal, too
        self.ending = True  # see look

    def signal_all(self, number: signal.Signals, only: int | None = None) -> None:
        """Signal the process groups of all ranks, or of one."""
        for pid, (rank, _) in list(self.processes.items()):
            if only in (None, rank):
                processes.signal_group(pid, number)
                if number == signal.SIGKILL:
                    self.killed.add(pid)


def how_ended(code: int) -> str:
    """Return ``with exit code 7``, or ``by SIGKILL`` for -9, or ``SIGRT36`` for real time."""
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:  # Python has names for only two real-time signals
        return f"by SIGRT{-code}"


def _why_not_started(error: OSError, program: str) -> str:
    if error.filename not in (None, program):
        return (
            f"cannot write {error.filename}: {error.strerror}\n"
            "HINT: --output-filename DIR, with a folder that can be written"
        )
    if limit := _OUT_OF.get(error.errno or 0):
        hint = f"raise the limit that `{limit}` shows, or start fewer ranks"
    elif error.errno == errno.EACCES:
        hint = f"chmod +x {program}, or start it by its interpreter: python {program}"
    else:
        hint = "give a program that is on the PATH"
    return f"cannot start {program!r}: {error.strerror}\nHINT: {hint}"
