"""All of ``compare.py``: the processes, the verdicts, the files, the exit codes."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest

from collective.backends.registry import BACKENDS, can_start
from tests import launch

pytestmark = [pytest.mark.compares, pytest.mark.launches]
SCHEMA = json.loads(
    (launch.ROOT / "docs" / "reference" / "results.schema.json").read_text()
)
TINY = ["--model", "mlp", "--optimizer", "sgd"]


def compare(folder: Path, *options: str, seconds: float = 900, **variables: str):
    """Run ``compare.py``; return exit code, output and results."""
    command = [sys.executable, "compare.py", "-np", "2"]
    command += ["--json", str(folder / "results.json")]
    code, printed = launch.run(
        [*command, *options], launch.environment(**variables), seconds
    )
    file = folder / "results.json"
    found = json.loads(file.read_text()) if file.exists() else None
    if found:
        jsonschema.validate(found, SCHEMA)
    return code, printed, found


def usable():
    return {b for b in BACKENDS if can_start(b, 2).usable}


def test_digits_on_every_backend(tmp_path):
    code, printed, found = compare(tmp_path, "--rounds", "1")
    assert code == 0, printed
    assert found["finished"]
    others = usable() - {"single"}
    kinds = {name: BACKENDS[name] for name in others}
    synchronous = {name for name, kind in kinds.items() if kind.synchronous}
    assert {"tf-mirrored", "tf-multiworker", "mpi", "native"} <= others
    for precision in ("float64", "float32"):
        verdicts = found["equal"][precision]["verdicts"]
        assert set(verdicts) == synchronous
        assert all(v["equal"] for v in verdicts.values()), printed
    assert set(found["fast"]["2"]) == others | {"single", "one share"}
    for one in found["fast"]["2"].values():
        assert len(one["rates"]) == 1 and one["rates"][0] > 0 and not one["failure"]
    for message in ("Equal? float64", "Fast? 2 replicas", "is fastest", "of a step"):
        assert message in printed


def test_one_start_of_each_backend_shows_both(tmp_path):
    code, printed, found = compare(tmp_path, "--backends", "native,tf-mirrored", *TINY)
    assert code == 0, printed
    assert set(found["equal"]) == {"float64"}
    verdicts = found["equal"]["float64"]["verdicts"]
    assert set(verdicts) == {"native", "tf-mirrored"}, printed
    assert all(v["equal"] and v["parameter"] < 1e-12 for v in verdicts.values())
    timed = found["fast"]["2"]
    assert set(timed) == {"single", "one share", *verdicts}
    assert all(len(one["rates"]) == 1 for one in timed.values())
    assert "  native: equal (weights " in printed and "--full repeats" in printed


@pytest.mark.parametrize("backend, way", [
    ("mpi", "lost"), ("tf-mirrored", "rounded"), ("native", "flipped"),
])  # fmt: skip
def test_catches_what_is_wrong_and_names_it(backend, way, tmp_path):
    options = ["--backends", backend, "--only", "equal"]
    options += ["--model", "tests.comparison.wrong:model"]
    if way != "flipped":  # float32 finds this one, too
        options += ["--precision", "float64"]
    code, printed, found = compare(tmp_path, *options, WRONG=f"{backend}:{way}")
    assert code == 1 and "NOT EQUAL" in printed, printed
    for proof in found["equal"].values():
        verdict = proof["verdicts"][backend]
        assert not verdict["equal"] and verdict["first_step"] == 0
        assert verdict["first_tensor"]


def test_a_backend_that_dies_is_reported_and_the_others_go_on(tmp_path):
    options = ["--model", "tests.own:dies_under_native", "--precision", "float64"]
    code, printed, found = compare(
        tmp_path, *options, "--backends", "native,tf-mirrored", "--only", "equal"
    )
    assert code == 1, printed
    proof = found["equal"]["float64"]
    assert set(proof["verdicts"]) == {"tf-mirrored"}
    why, tail = proof["failures"]["native"]
    assert why == "ended with exit code 7" and "about to die" in tail
    assert "Some runs failed." in printed and "about to die" in printed


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_process_and_writes_what_is_finished(sent, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "compare.py", "-np", "2", "--json", str(tmp_path / "results.json"),
         *TINY,
         "--backends", "mpi", "--precision", "float64", "--only", "equal"],
        cwd=launch.ROOT, env=launch.environment(), stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    import psutil

    printed = ""
    while "float64: mpi" not in printed:
        printed += process.stdout.readline()
    compare_py = psutil.Process(process.pid)
    launch.await_that(compare_py.children)
    time.sleep(2)  # now it starts its ranks, or they import or train
    started = compare_py.children(recursive=True)
    assert started
    process.send_signal(sent)
    assert process.wait(launch.PATIENCE_SECONDS) == 128 + sent
    process.stdout.close()
    assert not psutil.wait_procs(started, timeout=launch.PATIENCE_SECONDS)[1]
    found = json.loads((tmp_path / "results.json").read_text())
    assert not found["finished"]
    assert list(found["equal"]["float64"]["losses"]) == ["single"]


@pytest.mark.parametrize("options, message", [
    (["--backend", "mpi"], "--backend is not for compare.py"),
    (["--optimiser", "sgd"], "unrecognized arguments"),
    (["--backends", "carrier"], "unknown backend 'carrier'"),
    (["-np", "0"], "is not a list of numbers"),
    (["--rounds", "0"], "'0' is not a whole number from 1 up"),
    (["--deadline", "-1"], "'-1' is not a positive number of seconds"),
    (["--global-batch-size", "0"], "'0' is not a whole number from 1 up"),
    (["--precision", "float16"], "invalid choice: 'float16'"),
    (["--resume"], "--resume is not for compare.py"),
    (["--json", "nowhere/found"], "nowhere/found cannot be written"),
    (["--model", "tests.own:no_model"], "the training itself is not possible"),
])  # fmt: skip
def test_wrong_use_ends_with_2_and_a_hint(options, message, tmp_path):
    code, printed, found = compare(tmp_path, *options, seconds=60)
    assert code == 2 and message in printed and "HINT" in printed and found is None
