"""Many models at once: each as if it were alone, whatever becomes of the others."""

from __future__ import annotations

import json
import os
import sys

import pytest
import yaml

from collective import train as cli
from collective.backends.launching import run
from collective.errors import UsageError
from collective.training import fit_many
from collective.training.sweep import command, runner
from tests import launch

BASE = {"model": "mlp", "steps": 4, "precision": "float64", "global_batch_size": 16}


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(**settings):
        (tmp_path / "s.yaml").write_text(yaml.safe_dump(settings))
        return "s.yaml"

    return write


@pytest.mark.launches
@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_is_as_when_trained_alone(ranks, file, tmp_path, capsys, monkeypatch):
    """Of two one fails; the other is clipped, in micro-batches that do not divide."""
    monkeypatch.setenv("COLLECTIVE_PROBE", "0")
    base = BASE | {"global_batch_size": 15, "accumulate": 2, "global_clipnorm": 0.1}
    broken = {"name": "broken", "model": "nowhere:make"}
    asked = file(
        base=base, grid={"seed": [1]}, trainings=[broken], folder="runs", ranks=ranks
    )
    assert command.run(asked) == 1
    printed = capsys.readouterr().out
    assert "broken failed: nowhere:make: there is no module 'nowhere'" in printed
    assert (tmp_path / "runs/losses.png").stat().st_size > 1000
    losses = json.loads((tmp_path / "runs/seed-1.json").read_text())["losses"]
    assert f"{losses[-1]:.4f}" in printed
    arguments = [f"--{k.replace('_', '-')}={v}" for k, v in base.items()]
    code, output = launch.run(
        [
            *(sys.executable, str(launch.ROOT / "train.py"), "--seed=1"),
            *("--json", str(tmp_path / "alone.json"), *arguments),
        ],
        launch.environment(),
        120,
    )
    assert code == 0, output
    alone = json.loads((tmp_path / "alone.json").read_text())["losses"]
    assert losses == pytest.approx(alone, rel=1e-12)


def test_as_many_at_a_time_as_there_are_groups(tmp_path, monkeypatch):
    """The ranks, cores and GPUs of each group; in order, and every one once."""
    began = []

    def pretend(command, seconds, variables, cores):
        began.append((command, variables.get("CUDA_VISIBLE_DEVICES"), tuple(cores)))
        (tmp_path / f"{len(began) - 1}.json").write_text("{}")
        return run(["true"], 10)

    monkeypatch.setattr(runner, "run", pretend)
    monkeypatch.setattr(runner, "gpus", lambda: 4)
    monkeypatch.setattr(runner, "granted", lambda: list("0123"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    lines = []
    jobs = [{"seed": i} for i in range(5)]
    ended = fit_many(jobs, folder=tmp_path, at_once=1, ranks=2, tell=lines.append)
    assert [t.name for t in ended] == list("01234")
    assert not any(t.failure for t in ended)
    assert {(devices, cores) for _, devices, cores in began} == {("0,1", (0, 1, 2, 3))}
    assert all("-np" in command for command, *_ in began)
    assert lines[:3] == ["0: begins", "0: done", "1: begins"]
    groups = runner._groups(None, 2, 5)
    assert groups == [([0, 1], "0,1"), ([2, 3], "2,3")]
    with pytest.raises(UsageError, match="3 trainings at once on 2 GPUs each"):
        runner._groups(3, 2, 5)


@pytest.mark.parametrize(
    "settings, wrong",
    [
        ({"bse": {}}, "unknown key 'bse'"),
        ({"grid": {"learning_rte": [1]}}, "unknown option 'learning_rte'"),
        ({"grid": {"learning_rate": ["fast"]}}, "'fast' is not float"),
        ({"trainings": [{"steps": 1.5}]}, "steps: 1.5 is not int"),
        ({"base": {"model": "mlp"}}, "names no trainings"),
        ({"trainings": [{"name": "a"}, {"name": "a"}]}, "two trainings"),
        ({"trainings": [{"name": "a/b"}]}, "not a file name"),
        ({"grid": {"seed": [1]}, "ranks": 0}, "at least 1"),
        ({"grid": {"backend": ["nccl"]}}, "unknown backend 'nccl'"),
        ({"grid": {"backend": ["mpi"]}}, "'mpi' cannot be used with ranks: 1: "),
        ({"grid": {"backend": ["tf-mirrored"]}, "ranks": 2}, "with ranks: 2: "),
        ({}, "no keys"),
    ],
)
def test_wrong_settings_are_refused_before_any_training(file, settings, wrong, capsys):
    assert cli.main(["--sweep", file(**settings)]) == 2
    error = capsys.readouterr().err
    assert wrong in error and "HINT: " in error


def test_options_beside_a_sweep_are_refused(file, capsys):
    path = file(grid={"seed": [1]})
    assert cli.main(["--sweep", path, "--epochs", "3"]) == 2
    assert "base: {epochs: 3}" in capsys.readouterr().err
    assert cli.main(["--sweep", "nowhere.yaml"]) == 2


def test_numbers_are_of_their_type():
    checked = runner._checked({"learning_rate": "1e-3", "seed": 1, "name": "n"})
    assert checked == {"learning_rate": 1e-3, "seed": 1}
