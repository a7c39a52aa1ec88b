"""Child processes that cannot be left behind: how to start, signal, run and end one.

A program that may start others leads a process group of its own, so that a signal to the
group reaches all of them, and the kernel ends it when its parent dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.02
# What in_child does, without Python code in a fork of a process that has threads.
_BY_EXEC = f"""
import ctypes, os, sys
parent, number, *command = sys.argv[1:]
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, int(number))
if os.getppid() != int(parent):
    os._exit(1)
os.execvp(command[0], command)
"""


def start(
    command: Sequence[str],
    *,
    on_parent_death: signal.Signals | None = signal.SIGKILL,
    has_threads: bool = False,
    cores: Sequence[int] = (),
    **popen: Any,
) -> subprocess.Popen[bytes]:
    """Starts a program as the leader of a new session and process group.

    Args:
        command: Program and arguments.
        on_parent_death: What the kernel sends to the program when the thread that
            started it ends; None for nothing.
        has_threads: Whether this process has threads: then no Python code may run
            between fork and exec, and a second interpreter runs it.
        cores: Logical cores that it runs on; empty for those of this process.
        **popen: Further arguments of ``subprocess.Popen``.

    Raises:
        OSError: If the program cannot be started.
    """
    parent = os.getpid()
    by_fork = on_parent_death is not None and not has_threads
    if on_parent_death is not None and has_threads:
        number = str(int(on_parent_death))
        before = [sys.executable, "-I", "-S", "-c", _BY_EXEC, str(parent), number]
        command = [*before, *command]

    def in_child() -> None:
        assert on_parent_death is not None
        _LIBC.prctl(_PR_SET_PDEATHSIG, on_parent_death)
        if cores:
            os.sched_setaffinity(0, cores)
        if os.getppid() != parent:  # it died before prctl
            os._exit(1)

    process = subprocess.Popen(
        list(command),
        start_new_session=True,
        preexec_fn=in_child if by_fork else None,
        **popen,
    )
    if cores and not by_fork:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(process.pid, cores)
    return process


def signal_group(leader: int, number: int) -> bool:
    """Sends a signal to a process group; returns whether the group still exists.

    Args:
        leader: Process id of the group's leader.
        number: Signal; 0 only asks.
    """
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return False
    return fields.split()[0] in "Tt"


def end_group(process: subprocess.Popen[Any], grace_seconds: float) -> None:
    """Ends what is left of a process group: SIGTERM, then SIGKILL.

    It waits for the whole group, not only for its leader: horovodrun ends before its
    mpirun, which still has the ranks' shared memory to remove.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        process.poll()  # a zombie would count as alive
        if not signal_group(process.pid, number):
            break
        deadline = time.monotonic() + grace_seconds
        while signal_group(process.pid, 0) and time.monotonic() < deadline:
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
    """What became of a command.

    Attributes:
        code: Its exit code; None where it did not run, or not to its end.
        out: What it wrote to its standard output.
        error: What it wrote to its error stream, in one line; or why it did not run.
    """

    code: int | None
    out: str = ""
    error: str = ""


def run(command: Sequence[str], seconds: float, stdin: str = "") -> Result:
    """Runs a command with a deadline. Never raises.

    Args:
        command: The program and its arguments, which all users of the machine see.
        seconds: After which it is killed, with all that it has started.
        stdin: What it can read from its standard input.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return Result(None, error=f"{command[0]}: {error.strerror}")
    try:
        out, errors = process.communicate(stdin, seconds)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        process.communicate()
        return Result(None, error=f"no answer in {seconds:g} s")
    return Result(process.returncode, out, " ".join(errors.split()))
