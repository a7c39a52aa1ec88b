"""Habits of ordinary scripts, on two ranks: each has the results of ``python script.py``."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from collective.training.unedited.tracking import record_on_rank_zero
from tests import launch

SCRIPT = str(Path(__file__).with_name("details_script.py"))
KERAS = [sys.executable, "-m", "collective.launch", "-np", "2", "--keras"]


def found(printed: str) -> list[dict]:
    """Return the results of each rank; ``[0-1]`` means both are equal."""
    lines = re.findall(r"^(?:\[\d(-\d)?\] )?FOUND (.*)$", printed, re.M)
    return [json.loads(line) for both, line in lines for _ in range(1 + bool(both))]


def assert_close(mine, theirs, where):
    if isinstance(theirs, dict):
        assert list(mine) == list(theirs), where
        for key, value in theirs.items():
            assert_close(mine[key], value, f"{where}/{key}")
    elif isinstance(theirs, list) and any(isinstance(v, list | dict) for v in theirs):
        assert len(mine) == len(theirs), where
        for place, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            assert_close(one, other, f"{where}/{place}")
    elif theirs is None or isinstance(theirs, str):
        assert mine == theirs, where
    else:
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, err_msg=where)


def test_other_ranks_record_no_experiment(monkeypatch):
    for name in ("WANDB_MODE", "NEPTUNE_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, "of the user")
    record_on_rank_zero(0)
    assert os.environ["WANDB_MODE"] == "of the user"
    take_over = record_on_rank_zero(1)
    assert os.environ["WANDB_MODE"] == "disabled"
    folder = os.environ["MLFLOW_TRACKING_URI"].removeprefix("file:")
    assert os.path.isabs(folder) and not os.path.exists(folder)
    take_over()
    assert os.environ["WANDB_MODE"] == os.environ["NEPTUNE_MODE"] == "of the user"
    assert os.environ["MLFLOW_TRACKING_URI"] == "of the user"


@pytest.mark.launches
@launch.NEEDS_CORE
def test_it_finds_what_python_finds_on_every_rank(tmp_path):
    outputs = []
    for words in ([sys.executable], KERAS):
        folder = tmp_path / str(len(words))
        folder.mkdir()
        line = [*words, SCRIPT, str(folder)]
        code, printed = launch.run(
            line, launch.environment(forked=True, PYTHONHASHSEED="0"), 150
        )
        assert code == 0, printed
        outputs.append(printed)
    (stock,), ranks = map(found, outputs)
    assert len(ranks) == 2, outputs[1]
    for rank, mine in enumerate(ranks):
        assert_close(mine, stock, f"rank {rank}")
