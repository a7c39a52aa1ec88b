"""Faults of a job on one host, from outside or in the code of a rank."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests import freezer
from tests.collective.meeting import names_of
from tests.faults.catalogue.suspended import suspend
from tests.faults.fault import nothing
from tests.faults.job import Job

RANKS, RANK_TIMEOUT = 3, 8
LONGEST = 14.0  # most seconds until the fault, about as long as a round
TRAINING = 2.0  # the same, counted from the start of training


def processes_of(job: Job, rank: int) -> list[int]:
    """Return the processes of a rank's program; empty if it does not run."""
    names = (b"COLLECTIVE_RANK=%d" % rank, b"OMPI_COMM_WORLD_RANK=%d" % rank)
    found = []
    for process in job.processes():
        with contextlib.suppress(OSError):
            files = Path(f"/proc/{process}")
            words = (files / "cmdline").read_bytes().split(b"\0")
            variables = (files / "environ").read_bytes().split(b"\0")
            supervises = b"collective.launch.rank" in words
            if not supervises and any(name in variables for name in names):
                found.append(process)
    return found


def signals(*numbers: signal.Signals, pause: float = 0) -> Callable[[Job, int], None]:
    """Send signals to every process of a rank, one after another."""

    def strike(job: Job, rank: int) -> None:
        for number in numbers:
            for process in processes_of(job, rank):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
            time.sleep(pause)

    return strike


def to_launcher(
    *numbers: signal.Signals, pause: float = 0
) -> Callable[[Job, int], None]:
    def strike(job: Job, rank: int) -> None:
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(job.launcher.pid, number)
            time.sleep(pause)

    return strike


def joined(job: Job) -> None:
    """Wait until every rank has joined the others, or the job has ended."""
    met = 0
    while met < RANKS and job.launcher.poll() is None:
        time.sleep(0.05)
        met = 0
        for process in (p for rank in range(RANKS) for p in processes_of(job, rank)):
            with contextlib.suppress(OSError):
                met += "memfd:collective" in Path(f"/proc/{process}/maps").read_text()


def trains(job: Job) -> None:
    """Wait until the job trains or has ended."""
    while not (job.folder / "ledger").exists() and job.launcher.poll() is None:
        time.sleep(0.05)


def suspends(job: Job, rank: int) -> None:
    """Suspend the whole job for longer than each of its time-outs."""
    suspend(job, RANK_TIMEOUT + 4)


def freezes(job: Job, rank: int) -> None:
    """Freeze a rank, which cannot even be killed, until the launcher has ended."""
    with freezer.frozen(processes_of(job, rank)), contextlib.suppress(Exception):
        job.launcher.wait(100)


def removes_checkpoints(job: Job, rank: int) -> None:
    shutil.rmtree(job.folder / "runs", ignore_errors=True)


