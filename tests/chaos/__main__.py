"""Random faults at random moments: ``python -m tests.chaos --seconds 300 --seed 1``.

Each round starts a small training, with or without ``--min-np``, by ``native`` or ``mpi``, on
this host or on two hosts of the lab, and injects one fault: from outside, in the code of a
rank, or on the network. Afterwards the job must have continued or ended as
docs/reference/reliability.md says, with the losses of one process, and nothing of it may
stay. A failed round is shown with its seed: ``python -m tests.chaos --seed SEED --rounds 1``
repeats it. ``--kinds NAME ...`` draws only from some kinds; give the same ones to repeat a
round.
"""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from collective import recorder
from tests import launch
from tests.chaos import hosts, kinds, rounds
from tests.chaos.kinds import RANK_TIMEOUT, RANKS, Chaos
from tests.faults.catalogue.killed import KEPT
from tests.faults.catalogue.survived import undisturbed
from tests.faults.fault import JSON, OPEN_MPIS, STEPS, training
from tests.faults.job import Job, running
from tests.faults.undisturbed import goes_on_from_checkpoint
from tests.hosts.lab import Lab

LEAST = 2
PACE = "0.2"  # seconds added to a step, so that many faults hit one
# The exception in reliability.md and elastic.md: mpirun cannot continue without a rank that
# it loses before all have met.
EXCEPTED = "before it had joined the job"


def catalogue(lab: Lab | None, only: Sequence[str] = ()) -> dict[str, Chaos]:
    """Return the kinds of faults that are possible here, of the given kinds or of all."""
    all_ = {**kinds.CATALOGUE, **(hosts.CATALOGUE if lab else {})}
    return {
        name: kind
        for name, kind in all_.items()
        if not kind.needs() and (not only or name in only)
    }


def one_round(
    seed: int, folder: Path, lab: Lab | None, found: Mapping[str, Chaos]
) -> tuple[str, str]:
    """Run one round with a kind drawn from ``found``; return the kind and the attempt.

    Raises:
        AssertionError: If a promise did not hold.
    """
    rng = random.Random(seed)
    name = rng.choice(sorted(found))
    chaos = found[name]
    backend = rng.choice(["native", "native", "mpi"])
    elastic = rng.random() < 0.6 or chaos.elastic
    rank, moment = rng.randrange(RANKS), rng.uniform(0, chaos.longest)
    tried = f"{name} rank {rank} after {moment:.1f} s, {backend}, elastic: {elastic}"
    variables = {"FAULT_PACE": PACE, "TMPDIR": str(folder), **chaos.variables}
    variables[recorder.VARIABLE] = str(folder)
    if chaos.inside:
        place, step = rng.choice(["input", "forward", "update"]), rng.randrange(STEPS)
        tried = tried.replace(f"after {moment:.1f} s", f"in {place} of step {step}")
        variables["FAULT"] = f"{chaos.inside} {place} {rank} {step}"
    if chaos.disk:
        (folder / "runs").symlink_to(folder / "disk")
    options = ["--mpi"] if backend == "mpi" and not chaos.on_hosts else []
    if elastic:
        options += ["--min-np", str(LEAST), "--rank-timeout", str(RANK_TIMEOUT)]
    program = [*chaos.program, *training(*KEPT, *JSON, backend=backend)]
    words = [*options, *(word.format(folder=folder) for word in program)]
    if chaos.on_hosts:
        assert lab is not None
        command = hosts.command(lab, words)
    else:
        command = [*chaos.command, *launch.command("native", RANKS), *words]
    used = lab if chaos.on_hosts else None
    with running(command, folder, variables, disk=chaos.disk, hosts=used) as job:
        if chaos.since is not None:
            chaos.since(job)
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
            _check(chaos, job, code, elastic, early)
        except AssertionError as error:
            raise AssertionError(f"{tried}: {error}\n{printed[-6000:]}") from error
    return name, f"{tried}: exit code {code}"


def doing(process: int) -> str:
    """Return a process's command, its state in the kernel, and its Python stacks (py-spy)."""
    folder, found = Path(f"/proc/{process}"), []
    with contextlib.suppress(OSError):
        command = (folder / "cmdline").read_text().replace("\0", " ")[:120]
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        found = [f"{process} {command}", f"  {state} {(folder / 'wchan').read_text()}"]
    if spy := shutil.which("py-spy"):
        dump = [spy, "dump", "--pid", str(process)]
        found.append(subprocess.run(dump, capture_output=True, text=True).stdout)
    return "\n".join(found)


def _check(
    chaos: Chaos, job: Job, code: int | None, elastic: bool, early: bool
) -> None:
    printed, survives = job.text, chaos.survives[elastic]
    stuck = job.processes()
    assert code is not None and not stuck, "\n".join(["it hangs", *map(doing, stuck)])
    left = [n for n in job.left() if not re.fullmatch(OPEN_MPIS, n)]
    assert left == [], f"left in /dev/shm: {left}"
    excepted = early and (EXCEPTED in printed or chaos.on_hosts)
    assert code == 0 or not survives or excepted, f"exit code {code}"
    if code and (survives is None or chaos.on_hosts):
        named = "HINT: " in printed or "Traceback" in printed
        assert named, "it names no reason"
    if code == 0 and not chaos.command:
        undisturbed(job)
    else:
        goes_on_from_checkpoint(job)


def main(arguments: list[str] | None = None) -> int:
    """Run rounds; return 1 if one failed."""
    parser = rounds.parser("python -m tests.chaos")
    parser.add_argument(
        "--kinds", nargs="+", default=[], choices=[*kinds.CATALOGUE, *hosts.CATALOGUE]
    )
    options, tried = parser.parse_args(arguments), set[str]()
    with contextlib.ExitStack() as stack:
        why_not = hosts.why_not()
        if why_not:
            print(f"no hosts: {why_not}", flush=True)
        lab = None if why_not else stack.enter_context(hosts.made())
        possible = catalogue(lab, options.kinds)

        def attempt(seed: int, folder: Path) -> str:
            name, what = one_round(seed, folder, lab, possible)
            tried.add(name)
            return what

        count, found = rounds.run(options, attempt)
    print(f"{count} rounds, {len(tried)} kinds of faults, {found} findings")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
