"""A long training whose ranks join and leave all the time, without any effect.

make soak
SOAK_STEPS=200 SOAK_SEED=7 python -m pytest tests/faults -m soak
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.faults.fault import Fault, training
from tests.faults.job import PATIENCE, Job, running
from tests.faults.undisturbed import assert_perfect_ledger, assert_same

RANKS, FEWEST = 4, 2
STEPS = int(os.environ.get("SOAK_STEPS", "1000"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
EVERY = (20, 60)  # steps
# Seconds added to a step: a new rank needs some to get ready.
PACE = "0.4"
GROWS_BY = 1.1  # at most, because allocators do not keep the same each time


class Training:
    """A training whose host takes as many ranks as a file says.

    Args:
        job: The running job.
        file: File of the host discovery.
    """

    def __init__(self, job: Job, file: Path):
        self.job = job
        self.file = file
        self.slots = RANKS
        self.happened: Counter[str] = Counter()

    def makes(self, steps: int) -> bool:
        """Wait until it has made so many more steps; return False if it ended."""
        wanted = self._last("step") + steps
        deadline = time.monotonic() + PATIENCE
        while self._last("step") < wanted:
            if self.job.launcher.poll() is not None:
                return False
            assert time.monotonic() < deadline, self.job.text
            time.sleep(0.02)
        return True

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of its ranks, including those that are about to join."""
        found = map(psutil.Process, self.job.processes())
        return [one for one in found if "COLLECTIVE_RANK" in one.environ()]

    def happens(self, chance: random.Random) -> None:
        """Kill a random rank with -9, or remove a slot, or add a slot."""
        in_it = self._last("replicas")
        if self.slots < RANKS and (in_it <= FEWEST or chance.random() < 0.5):
            self._set(self.slots + 1)
            self.happened["joins"] += 1
        elif in_it > FEWEST:
            deed = chance.choice(["kills", "kills", "leaves"])
            if deed == "kills":
                chance.choice(self.ranks()).kill()
            self._set(self.slots - 1)
            self.happened[deed] += 1

    def _set(self, slots: int) -> None:
        self.slots = slots
        part = self.file.with_suffix(".part")
        part.write_text(f"localhost:{slots}\n")
        part.rename(self.file)

    def _last(self, key: str) -> int:
        """Return the newest number of this key in the ledger."""
        ledger = self.job.folder / "ledger"
        lines = ledger.read_text().splitlines() if ledger.exists() else []
        for line in reversed(lines):
            if line.endswith("}") and f'"{key}"' in line:
                return json.loads(line)[key]
        return 0


@pytest.mark.soak
def test_soak(tmp_path):
    chance = random.Random(SEED)
    slots = tmp_path / "slots"
    slots.write_text(f"localhost:{RANKS}\n")
    options = ("--min-np", "1", "--max-np", str(RANKS))
    fault = Fault(
        "",
        training(
            "--ledger",
            f"{tmp_path}/ledger",
            "--json",
            f"{tmp_path}/json",
            steps=STEPS,
        ),
        "",
        0,
        None,
        ranks=RANKS,
        launcher_options=(*options, "--host-discovery-script", f"cat {slots}"),
    )
    largest = []  # bytes of the largest rank, before each event
    pace = {"FAULT_PACE": PACE}
    with running(fault.command(tmp_path, None), tmp_path, pace) as job:
        trained = Training(job, slots)
        while trained.makes(chance.randint(*EVERY)):
            largest.append(max(rank.memory_info().rss for rank in trained.ranks()))
            trained.happens(chance)
        code, _ = job.wait()
        assert code == 0, job.text
        assert job.left() == [] and job.processes() == []
    assert_same(json.loads((tmp_path / "json").read_text())["losses"], STEPS)
    account = assert_perfect_ledger(tmp_path / "ledger", STEPS)
    changes, happened = len(account.runs) - 1, dict(trained.happened)
    megabytes = [size >> 20 for size in largest]
    print(
        f"{STEPS} steps, seed {SEED}: {happened}; {changes} changes; MiB: {megabytes}"
    )
    assert changes >= STEPS // (2 * EVERY[1])
    assert max(largest) < GROWS_BY * largest[0], megabytes