def damages_checkpoints(job: Job, rank: int) -> None:
    """Damage the middle of every file, even if it is still being written."""
    for file in (job.folder / "runs").rglob("*"):
        with contextlib.suppress(OSError), file.open("r+b") as opened:
            opened.seek(file.stat().st_size // 2)
            opened.write(b"noise")


def fills(which: str) -> Callable[[Job, int], None]:
    """Fill a disk of the job until it ends."""

    def strike(job: Job, rank: int) -> None:
        with (
            contextlib.suppress(OSError),
            (job.folder / which / "filler").open("wb", 0) as file,
        ):
            while True:
                file.write(bytes(1 << 16))

    return strike


def makes_noise(job: Job, rank: int) -> None:
    """Send bytes to every listener of the job: they are not a valid message."""
    draw = random.Random(rank)
    for process in job.processes():
        for family, kind, address in listeners_of(process):
            for length in (0, 1, 24, 4000):
                with contextlib.suppress(OSError), socket.socket(family, kind) as link:
                    link.settimeout(1)
                    link.connect(address)
                    link.sendall(draw.randbytes(length))


def strangers(job: Job, rank: int) -> None:
    """Hold many connections to every listener of the job, silent ones and active ones."""
    draw = random.Random(rank)
    with contextlib.ExitStack() as opened:
        for process in job.processes():
            for family, kind, address in listeners_of(process):
                for number in range(40):
                    with contextlib.suppress(OSError):
                        link = opened.enter_context(socket.socket(family, kind))
                        link.settimeout(1)
                        link.connect(address)
                        link.sendall(draw.randbytes(number % 4 * 20))
        with contextlib.suppress(Exception):
            job.launcher.wait(10)


def listeners_of(process: int) -> list[tuple[int, int, Any]]:
    """Return family, kind and address of the sockets at which a process listens."""
    found: list[tuple[int, int, Any]] = []
    with contextlib.suppress(psutil.Error):
        for link in psutil.Process(process).net_connections("tcp"):
            if link.status == psutil.CONN_LISTEN:
                found.append((link.family, socket.SOCK_STREAM, tuple(link.laddr)))
    with contextlib.suppress(OSError):
        for name in names_of(process):
            found.append((socket.AF_UNIX, socket.SOCK_SEQPACKET, f"\0{name}"))
    return found


@dataclass(frozen=True)
class Chaos:
    """A kind of fault.

    Attributes:
        strike: Injects the fault into the job, and a rank of it.
        survives: Whether the job succeeds without ``--min-np``, and with it; None if it
            may succeed, provided that it otherwise names the fault.
        since: Waits for the state at which the random time begins.
        longest: Most seconds until the fault.
        inside: Instead of ``strike``: an action of ``tests.faults.inside`` at a random place.
        disk: Size of the disk for its checkpoints; empty: it has no disk of its own.
        command: Words before the launcher's.
        program: Words before each rank's program.
        variables: Variables of the job.
        elastic: Whether only jobs with ``--min-np`` get the fault: others would wait for
            COLLECTIVE_TIMEOUT.
        on_hosts: Whether the job runs on two hosts of the lab.
        needs: Returns why it cannot be tried here; empty if it can.
    """

    strike: Callable[[Job, int], None] = nothing
    survives: tuple[bool | None, bool | None] = (None, None)
    since: Callable[[Job], None] | None = None
    longest: float = LONGEST
    inside: str = ""
    disk: str = ""
    command: Sequence[str] = ()
    program: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    elastic: bool = False
    on_hosts: bool = False
    needs: Callable[[], str] = lambda: ""


def jumps(seconds: int) -> Chaos:
    """Return the fault that the wall clock of a rank jumps."""
    return Chaos(
        inside="jump",
        survives=(True, True),
        program=[sys.executable, "-m", "tests.faults.clock"],
        variables={"FAULT_SECONDS": str(seconds)},
        needs=lambda: "" if shutil.which("cc") else "there is no C compiler",
    )


CATALOGUE = {
    "kill": Chaos(signals(signal.SIGKILL), (False, True)),
    "kill-in-start": Chaos(
        signals(signal.SIGKILL), (False, True), since=joined, longest=5
    ),
    "crash": Chaos(signals(signal.SIGSEGV), (False, True)),
    "terminate": Chaos(signals(signal.SIGTERM), (False, True)),
    "pause": Chaos(signals(signal.SIGSTOP, signal.SIGCONT, pause=5), (True, True)),
    # The fault lasts for ever; before training, the launcher's own time-outs apply.
    "stop": Chaos(
        signals(signal.SIGSTOP), (False, True), trains, TRAINING, elastic=True
    ),
    "suspend": Chaos(suspends, (True, True)),
    "freeze": Chaos(
        freezes, (False, True), trains, TRAINING, elastic=True, needs=freezer.why_not
    ),
    "hold-lock": Chaos(
        inside="hold-lock",
        survives=(False, True),
        elastic=True,
        variables={"FAULT_SECONDS": "100000"},
    ),
    "clock-forward": jumps(3600),
    "clock-back": jumps(-3600),
    "daemon": Chaos(inside="daemon", survives=(True, True)),
    "launcher-pause": Chaos(
        to_launcher(signal.SIGSTOP, signal.SIGCONT, pause=3), (True, True)
    ),
    "launcher-kill": Chaos(to_launcher(signal.SIGKILL), (False, False)),
    "launcher-term": Chaos(to_launcher(signal.SIGTERM), (False, False)),
    "launcher-int": Chaos(to_launcher(signal.SIGINT), (False, False)),
    "launcher-hup": Chaos(to_launcher(signal.SIGHUP), (False, False)),
    "remove-checkpoints": Chaos(removes_checkpoints),
    "damage-checkpoints": Chaos(damages_checkpoints, (True, True)),
    "fill-checkpoints-disk": Chaos(fills("disk"), disk="1m"),
    "fill-shared-memory": Chaos(fills("shm")),
    "noise": Chaos(makes_noise, (True, True)),
    "strangers": Chaos(strangers, (True, True)),
    "close-output": Chaos(command=["sh", "-c", '"$@" 2>&1 | head -c 300', "sh"]),
    "leave": Chaos(inside="leave", survives=(False, None)),
    "raise": Chaos(inside="raise", survives=(False, None)),
    "out-of-memory": Chaos(inside="ask-for-memory", survives=(False, None)),
    "late": Chaos(inside="sleep", survives=(True, True)),
    "fork": Chaos(inside="fork", survives=(True, True)),
    "long-line": Chaos(inside="print", survives=(True, True)),
}
