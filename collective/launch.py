"""Starts the ranks of a job on this host: ``python -m collective.launch -np 4 ...``.

Needs no MPI. Each rank gets its place through the environment, its output is
prefixed with its number, and when one fails the others are ended: nothing is left
running, whatever kills the job or this launcher.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import IO

GRACE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
        0 if every rank returned 0; 2 for bad arguments; else what the first rank
        that failed returned, or 128 + the signal that ended it.
    """
    parser = argparse.ArgumentParser(
        prog="python -m collective.launch",
        description="Start the ranks of a job on this host.",
        usage="%(prog)s [-h] -np N [--verbose] [--no-prefix] command ...",
    )
    parser.add_argument(
        "-np",
        "--num-proc",
        type=int,
        required=True,
        metavar="N",
        help="number of ranks",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="tell what is started and how it ends"
    )
    parser.add_argument(
        "--no-prefix", action="store_true", help="pass the ranks' output as it is"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="program and arguments of each rank"
    )
    options = parser.parse_args(arguments)
    if options.num_proc < 1:
        parser.error(f"-np {options.num_proc}: at least 1 rank is needed")
    if not options.command:
        parser.error(
            "no command\nHINT: python -m collective.launch -np 2 python train.py"
        )
    return Job(options.command, options.num_proc, options).run()


class Job:
    """The processes of one job.

    Args:
        command: Program and arguments.
        size: Number of ranks.
        options: ``verbose`` and ``no_prefix``.
    """

    def __init__(self, command: list[str], size: int, options: argparse.Namespace):
        self.command = command
        self.size = size
        self.options = options
        self.processes: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
        self.readers: list[threading.Thread] = []
        self.ending = False
        self.exit_code = 0

    def run(self) -> int:
        """Starts the ranks and waits for them; returns the exit code."""
        pipes: list[tuple[int, IO[bytes], IO[str]]] = []
        for number in _SIGNALS:
            signal.signal(number, self._forward)
        try:
            job = secrets.token_hex(16)
            for rank in range(self.size):
                process = self._start(rank, job)
                self.processes[process.pid] = (rank, process)
                for pipe, target in (
                    (process.stdout, sys.stdout),
                    (process.stderr, sys.stderr),
                ):
                    if pipe is not None:
                        pipes.append((rank, pipe, target))
            # After the last start only: a child of a threaded process must not
            # run Python between fork and exec, and here it does (_tie).
            for rank, pipe, target in pipes:
                reader = threading.Thread(
                    target=_copy_lines, args=(pipe, target, f"[{rank}] "), daemon=True
                )
                reader.start()
                self.readers.append(reader)
            self._wait()
        except OSError as error:
            self._tell(
                f"cannot start {self.command[0]!r}: {error.strerror}\n"
                "HINT: give a program that is on the PATH"
            )
            self.exit_code = 2
        finally:
            self._signal_all(signal.SIGKILL)
            for reader in self.readers:
                reader.join(timeout=GRACE_SECONDS)
        return self.exit_code

    def _start(self, rank: int, job: str) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "COLLECTIVE_RANK": str(rank),
            "COLLECTIVE_SIZE": str(self.size),
            "COLLECTIVE_LOCAL_RANK": str(rank),
            "COLLECTIVE_LOCAL_SIZE": str(self.size),
            "COLLECTIVE_JOB": job,
            "PYTHONUNBUFFERED": "1",
        }
        launcher = os.getpid()
        output = None if self.options.no_prefix else subprocess.PIPE
        process = subprocess.Popen(
            self.command,
            env=environment,
            stdin=None if rank == 0 and not sys.stdin.isatty() else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=lambda: _tie(launcher),
        )
        if self.options.verbose:
            self._tell(
                f"rank {rank} is process {process.pid}: {' '.join(self.command)}"
            )
        return process

    def _wait(self) -> None:
        while self.processes:
            pid, status = os.waitpid(-1, 0)
            if pid not in self.processes:
                continue
            # Before it is forgotten, what it started is ended with it.
            _signal_group(pid, signal.SIGKILL)
            rank, process = self.processes.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            process.returncode = code
            if self.options.verbose:
                self._tell(f"rank {rank} ended with {code}")
            if code == 0 or self.ending:
                continue
            self.exit_code = 128 - code if code < 0 else code
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with {code}"
            rest = "; ending the others" if self.processes else ""
            self._tell(f"rank {rank} ended {how}{rest}")
            self._end(signal.SIGTERM)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if not self.ending:
            self.exit_code = 128 + number
        self._end(signal.Signals(number))

    def _end(self, number: signal.Signals) -> None:
        """Signals every rank, and kills those still there after a while."""
        self._signal_all(number)
        if not self.ending:
            self.ending = True
            timer = threading.Timer(GRACE_SECONDS, self._signal_all, (signal.SIGKILL,))
            timer.daemon = True
            timer.start()

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in list(self.processes):
            _signal_group(pid, number)

    def _tell(self, text: str) -> None:
        print(f"collective.launch: {text}", file=sys.stderr, flush=True)


def _tie(launcher: int) -> None:
    """In a new rank: dies with the launcher."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _copy_lines(pipe: IO[bytes], target: IO[str], prefix: str) -> None:
    """Copies a rank's output; lines (ended by newline or return) stay whole."""
    rest = ""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while data := os.read(pipe.fileno(), 1 << 16):
        pieces = (rest + decoder.decode(data)).splitlines(keepends=True) or [""]
        rest = "" if pieces[-1].endswith(("\n", "\r")) else pieces.pop()
        if pieces:
            target.write("".join(prefix + piece for piece in pieces))
            target.flush()
    if rest:
        target.write(f"{prefix}{rest}\n")
        target.flush()


if __name__ == "__main__":
    sys.exit(main())
