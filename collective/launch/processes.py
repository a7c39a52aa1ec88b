"""Child processes that cannot be left behind: how to start, signal, run and end one.

A program that may start others leads a process group of its own, so that a signal to the
group reaches all of them, and the kernel ends it when its parent dies. What it has started
is ended by a watchdog.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from collective.launch import containment
from collective.running_time import Deadline

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.02
_CLOSE = "close\n"  # to the watchdog
_SHOWN_CHILDREN = 3
_STATES = {
    "D": "uninterruptible or frozen",
    "t": "traced",
    "T": "stopped",
    "Z": "a zombie",
}
# What in_child does, without Python code in a fork of a process that has threads.
_BY_EXEC = f"""
import ctypes, os, sys
parent, number, *command = sys.argv[1:]
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, int(number))
if os.getppid() != int(parent):
    os._exit(1)
os.execvp(command[0], command)
"""


def find_program(name: str) -> str | None:
    """Path of a program of this Python environment, else of one on the PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def start(
    command: Sequence[str],
    *,
    on_parent_death: signal.Signals = signal.SIGKILL,
    has_threads: bool = False,
    cores: Sequence[int] = (),
    **popen: Any,
) -> subprocess.Popen[bytes]:
    """Starts a program as the leader of a new session and process group.

    Args:
        on_parent_death: What the kernel sends to it when the thread that started it ends.
        has_threads: Whether this process has threads: then no Python code may run
            between fork and exec, and a second interpreter runs it.
        cores: Logical cores that it runs on; empty for those of this process.
        **popen: Further arguments of ``subprocess.Popen``.

    Raises:
        OSError: If the program cannot be started.
    """
    parent = os.getpid()
    if has_threads:
        number = str(int(on_parent_death))
        before = [sys.executable, "-I", "-S", "-c", _BY_EXEC, str(parent), number]
        command = [*before, *command]

    def in_child() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, on_parent_death)
        if cores:
            os.sched_setaffinity(0, cores)
        if os.getppid() != parent:  # it died before prctl
            os._exit(1)

    process = subprocess.Popen(
        list(command),
        start_new_session=True,
        preexec_fn=None if has_threads else in_child,
        **popen,
    )
    if cores and has_threads:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(process.pid, cores)
    return process


def ending_signals() -> list[signal.Signals]:
    """The signals that end a job; without SIGHUP if ``nohup`` has it ignored: it stays so."""
    found = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        found.append(signal.SIGHUP)
    return found


def signal_group(leader: int, number: int) -> bool:
    """Signals the group that a process leads; returns whether it still exists.

    The signal 0 only asks.
    """
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP."""
    return _state(pid) in ("T", "t")


def has_ended(pid: int) -> bool:
    """Whether there is no such process, or only a zombie."""
    return _state(pid) in ("", "Z")


def _state(pid: int) -> str:
    """The letter that ps shows; empty for a process that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def describe_state(pid: int) -> str:
    """Returns what a process is doing, in the words of ps."""
    state = _state(pid)
    meaning = f", {_STATES[state]}" if state in _STATES else ""
    return f"state {state or 'unknown'}{meaning}"


def kill_is_pending(pid: int) -> bool:
    """Whether SIGKILL waits for a process that cannot take it.

    It may be frozen, traced, or in an uninterruptible sleep; it will run no more code of
    its program.
    """
    found = 0
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("SigPnd", "ShdPnd"):
                found |= int(value, 16)
    return bool(found >> (signal.SIGKILL - 1) & 1)


