"""What is on disk: torn, foreign, or too much for it."""

from __future__ import annotations

import json
from pathlib import Path

from collective.training.observers.checkpoint import storage
from tests.faults.fault import JSON, Fault, training
from tests.faults.job import Job, why_no_mounts
from tests.faults.undisturbed import as_undisturbed, checkpoints

KEPT = ("--checkpoint-dir", "{folder}/runs", "--checkpoint-every", "3")
BEFORE = "the one before it is used, and a warning says why; the losses are the undisturbed ones"


def _newest(folder: Path) -> Path:
    checkpoints(folder / "runs")
    return storage.saved_in(folder / "runs")[0]


def _tear(folder: Path, _: object) -> None:
    weights = _newest(folder) / storage.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-100])


def _flip(folder: Path, _: object) -> None:
    weights = _newest(folder) / storage.WEIGHTS
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)


def _swap(folder: Path, _: object) -> None:
    manifest = _newest(folder) / storage.MANIFEST
    manifest.write_text(json.dumps({"format": "of another program"}))


def _harmed(name: str, harm, why: str) -> Fault:
    return Fault(
        name,
        training(*KEPT, *JSON, "--resume"),
        BEFORE,
        code=0,
        seconds=None,
        before=harm,
        holds=as_undisturbed,
        messages=(
            rf"warning: .*step-000000008 is not used: .*{why}",
            "resumed from .*step-000000006",
        ),
    )


def _only_whole_ones(job: Job) -> None:
    """Check that all checkpoints on the disk are complete, and no part of one is there."""
    as_undisturbed(job)
    assert not list((job.folder / "disk").glob("*/.part*"))


def _complete_trace(job: Job) -> None:
    as_undisturbed(job)
    json.loads((job.folder / "disk" / "trace").read_text())


FULL_DISK = Fault(
    "a full disk: checkpoints",
    training(
        *JSON, "--checkpoint-dir", "{folder}/disk/runs", "--checkpoint-every", "3"
    ),
    "a warning for each; the training continues; the losses are the undisturbed ones",
    code=1,
    seconds=None,
    messages=(
        "the checkpoint of step 3 could not be written to .*No space left",
        "error: the last checkpoint was not written",
        "HINT: free some space",
    ),
    holds=_only_whole_ones,
    disk="16k",
    needs=why_no_mounts,
)
FAULTS = [
    _harmed("a torn checkpoint", _tear, "model.weights.h5 is torn"),
    _harmed("a bit of a checkpoint flips", _flip, "model.weights.h5 is torn"),
    _harmed("a foreign checkpoint", _swap, "not a checkpoint of this program"),
    FULL_DISK,
    FULL_DISK.but(
        name="a full disk: checkpoints, --min-np 1", launcher_options=("--min-np", "1")
    ),
    Fault(
        "a full disk: the ledger",
        training("--ledger", "{folder}/disk/ledger", steps=1000),
        "the job ends: a ledger with gaps would prove nothing",
        code=1,
        seconds=30,
        messages=("rank 0: error: the ledger .* cannot be written to", "HINT"),
        disk="16k",
        needs=why_no_mounts,
    ),
    Fault(
        "a full disk: the timeline",
        training(*JSON, "--timeline", "{folder}/disk/trace"),
        "the training continues; the trace ends, and is complete JSON",
        code=0,
        seconds=None,
        holds=_complete_trace,
        disk="4k",
        needs=why_no_mounts,
    ),
]
