"""A long training whose ranks are killed all the time: nothing of it shows.

make soak
SOAK_STEPS=200 SOAK_SEED=7 python -m pytest tests/faults -m soak
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.faults.fault import Fault, training
from tests.faults.job import PATIENCE, running
from tests.faults.undisturbed import assert_perfect_ledger, assert_same

RANKS = 4
STEPS = int(os.environ.get("SOAK_STEPS", "1000"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
KILLED_AFTER = (20, 60)  # steps
GROWS_BY = 1.1  # at most: allocators do not keep the same each time


class Training:
    """A training that comes back after each kill.

    Args:
        folder: For all that it writes.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.starts = 0
        self._running = ExitStack()
        self.begin()

    def begin(self) -> None:
        """Starts it, or goes on from the last checkpoint."""
        self.starts += 1
        self._lines, self._newest = self._ledger(), self._checkpoint()
        own = self.folder / f"start-{self.starts}"
        own.mkdir()
        options = (
            *("--checkpoint-dir", f"{self.folder}/runs", "--checkpoint-every", "5"),
            *("--ledger", f"{self.folder}/ledger", "--json", f"{self.folder}/json"),
        )
        program = training(*options, "--resume", steps=STEPS)
        command = Fault("", program, "", 0, None, ranks=RANKS).command(own, None)
        # Steps so long that a checkpoint now and then is within its 5 % of the time.
        pace = {"FAULT_PACE": "0.03"}
        self.job = self._running.enter_context(running(command, own, pace))

    def comes_back(self) -> None:
        """After a kill: the one place that knows how a worker comes back.

        The job ends, and all of it is started again from the last checkpoint.
        """
        code, _ = self.job.wait()
        assert code == 128 + signal.SIGKILL, self.job.text
        self.end()
        self.begin()

    def end(self) -> None:
        """Nothing of it is alive, nor left."""
        assert self.job.left() == [] and self.job.processes() == []
        self._running.close()

    def makes(self, steps: int) -> bool:
        """Waits until it has made so many more and kept some; False if it ended."""
        deadline = time.monotonic() + PATIENCE
        # One line is that of the beginning.
        while (
            self._ledger() <= self._lines + steps or self._checkpoint() <= self._newest
        ):
            if self.job.launcher.poll() is not None:
                return False
            assert time.monotonic() < deadline, self.job.text
            time.sleep(0.01)
        return True

    def ranks(self) -> list[psutil.Process]:
        """The processes of its ranks."""
        found = map(psutil.Process, self.job.processes())
        return [one for one in found if "COLLECTIVE_RANK" in one.environ()]

    def _ledger(self) -> int:
        file = self.folder / "ledger"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def _checkpoint(self) -> int:
        steps = [int(path.name[5:]) for path in self.folder.glob("runs/step-*")]
        return max(steps, default=-1)


@pytest.mark.soak
def test_soak(tmp_path):
    chance = random.Random(SEED)
    trained = Training(tmp_path)
    largest = []  # bytes of the largest rank, before each kill
    while trained.makes(chance.randint(*KILLED_AFTER)):
        ranks = trained.ranks()
        largest.append(max(rank.memory_info().rss for rank in ranks))
        chance.choice(ranks).kill()
        trained.comes_back()
    code, _ = trained.job.wait()
    assert code == 0, trained.job.text
    trained.end()
    assert_same(json.loads((tmp_path / "json").read_text())["losses"], STEPS)
    account = assert_perfect_ledger(tmp_path / "ledger", STEPS)
    assert len(account.runs) == trained.starts > STEPS // (2 * KILLED_AFTER[1])
    assert max(largest) < GROWS_BY * largest[0], largest
    print(f"{STEPS} steps, {len(largest)} kills, seed {SEED}")