def activity(pid: int) -> int:
    """A number that changes while any thread of a process runs; 0 if it is gone."""
    found = 0
    with contextlib.suppress(OSError, ValueError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            fields = (thread / "stat").read_text().rpartition(")")[2].split()
            found += int(fields[11]) + int(fields[12])  # utime, stime
            for line in (thread / "status").read_text().splitlines():
                if "ctxt_switches" in line:
                    found += int(line.split()[1])
    return found


def describe_children(pid: int) -> str:
    """Names the children of a process that still exist; empty if there are none."""
    import psutil  # as in kill_tree

    with contextlib.suppress(psutil.Error):
        children = psutil.Process(pid).children()
        shown = [f"{each.name()} (process {each.pid})" for each in children]
        more = ", ..." * (len(shown) > _SHOWN_CHILDREN)
        return ", ".join(shown[:_SHOWN_CHILDREN]) + more
    return ""


def end_group(process: subprocess.Popen[Any], grace_seconds: float) -> None:
    """Ends what is left of a process group: SIGTERM, then SIGKILL.

    It waits for the whole group, not only for its leader: horovodrun ends before its
    mpirun, which still has the ranks' shared memory to remove.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        process.poll()  # a zombie would count as alive
        if not signal_group(process.pid, number):
            break
        deadline = Deadline(grace_seconds)
        while signal_group(process.pid, 0) and not deadline.passed():
            time.sleep(_POLL_SECONDS)
            process.poll()
    process.wait(10)


def kill_tree(pid: int) -> None:
    """Kills a process and its descendants, in whatever groups they are."""
    import psutil  # costs 20 ms at every start of the launcher, and is rarely needed

    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@dataclass(frozen=True)
class Result:
    """The outcome of a command."""

    code: int | None  # None where it did not run, or not to its end
    out: str = ""
    # What it wrote to its error stream, in one line; or why it did not run.
    error: str = ""


def wait(process: subprocess.Popen[Any], seconds: float) -> int | None:
    """Returns the exit code of a process; None if it has not ended in time."""
    deadline = Deadline(seconds)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(deadline.pause())
        if deadline.passed():
            return None


def in_memory(text: str = "") -> IO[str]:
    """Returns a file without a name, positioned at its beginning.

    As what a command writes to, it is better than a pipe: a daemon that the command leaves
    behind, as ssh does with ControlPersist, may hold a pipe open for ever.
    """
    file = open(  # noqa: SIM115
        os.memfd_create("collective", os.MFD_CLOEXEC), "w+", errors="replace"
    )
    file.write(text)
    file.seek(0)
    return file


def run(command: Sequence[str], seconds: float, stdin: str = "") -> Result:
    """Runs a command, and kills it with all that it has started at a deadline.

    All users of the machine see the command, but not what it reads from ``stdin``. What it
    leaves running is not waited for.
    """
    with in_memory(stdin) as given, in_memory() as out, in_memory() as errors:
        try:
            process = subprocess.Popen(command, stdin=given, stdout=out, stderr=errors)
        except OSError as error:
            return Result(None, error=f"{command[0]}: {error.strerror}")
        code = wait(process, seconds)
        if code is None:
            kill_tree(process.pid)
            process.wait()
            return Result(None, error=f"no answer in {seconds:g} s")
        for written in (out, errors):
            written.seek(0)
        return Result(code, out.read(), " ".join(errors.read().split()))


class Watchdog:
    """Ends what children have started when this process itself is killed.

    A process that outlives this one by a moment: each child leads a process group, and
    it kills the groups that still exist. It holds no other file of this process open.
    """

    def __init__(self, last: Callable[[], None] = lambda: None) -> None:
        """Starts it; when it has killed what there is, it calls ``last``."""
        reading, self._writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                # Else it holds what another thread, which starts a process, waits to see
                # closed.
                os.closerange(3, reading)
                os.closerange(max(3, reading + 1), os.sysconf("SC_OPEN_MAX"))
                _watch(reading, last)
            finally:
                os._exit(0)
        os.close(reading)

    def add(self, group: int, mark: str = "") -> None:
        """Has this process group, and all processes with this mark, end with this process."""
        self._send(f"+{group} {mark}\n")

    def forget(self, group: int) -> None:
        """Forgets a group that has ended, whose number may soon be that of another."""
        self._send(f"-{group} \n")

    def close(self) -> None:
        """Ends the watchdog; nothing is killed."""
        self._send(_CLOSE)
        with contextlib.suppress(OSError):
            os.close(self._writing)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _send(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the watchdog was killed: do without
            os.write(self._writing, line.encode())


def _watch(reading: int, last: Callable[[], None]) -> None:
    # What ends the launcher from a terminal must not end the watchdog first.
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    # Daemons of a rank may outlive it until the job ends: its mark is kept.
    groups, marks = set[int](), set[str]()
    with os.fdopen(reading) as messages:
        for line in messages:
            if line == _CLOSE:
                return
            group, _, mark = line[1:].rstrip().partition(" ")
            if line[0] == "+":
                groups.add(int(group))
                marks.add(mark)
            else:
                groups.discard(int(group))
    for leader in groups:
        signal_group(leader, signal.SIGKILL)
    for mark in filter(None, marks):
        containment.kill(mark)
    last()
