"""Child processes that end with this one: how to start, signal, run and end one.

A program that may start others leads a process group of its own, so that a signal to the
group reaches all of them, and the kernel ends it when its parent dies. A watchdog ends the
processes that it has started.
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
MOST_OUTPUT = 1 << 20  # bytes, of a command that answers a question
_CLOSE = "close\n"  # written to the watchdog
_SHOWN_CHILDREN = 3
_STATES = {
    "D": "uninterruptible or frozen",
    "t": "traced",
    "T": "stopped",
    "Z": "a zombie",
}
# Does the work of in_child without Python code in a fork of a process with threads.
_BY_EXEC = f"""
import ctypes, os, sys
parent, number, *command = sys.argv[1:]
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, int(number))
if os.getppid() != int(parent):
    os._exit(1)
os.execvp(command[0], command)
"""


def find_program(name: str) -> str | None:
    """Return the path of a program of this Python environment, else of one on the PATH."""
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
    """Start a program as the leader of a new session and process group.

    Args:
        on_parent_death: The signal that the kernel sends it when its starting thread ends.
        has_threads: Whether this process has threads. If so, no Python code may run
            between fork and exec, and a second interpreter runs it instead.
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
        if os.getppid() != parent:  # the parent died before prctl
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
    """Return the signals that end a job, without SIGHUP if ``nohup`` has it ignored."""
    found = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        found.append(signal.SIGHUP)
    return found


def signal_group(leader: int, number: int) -> bool:
    """Signal the group that a process leads; return whether it still exists.

    Signal 0 only tests this.
    """
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, as by SIGSTOP."""
    return _state(pid) in ("T", "t")


def has_ended(pid: int) -> bool:
    """Return whether there is no such process, or only a zombie."""
    return _state(pid) in ("", "Z")


def _state(pid: int) -> str:
    """Return the letter that ps shows; empty if the process is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def describe_state(pid: int) -> str:
    """Return the state of a process, in the words of ps."""
    state = _state(pid)
    meaning = f", {_STATES[state]}" if state in _STATES else ""
    return f"state {state or 'unknown'}{meaning}"


def kill_is_pending(pid: int) -> bool:
    """Return whether SIGKILL waits for a process that cannot take it.

    The process may be frozen, traced, or in an uninterruptible sleep. It will run no more
    code of its program.
    """
    found = 0
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("SigPnd", "ShdPnd"):
                found |= int(value, 16)
    return bool(found >> (signal.SIGKILL - 1) & 1)


def activity(pid: int) -> int:
    """Return a number that changes while a thread of a process runs, or 0 without one."""
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
    """Name the children of a process that still exist; empty if there are none."""
    import psutil  # as in kill_tree

    with contextlib.suppress(psutil.Error):
        children = psutil.Process(pid).children()
        shown = [f"{each.name()} (process {each.pid})" for each in children]
        more = ", ..." * (len(shown) > _SHOWN_CHILDREN)
        return ", ".join(shown[:_SHOWN_CHILDREN]) + more
    return ""


def end_group(process: subprocess.Popen[Any], grace_seconds: float) -> None:
    """End all processes of a group: by SIGTERM, then by SIGKILL.

    It waits for the whole group, not only for its leader: horovodrun ends before its
    mpirun, which still has the ranks' shared memory to remove.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        process.poll()  # otherwise a zombie counts as alive
        if not signal_group(process.pid, number):
            break
        deadline = Deadline(grace_seconds)
        while signal_group(process.pid, 0) and not deadline.passed():
            time.sleep(_POLL_SECONDS)
            process.poll()
    process.wait(10)


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants, in all groups."""
    import psutil  # costs 20 ms at every start of the launcher, and is rarely needed

    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@dataclass(frozen=True)
class Result:
    """The outcome of a command."""

    code: int | None  # None if it did not run to its end
    out: str = ""
    # Its error stream, in one line; or the reason why it did not run.
    error: str = ""


def wait(
    process: subprocess.Popen[Any], seconds: float, outputs: Sequence[IO[str]]
) -> str:
    """Wait for the end of a process; return the limit that it exceeds, or an empty text.

    The process still runs if it exceeds one.

    Args:
        outputs: The files of ``in_memory`` that it writes to.
    """
    deadline = Deadline(seconds)
    while True:
        # The time is asked less often: of a long pause of this process, it counts little.
        for _ in range(max(1, int(deadline.pause() / _POLL_SECONDS))):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
            if any(os.fstat(file.fileno()).st_size > MOST_OUTPUT for file in outputs):
                return f"more than {MOST_OUTPUT >> 20} MB of output"
            if process.returncode is not None:
                return ""
        if deadline.passed():
            return f"no answer in {seconds:g} s"


def in_memory(text: str = "") -> IO[str]:
    """Return a file without a name, positioned at its beginning.

    As the output of a command it is better than a pipe: a daemon that the command leaves
    running, as ssh does with ControlPersist, may hold a pipe open for ever.
    """
    file = open(  # noqa: SIM115
        os.memfd_create("collective", os.MFD_CLOEXEC), "w+", errors="replace"
    )
    file.write(text)
    file.seek(0)
    return file


def run(command: Sequence[str], seconds: float, stdin: str = "") -> Result:
    """Run a command, and kill it with all its processes at a limit.

    The limits are of time and of what it writes (``MOST_OUTPUT``).

    All users of the machine see the command, but not its ``stdin``. The call does not wait
    for processes that the command leaves running.
    """
    with in_memory(stdin) as given, in_memory() as out, in_memory() as errors:
        try:
            process = subprocess.Popen(command, stdin=given, stdout=out, stderr=errors)
        except OSError as error:
            return Result(None, error=f"{command[0]}: {error.strerror}")
        if exceeded := wait(process, seconds, (out, errors)):
            kill_tree(process.pid)
            process.wait()
            return Result(None, error=exceeded)
        for written in (out, errors):
            written.seek(0)
        return Result(process.returncode, out.read(), " ".join(errors.read().split()))


class Watchdog:
    """Ends the processes of children when this process itself is killed.

    The watchdog is a process that outlives this one by a moment: each child leads a process
    group, and it kills the groups that still exist. It holds no other file of this process
    open.
    """

    def __init__(self, last: Callable[[], None] = lambda: None) -> None:
        """Start it; after it has killed all groups, it calls ``last``."""
        reading, self._writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                # Otherwise it holds a file that another thread, which starts a process,
                # waits to see closed.
                os.closerange(3, reading)
                os.closerange(max(3, reading + 1), os.sysconf("SC_OPEN_MAX"))
                _watch(reading, last)
            finally:
                os._exit(0)
        os.close(reading)

    def add(self, group: int, mark: str = "") -> None:
        """Have this process group and all processes with this mark end with this process."""
        self._send(f"+{group} {mark}\n")

    def forget(self, group: int) -> None:
        """Forget a group that has ended, because another may soon get its number."""
        self._send(f"-{group} \n")

    def close(self) -> None:
        """End the watchdog, and kill nothing."""
        self._send(_CLOSE)
        with contextlib.suppress(OSError):
            os.close(self._writing)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _send(self, line: str) -> None:
        # If the watchdog was killed, the job continues without it.
        with contextlib.suppress(OSError):
            os.write(self._writing, line.encode())


def _watch(reading: int, last: Callable[[], None]) -> None:
    # A signal from a terminal that ends the launcher must not end the watchdog first.
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    # The mark is kept, since daemons of a rank may outlive it until the job ends.
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
