"""Random faults at random moments: ``python -m tests.chaos --seconds 300 --seed 1``.

Each round starts a small training, with or without ``--min-np``, by ``native`` or ``mpi``,
and strikes it once, from without or in the code of a rank. Afterwards it has gone on or ended as docs/reference/reliability.md
says, with the losses of one process, and nothing of it is left. A round that finds something
else is shown with its seed: ``python -m tests.chaos --seed SEED --rounds 1`` repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from collective import recorder
from tests import freezer, launch
from tests.collective.meeting import names_of
from tests.faults.catalogue.killed import KEPT
from tests.faults.catalogue.survived import undisturbed
from tests.faults.catalogue.suspended import suspend
from tests.faults.fault import JSON, OPEN_MPIS, STEPS, nothing, training
from tests.faults.job import Job, running
from tests.faults.undisturbed import goes_on_from_checkpoint

RANKS, LEAST, RANK_TIMEOUT = 3, 2, 8
LONGEST = 14.0  # until it strikes: about as long as a round takes
PACE = "0.2"  # that a step takes longer, so that many strikes hit one


def processes_of(job: Job, rank: int) -> list[int]:
    """What a rank's program runs as; empty if it does not run (any more)."""
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
    """To every process of a rank, one after another."""

    def strike(job: Job, rank: int) -> None:
        for number in numbers:
            for process in processes_of(job, rank):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
            time.sleep(pause)

    return strike


