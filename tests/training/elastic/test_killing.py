"""Whole jobs or single ranks are killed in an epoch, and continue: the same trace.

This covers every backend; ``tests/faults`` kills at every place.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path

import numpy as np
import pytest

from collective.training.observers.ledger.verify import check
from tests import launch
from tests.training.elastic.ranks_killed import (
    JOINED_AT,
    KILLED_AT,
    SURVIVED_AT,
    TOLD_AT,
)
from tests.training.reporting.test_timeline import (
    WALL_CLOCK,
    assert_nested,
    assert_overlap,
    read,
    rows_of,
    steps_of,
)
from tests.training.small import ROWS

SCRIPT = str(Path(__file__).with_name("ranks_killed.py"))
STEPS = 20


def start(backend: str, ranks: int, folder: Path, way: str, steps: int = STEPS) -> str:
    """Run the script to its end, or to its death; return its output."""
    before = launch.command(backend, ranks) if backend != "single" else []
    if way == "grown":
        before += ["--min-np", "1", "--max-np", str(ranks)]
    if way == "survived":
        before += ["--with-ft", "ulfm"] if backend == "mpi" else ["--min-np", "1"]
    program = [sys.executable, SCRIPT, backend, str(folder), str(steps), way]
    code, printed = launch.run([*before, *program], launch.environment(), 100)
    assert code is not None and (code != 0) == (way == "killed"), printed
    assert ("resumed from " in printed) == (way == "resumed"), printed
    return printed


def losses(folder: Path, way: str) -> list[float]:
    return json.loads((folder / f"{way}.json").read_text())


def copied(folder: Path, name: str) -> Path:
    return shutil.copytree(folder, folder.with_name(name))


def assert_perfect_ledger(folder: Path, replicas: list[int]) -> None:
    found = check(folder / "ledger")
    assert found.faults == []
    assert [run.replicas for run in found.runs] == replicas
    assert (
        found.epochs == [ROWS, ROWS, ROWS, 20] and found.runs[0].last == KILLED_AT - 1
    )
    assert found.runs[1].undone == KILLED_AT - found.runs[1].start > 0


def assert_survived(backend: str, folder: Path) -> None:
    printed = start(backend, 3, folder, "survived")
    first, second = SURVIVED_AT
    assert f"rank 0 of 3 died; 2 ranks continue from step {first} " in printed
    assert f"rank 0 of 2 died; 1 rank continues from step {second} " in printed
    assert "rank 0 is dead; " in printed  # dumps name it by its number at that time
    assert "rank 0 (started as 1) is dead; " in printed
    np.testing.assert_allclose(
        losses(folder, "survived"), losses(folder, "whole"), rtol=1e-12
    )
    found = check(folder / "ledger")
    assert found.faults == [] and found.epochs == [ROWS, ROWS, ROWS, 20]
    assert list((folder / "runs").glob(f"step-{STEPS:09d}"))


@pytest.mark.launches
@pytest.mark.matrix  # the faults include kills with --min-np, too
def test_the_last_of_three_goes_on_alone(tmp_path):
    assert_survived("native", tmp_path)


@pytest.mark.launches
def test_a_start_in_which_a_rank_dies_is_repeated():
    script = str(Path(__file__).with_name("ranks_start.py"))
    before = [*launch.command("native", 4), "--min-np", "1"]
    command = [*before, sys.executable, script, "0", "0.6", "1"]
    code, printed = launch.run(command, launch.environment(forked=True), 100)
    assert code == 0, printed
    for size in (3, 2, 1):
        assert f"{size + 1} died; {size} rank" in printed, printed
        assert f"rank 0 of {size}: same after" in printed, printed


@pytest.mark.launches
@pytest.mark.matrix
def test_features_that_communicate_in_the_step_survive(tmp_path):
    """They are an own step; batches of a generator; a coupled loss, BatchNorm, look-ups."""
    script = str(Path(__file__).with_name("ranks_features.py"))
    before = [*launch.command("native", 4), "--min-np", "1"]
    command = [*before, sys.executable, script]
    code, printed = launch.run(command, launch.environment(), 300)
    assert code == 0, printed
    for name in ("own step", "batches", "hard"):
        assert f"{name}: as stock Keras" in printed


@pytest.mark.launches
def test_a_rank_leaves_and_another_joins(tmp_path):
    printed = start("native", 2, tmp_path, "grown")
    # All ranks learn of both in the next step, and no step is repeated.
    first, second = TOLD_AT + 1, JOINED_AT + 1
    assert f"rank 0 of 2 left; 1 rank continues from step {first} " in printed
    assert f"1 joined; 2 ranks continue from step {second} " in printed
    np.testing.assert_allclose(
        losses(tmp_path, "grown"), losses(tmp_path, "whole"), rtol=1e-12
    )
    found = check(tmp_path / "ledger")
    assert found.faults == [] and found.epochs == [ROWS, ROWS, ROWS, 20]
    assert {(run.start, run.replicas) for run in found.runs} >= {
        (0, 2), (first, 1), (second, 2)
    }  # fmt: skip
    assert list((tmp_path / "runs").glob(f"step-{STEPS:09d}"))
    assert_rows(read(tmp_path / "trace.json"), first, second)


def assert_rows(events: list[dict], first: int, second: int) -> None:
    """Check that each process has a row of its own, with any number at that time."""
    rows = rows_of(events)
    for spans in rows.values():
        assert_nested(spans)
    assert {row: set(steps_of(spans)) for row, spans in rows.items()} == {
        0: set(range(first)),
        1: set(range(STEPS)),
        2: set(range(second, STEPS)),
    }
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    host = socket.gethostname()
    assert sorted(names) == [
        f"rank 0 on {host}: native",
        f"rank 1 on {host}: native",
        f"rank 2 on {host}: native, joined at step {second}",
    ]
    instants = [(e["pid"], e["name"]) for e in events if e["ph"] == "i"]
    assert [name for row, name in instants if row == 0][-1] == "leaves the job"
    assert (1, "continues as rank 0 of 1") in instants
    assert (2, "continues as rank 1 of 2") in instants
    # With one clock, common actions have the same time.
    together = {row: rows[row] for row in (1, 2)}
    assert assert_overlap(together, "all-reduce", error=WALL_CLOCK) == STEPS - second


@pytest.mark.launches
@pytest.mark.matrix
def test_under_mpirun_with_fault_tolerance(tmp_path):
    assert_survived("mpi", tmp_path)


def with_horovod(name: str):
    return pytest.param(name, marks=[pytest.mark.horovod] if name == "horovod" else [])


@pytest.mark.launches
@pytest.mark.matrix
@pytest.mark.parametrize("name", map(with_horovod, launch.LAUNCHERS))
def test_every_backend_is_resumed_by_itself_and_by_others(name, tmp_path):
    folder = tmp_path / "killed"
    folder.mkdir()
    start(name, 2, folder, "killed")
    assert list((folder / "runs").glob("step-*"))
    other = copied(folder, "other")
    start(name, 2, folder, "resumed")
    assert losses(folder, "resumed") == losses(folder, "whole")
    # The job goes from two ranks to one, and to two of another backend.
    start("single", 1, other, "resumed", KILLED_AT + 3)
    start("mpi" if name == "native" else "native", 2, other, "resumed")
    np.testing.assert_allclose(
        losses(other, "resumed"), losses(other, "whole"), rtol=1e-12
    )
    assert_perfect_ledger(other, [2, 1, 2])
