"""Unedited scripts over a mesh train the models of one process, whatever each rank holds."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import launch

SCRIPT = str(Path(__file__).with_name("mesh_script.py"))
pytestmark = launch.STARTS_RANKS


def run(command: list[str], *words: str) -> str:
    environment = launch.environment(forked=True, PYTHONHASHSEED="0")
    code, output = launch.run([*command, SCRIPT, *words], environment, 550)
    assert code == 0, output
    return output


#: What the ranks hold: the ranks, the mesh, and options of the launcher.
HELD = {
    "1x2": (2, "1x2", []),
    "2x1": (2, "2x1", []),
    "2x2": (4, "2x2", []),
    "1x4": (4, "1x4", []),
    "1x2x2": (4, "1x2x2", []),
    "2x2, shard_optimizer": (4, "2x2", ["--set", "shard_optimizer=True"]),
    "shard_weights": (2, "none", ["--set", "shard_weights=True"]),
    "shard_optimizer": (2, "none", ["--set", "shard_optimizer=True"]),
    "shard_weights on 4": (4, "none", ["--set", "shard_weights=True"]),
}
FEW = ("mlp_adamw", "transformer_adamw")
ALL = (
    *(
        f"{model}_{optimizer}"
        for model in (
            *("mlp", "cnn", "residual", "lstm", "transformer", "experts", "gan"),
        )
        for optimizer in ("sgd", "adamw", "adafactor")
    ),
    "own_adam",
)


@pytest.mark.parametrize(
    ("how", "cases"),
    [
        *(pytest.param(how, FEW, id=f"{how}, few") for how in ("1x2", "shard_weights")),
        *(pytest.param(how, ALL, id=how, marks=pytest.mark.matrix) for how in HELD),
    ],
)
def test_they_train_the_models_of_one_process(how, cases, tmp_path, once):
    stock = once(
        f"mesh-scripts-{len(cases)}",
        lambda path: run([sys.executable], str(path), "none", *cases),
    )
    ranks, mesh, options = HELD[how]
    start = [sys.executable, "-m", "collective.launch", "-np", str(ranks), "--keras"]
    output = run([*start, *options], str(tmp_path), mesh, *cases)
    wrong = [w for case in cases for w in differences(stock, tmp_path, case, ranks)]
    assert not wrong, "\n".join([*wrong, output])
    for case, own, whole in re.findall(r"(\w+): (\d+) of (\d+) bytes", output):
        if how == "shard_optimizer":
            assert whole == "0"
        elif mesh != "2x1" or case.startswith("transformer"):
            assert int(own) <= 0.51 * int(whole), case
    if mesh.endswith("x2"):
        # Megatron's: a sum for each of four pairs, both ways, and one for the norm.
        found = re.search(
            r"transformer_adamw: (\d+) sums, 0 gathers along model", output
        )
        assert found is not None and int(found.group(1)) <= 8
        assert (
            "not cut: sequential/odd/kernel: axis 1 of 5 is not divided by 2" in output
        )


def differences(stock: Path, found: Path, case: str, ranks: int):
    """Yield what differs from one process, of each rank."""
    with np.load(stock / f"{case}.0.npz") as wanted:
        for rank in range(ranks):
            with np.load(found / f"{case}.{rank}.npz") as got:
                assert sorted(got.files) == sorted(wanted.files)
                for key in wanted.files:
                    a, b = got[key], wanted[key]
                    scale = max(1.0, float(np.abs(b).max(initial=0)))
                    error = float(np.abs(a - b).max(initial=0)) / scale
                    if a.shape != b.shape or not error <= 1e-10:
                        yield f"{case}, rank {rank}, {key}: {error}"
