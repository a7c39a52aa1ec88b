"""Trainings under Keras' own ``fit`` whose ranks die, leave and join: the same numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import launch
from tests.training.elastic.ranks_batches import JOINED_AT, TOLD_AT

SCRIPT = str(Path(__file__).with_name("ranks_batches.py"))


def printed_by(ranks: int, *words: str, grows: bool = False) -> str:
    before = [*launch.command("native", ranks), "--min-np", "1"]
    before += ["--max-np", str(ranks)] if grows else []
    command = [*before, sys.executable, SCRIPT, *words]
    code, printed = launch.run(command, launch.environment(forked=True), 200)
    assert code == 0, printed
    return printed


@pytest.mark.launches
@pytest.mark.parametrize(
    ("kind", "shares"),
    [
        ("arrays", ["0", "0.35", "0.97"]),  # in the start, in an epoch, at the end
        pytest.param("arrays", ["0.03", "0.15", "0.75"], marks=pytest.mark.matrix),
        pytest.param("generator", ["0.06", "0.55", "0.9"], marks=pytest.mark.matrix),
    ],
)
def test_ranks_die_in_what_they_do_beside_the_steps(kind, shares):
    printed = printed_by(4, "dies", kind, *shares)
    for size in (3, 2, 1):
        assert f"{size + 1} died; {size} rank" in printed, printed
        assert f"rank 0 of {size}: same after" in printed, printed


@pytest.mark.launches
@pytest.mark.parametrize(
    "kind",
    [
        kind if kind == "arrays" else pytest.param(kind, marks=pytest.mark.matrix)
        for kind in JOINED_AT
    ],
)
def test_a_rank_leaves_and_another_joins(kind, tmp_path):
    """All ranks learn of both in the next step, and no step is repeated."""
    printed = printed_by(2, "grows", kind, str(tmp_path), grows=True)
    left, joined = TOLD_AT + 1, JOINED_AT[kind] + 1
    assert f"rank 0 of 2 left; 1 rank continues from step {left} " in printed
    assert f"1 joined; 2 ranks continue from step {joined} " in printed
    for rank in range(2):
        assert f"rank {rank} of 2: same" in printed, printed
