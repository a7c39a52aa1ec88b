"""The training without the fault, and comparisons with it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from collective.training import Checkpoint
from collective.training.calls import command
from collective.training.observers.ledger import verify
from tests.faults.fault import BATCH, STEPS
from tests.faults.inside import ROWS
from tests.faults.job import Job

PER_EPOCH = -(-ROWS // BATCH)


def train(steps: int, **more: Any) -> list[float]:
    """Train in this process alone; return the losses."""
    settings = {
        "backend": "single",
        "model": "tests.faults.inside:model",
        "data": "tests.faults.inside:rows",
        "global_batch_size": BATCH,
        "precision": "float64",
        "steps": steps,
        "verbose": 0,
    }
    return command.run(command.TrainingJob.of(settings), **more).losses


@functools.cache
def losses(steps: int) -> list[float]:
    """Return the losses of the undisturbed training."""
    return train(steps)


def checkpoints(folder: Path) -> None:
    """Write checkpoints of steps 4, 6 (the end of an epoch) and 8 there."""
    for resume, steps in ((False, 4), (True, 8)):
        train(steps, checkpoint=Checkpoint(folder, resume=resume))


def as_undisturbed(it: Job) -> None:
    """Check that the file of ``--json`` has the losses of the undisturbed training."""
    assert_same(json.loads((it.folder / "json").read_text())["losses"])


def goes_on_from_checkpoint(it: Job) -> None:
    """Resume it in one process; check the undisturbed losses, and that no row repeats."""
    file = str(it.folder / "ledger")
    got = train(
        STEPS, checkpoint=Checkpoint(it.folder / "runs", resume=True), ledger=file
    )
    assert_same(got)
    assert_perfect_ledger(file)


def goes_on_alike(it: Job) -> None:
    """Resume it on as many ranks; check the undisturbed training to the last bit."""
    file = it.folder / "json"

    def losses_with(*options: str) -> list[float]:
        with it.another("--json", str(file), *options, FAULT="") as other:
            code, _ = other.wait()
        assert code == 0, other.text
        return json.loads(file.read_text())["losses"]

    resumed = losses_with("--resume")
    assert_perfect_ledger(it.folder / "ledger")
    undisturbed = losses_with(
        "--checkpoint-dir",
        str(it.folder / "others"),
        "--ledger",
        str(it.folder / "other-ledger"),
    )
    assert resumed == undisturbed


def assert_same(got: list[float], steps: int = STEPS) -> None:
    np.testing.assert_allclose(got, losses(steps), rtol=1e-12)


def assert_perfect_ledger(file: Any, steps: int = STEPS) -> verify.Proof:
    found = verify.check(file)
    assert found.faults == []
    epochs, rest = divmod(steps, PER_EPOCH)
    assert found.epochs == [ROWS] * epochs + [rest * BATCH] * bool(rest)
    return found
