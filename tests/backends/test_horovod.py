"""``train.py`` under Horovod's launcher and under mpirun, and jobs that fail there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import launch

pytestmark = [pytest.mark.launches, pytest.mark.horovod]
TRAIN = (sys.executable, "train.py", "--epochs", "1")
HOROVODRUN = str(Path(sys.executable).parent / "horovodrun")


def script(*arguments: str, seconds: float = 300) -> tuple[int | None, str]:
    return launch.run(list(arguments), launch.environment(forked=True), seconds)


@pytest.mark.parametrize("more", ["", "--mpi", "--gloo"])
def test_horovodrun_trains_through_horovod(more, tmp_path):
    """The cases are the plain command, and each way by name; one has Horovod's options."""
    file, timeline = tmp_path / "run.json", tmp_path / "timeline"
    options = [more] if more else []
    if more != "--mpi":
        options += ["--timeline-filename", str(timeline), "--fusion-threshold-mb", "1"]
    code, printed = script(
        HOROVODRUN, "-np", "4", *options, *TRAIN, "--json", str(file)
    )
    assert code == 0, printed
    found = json.loads(file.read_text())
    assert (found["backend"], found["replicas"]) == ("horovod", 4)
    assert found["chosen_because"] == "horovodrun started 4 processes"
    assert found["losses"][-1] < found["losses"][0]
    if more != "--mpi":
        assert "sums_1_of" in timeline.read_text()
        assert "MEMCPY_IN_FUSION_BUFFER" in timeline.read_text()


def test_buckets_train_the_model_of_one_process(tmp_path):
    one, file = tmp_path / "one.json", tmp_path / "run.json"
    exact = ["--precision", "float64", "--steps", "6", "--json"]
    code, printed = script(*TRAIN, *exact, str(one))
    assert code == 0, printed
    buckets = ["--backend", "horovod", "--bucket-bytes", "10000"]
    code, printed = script(HOROVODRUN, "-np", "3", *TRAIN, *buckets, *exact, str(file))
    assert code == 0, printed
    losses = [json.loads(path.read_text())["losses"] for path in (file, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_mpirun_trains_through_horovod_when_asked(tmp_path):
    file = tmp_path / "run.json"
    named = ["--backend", "horovod", "--json", str(file)]
    code, printed = script(*launch.command("mpi", 4), *TRAIN, *named)
    assert code == 0, printed
    found = json.loads(file.read_text())
    assert (found["backend"], found["chosen_because"]) == ("horovod", "asked for")


@pytest.mark.parametrize("how", ["--mpi", "--gloo"])
def test_a_rank_that_fails_ends_the_job(how):
    """Its own error is shown once, with its exit code; the other ranks print nothing."""
    code, printed = script(
        *[HOROVODRUN, "-np", "2", how, *TRAIN, "--model", "mlp"],
        *["--data", "tests.own:poisoned", "--global-batch-size", "8"],
    )
    assert code == 1, printed
    assert printed.count("error: ") == printed.count("HINT: ") == 1, printed
    assert "Traceback" not in printed, printed


def test_wrong_use_is_reported_once_and_ends_with_2():
    code, printed = script(HOROVODRUN, "-np", "2", "--gloo", *TRAIN, "--data", "cats")
    assert code == 2, printed
    assert printed.count("error: ") == printed.count("HINT: ") == 1, printed
    assert "Traceback" not in printed, printed