def to_launcher(number: signal.Signals) -> Callable[[Job, int], None]:
    def strike(job: Job, rank: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(job.launcher.pid, number)

    return strike


def stops(job: Job, rank: int) -> None:
    """For ever, once it trains: before, the launcher's own time-outs apply."""
    while not (job.folder / "ledger").exists() and job.launcher.poll() is None:
        time.sleep(0.05)
    signals(signal.SIGSTOP)(job, rank)


def suspends(job: Job, rank: int) -> None:
    """The whole job, for longer than any time-out of it."""
    suspend(job, RANK_TIMEOUT + 4)


def freezes(job: Job, rank: int) -> None:
    """A rank that cannot even be killed, once it trains; until the launcher has ended."""
    while not (job.folder / "ledger").exists() and job.launcher.poll() is None:
        time.sleep(0.05)
    with freezer.frozen(processes_of(job, rank)), contextlib.suppress(Exception):
        job.launcher.wait(100)


def removes_checkpoints(job: Job, rank: int) -> None:
    shutil.rmtree(job.folder / "runs", ignore_errors=True)


def damages_checkpoints(job: Job, rank: int) -> None:
    """In the middle of every file, whether it is still being written or not."""
    for file in (job.folder / "runs").rglob("*"):
        with contextlib.suppress(OSError), file.open("r+b") as opened:
            opened.seek(file.stat().st_size // 2)
            opened.write(b"noise")


def fills(which: str) -> Callable[[Job, int], None]:
    """A disk of the job, until it ends."""

    def strike(job: Job, rank: int) -> None:
        with (
            contextlib.suppress(OSError),
            (job.folder / which / "filler").open("wb", 0) as file,
        ):
            while True:
                file.write(bytes(1 << 16))

    return strike


def makes_noise(job: Job, rank: int) -> None:
    """Sends bytes to every listener of the job: they are no message of ours."""
    draw = random.Random(rank)
    for process in job.processes():
        for family, kind, address in listeners_of(process):
            for length in (0, 1, 24, 4000):
                with contextlib.suppress(OSError), socket.socket(family, kind) as link:
                    link.settimeout(1)
                    link.connect(address)
                    link.sendall(draw.randbytes(length))


def listeners_of(process: int) -> list[tuple[int, int, Any]]:
    """Family, kind and address of the sockets at which a process listens."""
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
    """What may happen.

    Attributes:
        strike: Done to the job, and a rank of it.
        survives: Whether the job succeeds without ``--min-np``, and with it; None where
            it may, as long as it names what happened otherwise.
        inside: In place of it: what ``tests.faults.inside`` does, at a random place.
        disk: Size of the disk that its checkpoints are on; empty: none of its own.
        command: Words before the launcher's.
    """

    strike: Callable[[Job, int], None] = nothing
    survives: tuple[bool | None, bool | None] = (None, None)
    inside: str = ""
    disk: str = ""
    command: Sequence[str] = ()


CATALOGUE = {
    "kill": Chaos(signals(signal.SIGKILL), (False, True)),
    "crash": Chaos(signals(signal.SIGSEGV), (False, True)),
    "terminate": Chaos(signals(signal.SIGTERM), (False, True)),
    "pause": Chaos(signals(signal.SIGSTOP, signal.SIGCONT, pause=2), (True, True)),
    "stop": Chaos(stops, (False, True)),
    "suspend": Chaos(suspends, (True, True)),
    "freeze": Chaos(freezes, (False, True)),
    "hold-lock": Chaos(inside="hold-lock", survives=(False, True)),
    "launcher-kill": Chaos(to_launcher(signal.SIGKILL), (False, False)),
    "launcher-term": Chaos(to_launcher(signal.SIGTERM), (False, False)),
    "launcher-int": Chaos(to_launcher(signal.SIGINT), (False, False)),
    "launcher-hup": Chaos(to_launcher(signal.SIGHUP), (False, False)),
    "remove-checkpoints": Chaos(removes_checkpoints),
    "damage-checkpoints": Chaos(damages_checkpoints, (True, True)),
    "fill-checkpoints-disk": Chaos(fills("disk"), disk="1m"),
    "fill-shared-memory": Chaos(fills("shm")),
    "noise": Chaos(makes_noise, (True, True)),
    "close-output": Chaos(command=["sh", "-c", '"$@" 2>&1 | head -c 300', "sh"]),
    "leave": Chaos(inside="leave", survives=(False, None)),
    "raise": Chaos(inside="raise", survives=(False, None)),
    "out-of-memory": Chaos(inside="ask-for-memory", survives=(False, None)),
    "late": Chaos(inside="sleep", survives=(True, True)),
    "fork": Chaos(inside="fork", survives=(True, True)),
    "long-line": Chaos(inside="print", survives=(True, True)),
}
# What reliability.md and elastic.md except: mpirun cannot go on without a rank that it
# loses before all have met.
EXCEPTED = "before it had joined the job"


def one_round(seed: int, folder: Path) -> str:
    """Returns what was tried.

    Raises:
        AssertionError: If something was found.
    """
    rng = random.Random(seed)
    name = rng.choice(sorted(CATALOGUE))
    backend, elastic = rng.choice(["native", "native", "mpi"]), rng.random() < 0.6
    rank, moment = rng.randrange(RANKS), rng.uniform(0, LONGEST)
    if name == "freeze" and freezer.why_not():
        name = "stop"
    if name in ("stop", "freeze", "hold-lock") and not elastic:
        elastic = True  # it would last as long as COLLECTIVE_TIMEOUT
    tried = f"{name} rank {rank} after {moment:.1f} s, {backend}, elastic: {elastic}"
    words = launch.command("native", RANKS)
    if backend == "mpi":
        words.append("--mpi")
    if elastic:
        words += ["--min-np", str(LEAST), "--rank-timeout", str(RANK_TIMEOUT)]
    chaos = CATALOGUE[name]
    variables = {"FAULT_PACE": PACE, "TMPDIR": str(folder)}
    variables[recorder.VARIABLE] = str(folder)
    if chaos.inside:
        place, step = rng.choice(["input", "forward", "update"]), rng.randrange(STEPS)
        tried = tried.replace(f"after {moment:.1f} s", f"in {place} of step {step}")
        if name == "hold-lock":
            variables["FAULT_SECONDS"] = "100000"
        variables["FAULT"] = f"{chaos.inside} {place} {rank} {step}"
    if chaos.disk:
        (folder / "runs").symlink_to(folder / "disk")
    program = [*training(*KEPT, *JSON, backend=backend)]
    command = [*words, *(word.format(folder=folder) for word in program)]
    with running([*chaos.command, *command], folder, variables, disk=chaos.disk) as job:
        if not chaos.inside:
            with contextlib.suppress(Exception):
                job.launcher.wait(moment)
        early = not (job.folder / "ledger").exists()
        chaos.strike(job, rank)
        code, _ = job.wait()
        printed = job.text
        for filler in folder.glob("*/filler"):
            filler.unlink()
        try:
            assert code is not None and not job.processes(), "it hangs"
            left = [n for n in job.left() if not re.fullmatch(OPEN_MPIS, n)]
            assert left == [], f"left in /dev/shm: {left}"
            survives = chaos.survives[elastic] and not (early and EXCEPTED in printed)
            assert code == 0 or not survives, f"exit code {code}"
            if code and chaos.survives[elastic] is None:
                named = "HINT: " in printed or "Traceback" in printed
                assert named, "it names no reason"
            if code == 0 and not chaos.command:
                undisturbed(job)
            else:
                goes_on_from_checkpoint(job)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{printed[-6000:]}") from error
    return f"{tried}: exit code {code}"


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if something was found."""
    parser = argparse.ArgumentParser("python -m tests.chaos")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--rounds", type=int, default=1_000_000)
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.seconds
    found = rounds = 0
    for seed in range(options.seed, options.seed + options.rounds):
        if time.monotonic() > deadline:
            break
        rounds += 1
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            try:
                print(f"seed {seed}: {one_round(seed, Path(folder))}", flush=True)
            except AssertionError:
                found += 1
                print(f"seed {seed}: FOUND\n{traceback.format_exc()}", flush=True)
    print(f"{rounds} rounds, {found} findings")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
