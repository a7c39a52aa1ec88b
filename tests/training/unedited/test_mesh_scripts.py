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


def run(command: list[str], *words: str, **variables: str) -> str:
    environment = launch.environment(forked=True, PYTHONHASHSEED="0", **variables)
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
    "shard_optimizer on 4": (4, "none", ["--set", "shard_optimizer=True"]),
    "shard_weights on 4": (4, "none", ["--set", "shard_weights=True"]),
    "tensor_parallel": (2, "none", ["--set", "tensor_parallel=2"]),
    "tensor_parallel on 4": (4, "none", ["--set", "tensor_parallel=2"]),
    "both on 4": (
        *(4, "none"),
        ["--set", "tensor_parallel=2", "--set", "shard_weights=True"],
    ),
}
MODELS = (
    *("mlp", "cnn", "residual", "lstm", "transformer", "translator"),
    *("experts", "gan"),
)
#: The cases of a launch.
CASES = {
    "few": ("mlp_adamw", "transformer_adamw"),
    **{
        optimizer: tuple(f"{model}_{optimizer}" for model in MODELS)
        for optimizer in ("sgd", "adamw", "adafactor")
    },
    "own step": ("own_adam",),
}
#: What takes minutes where four ranks share two cores.
MANY = [
    pytest.param(how, which, id=f"{how}, {which}", marks=pytest.mark.matrix)
    for how in HELD
    for which in CASES
    if which != "few"
]


def stock_of(which: str, once) -> Path:
    """Return the folder of what one process gives, of the cases."""
    return once(
        f"mesh-scripts-{which}",
        lambda path: run([sys.executable], str(path), "none", *CASES[which]),
    )


@pytest.mark.parametrize(
    ("how", "which"), [("1x2", "few"), ("shard_weights", "few"), *MANY]
)
def test_they_train_the_models_of_one_process(how, which, tmp_path, once):
    cases, stock = CASES[which], stock_of(which, once)
    ranks, mesh, options = HELD[how]
    start = [sys.executable, "-m", "collective.launch", "-np", str(ranks), "--keras"]
    output = run([*start, *options], str(tmp_path), mesh, *cases)
    wrong = [w for case in cases for w in differences(stock, tmp_path, case, ranks)]
    assert not wrong, "\n".join([*wrong, output])
    for case, own, whole in re.findall(r"(\w+): (\d+) of (\d+) bytes", output):
        if how.startswith("shard_optimizer"):
            assert whole == "0"
        elif mesh != "2x1" or case.startswith("transformer"):
            assert int(own) <= 0.51 * int(whole), case
    if mesh.endswith("x2") and "transformer_adamw" in cases:
        # Megatron's: a sum for each of four pairs, both ways, and one for the norm.
        found = re.search(
            r"transformer_adamw: (\d+) sums, 0 gathers along model", output
        )
        assert found is not None and int(found.group(1)) <= 8
    if mesh.endswith("x2") and cases[0].startswith("mlp"):
        assert (
            "not cut: sequential/odd/kernel: axis 1 of 5 is not divided by 2" in output
        )


def test_two_model_axes_and_a_rank_that_is_late(tmp_path, once):
    """Ranks that wait for it in groups of both axes report no mismatch."""
    ((case,), stock) = CASES["own step"], stock_of("own step", once)
    start = [sys.executable, "-m", "collective.launch", "-np", "4", "--keras"]
    late = {"LATE_RANK": "2", "COLLECTIVE_STALL_SECONDS": "1"}
    run(start, str(tmp_path), "1x2x2", case, COLLECTIVE_RECORDER="off", **late)
    wrong = [*differences(stock, tmp_path, case, 4)]
    assert not wrong, "\n".join(wrong)


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
