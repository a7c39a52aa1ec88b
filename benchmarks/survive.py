"""Kills ranks of a training at random moments, and proves that the results stay the same.

    python benchmarks/survive.py --ranks 4 --runs 10
    python benchmarks/survive.py --ranks 4 --hosts 2    # of tests/hosts/lab.py

Each run trains in float64 under ``collective.launch --min-np 1``, and some ranks are killed
(``kill -9``). It then checks that the loss of every step equals one process to 1e-12, that the
ledger is perfect, and that the exit code is 0. The times come from the timeline: from the end
of the last step until the remaining ranks agree on the state, and from there to the end of
their first step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
from workloads import LAUNCH, ROOT

from collective.training.observers.ledger.verify import check

TRAIN = [sys.executable, str(ROOT / "train.py"), "--verbose", "0", "--model", "mlp"]
TRAIN += ["--precision", "float64", "--epochs", "6"]
STEPS = 138


def main() -> None:
    """Make all runs, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--hosts", type=int, default=1, help="that share the ranks")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        launcher(args.hosts, args.ranks) as start,
    ):
        alone = Path(name, "alone.json")
        options = ["--backend", "single", "--json", str(alone)]
        subprocess.run([*TRAIN, *options], check=True, capture_output=True)
        wanted = json.loads(alone.read_text())["losses"]
        for seed in range(args.seed, args.seed + args.runs):
            folder = Path(name, str(seed))
            folder.mkdir()
            rng = random.Random(seed)
            print(run(start, args.ranks, rng, folder, wanted), flush=True)


@contextlib.contextmanager
def launcher(hosts: int, ranks: int) -> Iterator[list[str]]:
    """Yield the words that start the ranks."""
    if hosts == 1:
        yield [*LAUNCH, str(ranks)]
        return
    sys.path.insert(0, str(ROOT))
    from tests.hosts import lab

    with lab.hosts(hosts) as made:
        places = [f"{lab.NETWORK}.{1 + n}:{ranks // hosts}" for n in range(hosts)]
        yield made.ours("collective.launch", "-H", ",".join(places))


def rank_of(process: psutil.Process) -> str:
    """Return the number of the rank that a process is; empty if it is not a rank."""
    with contextlib.suppress(psutil.Error):
        if process.status() != psutil.STATUS_ZOMBIE and TRAIN[1] in process.cmdline():
            environment = process.environ()
            by_mpi = environment.get("OMPI_COMM_WORLD_RANK", "")
            watches = "collective.launch.rank" in process.cmdline()
            return "" if watches else environment.get("COLLECTIVE_RANK", by_mpi)
    return ""


def run(
    start: Sequence[str],
    ranks: int,
    rng: random.Random,
    folder: Path,
    wanted: list[float],
) -> str:
    """Run one training; return the kills, and how it continued."""
    files = {name: folder / name for name in ("json", "ledger", "timeline")}
    options = [word for name, file in files.items() for word in (f"--{name}", file)]
    command = [*start, "--min-np", "1", *TRAIN, "--backend", "native"]
    job = psutil.Popen([*command, *map(str, options)], cwd=ROOT, stdout=subprocess.PIPE,
                       stderr=subprocess.STDOUT, text=True)  # fmt: skip
    victims = rng.sample(range(ranks), rng.randint(1, ranks - 1))
    moments = sorted(rng.randrange(1, STEPS - 1) for _ in victims)
    for victim, step in zip(victims, moments, strict=True):
        while job.poll() is None and steps_in(files["ledger"]) < step:
            time.sleep(0.0005)
        time.sleep(rng.random() * 0.02)  # at a random time in a step
        for process in psutil.process_iter():
            if rank_of(process) == str(victim):
                process.kill()
    printed = job.communicate()[0]
    assert job.returncode == 0, printed
    losses = json.loads(files["json"].read_text())["losses"]
    np.testing.assert_allclose(losses, wanted, rtol=1e-12)
    assert not check(files["ledger"]).faults
    killed = ", ".join(f"{v} at {m}" for v, m in zip(victims, moments, strict=True))
    return f"killed {killed}: the same losses; {times(files['timeline'])}"


def steps_in(ledger: Path) -> int:
    """Return the number of steps in the ledger so far."""
    return ledger.read_text().count('{"step"') if ledger.exists() else 0


def times(timeline: Path) -> str:
    """Return the longest times until ranks agreed, and then to the end of a step."""
    events, agreements = json.loads(timeline.read_text()), []
    for event in events:
        if not re.fullmatch(r"continues as rank \d+ of \d+", event["name"]):
            continue
        mine = [e for e in events if e["name"] == "step" and e["pid"] == event["pid"]]
        ends = [e["ts"] + e["dur"] for e in mine]
        before = [end for end in ends if end <= event["ts"]]
        after = [end for end in ends if end > event["ts"]]
        if before and after:
            first = event["ts"] - max(before), min(after) - event["ts"]
            agreements.append([round(t / 1e3) for t in first])
    agreed, made = np.max(agreements or [[0, 0]], axis=0)
    return f"agreed after {agreed} ms, next step made {made} ms later"


if __name__ == "__main__":
    main()
