"""``--set tensor_parallel=T`` cuts the models of a script, and their numbers stay equal."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from tests import launch

SCRIPT = str(Path(__file__).with_name("tensor_parallel_script.py"))
pytestmark = launch.STARTS_RANKS


def run(folder: Path, *start: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the numbers that the script prints, and its other lines."""
    folder.mkdir()
    environment = launch.environment(forked=True, PYTHONHASHSEED="0")
    code, output = launch.run([*start, SCRIPT], environment, 550, folder)
    assert code == 0, output
    lines = output.splitlines()
    numbers = [line.split()[1:] for line in lines if line.startswith("numbers ")]
    others = [line for line in lines if not line.startswith("numbers ")]
    return {name: np.array(values, float) for name, *values in numbers}, others


def test_models_of_all_kinds(tmp_path):
    wanted, shown = run(tmp_path / "stock", sys.executable)
    start = [*launch.command("native", 2), "--keras", "--set", "tensor_parallel=2"]
    found, printed = run(tmp_path / "cut", *start)
    assert list(found) == list(wanted)
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, 1e-9, 1e-11, err_msg=name)
    summary = [line for line in shown if line.startswith("│")]
    assert summary and [line for line in summary if line not in printed] == []
    cut = [line.split()[1:] for line in printed if line.startswith("cut ")]
    assert len(cut) == 8 and all(int(count) > 0 for _, count, *_ in cut), cut
    files = [tmp_path / run / "own.weights.h5" for run in ("stock", "cut")]
    assert files[0].stat().st_size == files[1].stat().st_size
