"""Unedited scripts whose ranks die: survivors have the results of ``python script.py``."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collective.launch import processes
from tests import launch
from tests.training.unedited.small_model import MAKE

pytestmark = launch.STARTS_RANKS
SCRIPT = str(Path(__file__).with_name("elastic_script.py"))
LAUNCHER = [sys.executable, "-m", "collective.launch"]


@pytest.fixture(scope="session")
def stock(once) -> Path:
    """Run the script with Python alone; return the folder of its files."""

    def train(made: Path) -> None:
        command = [sys.executable, SCRIPT]
        code, printed = launch.run(
            command, launch.environment(forked=True, PYTHONHASHSEED="0"), 120, made
        )
        assert code == 0, printed

    return once("elastic_script", train)


def run(folder: Path, ranks: int, deaths: str, *options: str) -> str:
    """Run the script, whose ranks die, to its end; return its output."""
    command = [*LAUNCHER, "-np", str(ranks), "--min-np", "1", "--keras", *options]
    variables = launch.environment(forked=True, PYTHONHASHSEED="0", DEATHS=deaths)
    code, printed = launch.run([*command, SCRIPT], variables, 200, folder)
    assert code == 0, printed
    for death in deaths.split(","):
        assert f"rank {death.split(':')[1]} ended by SIGKILL" in printed, printed
    assert len(re.findall("^RESULT of ", printed, re.M)) == 1, printed
    return printed


def close(found: Any, wanted: Any) -> None:
    """Compare numbers in dicts and lists, which may be uneven."""
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        found, wanted = list(found.values()), list(wanted.values())
    if isinstance(wanted, list):
        for one, other in zip(found, wanted, strict=True):
            close(one, other)
    else:
        assert found == pytest.approx(wanted, rel=1e-10, abs=1e-12)


def table(file: Path) -> list[list[Any]]:
    with file.open() as rows:
        return [
            [float(value) for value in row.values()] for row in csv.DictReader(rows)
        ]


def assert_same(folder: Path, stock: Path) -> None:
    """Check that the files of a job have the names and contents of stock Keras."""
    names = [sorted(path.name for path in f.iterdir()) for f in (folder, stock)]
    assert names[0] == names[1]
    for read in (
        lambda of: json.loads((of / "found.json").read_text()),
        lambda of: table(of / "epochs.csv"),
        lambda of: np.load(of / "predicted.npy").tolist(),
    ):
        close(read(folder), read(stock))
    assert (folder / "log.txt").read_text() == (stock / "log.txt").read_text()


def test_rank_zero_dies_in_a_training_and_another_one_in_the_next(stock, tmp_path):
    """Callbacks keep their state, files are written once, the last rank prints the result."""
    printed = run(tmp_path, 3, "step24:0,data14:1")
    assert "rank 0 of 3 died; 2 ranks continue from step 24 " in printed
    assert re.search("rank 0 of 2 died; 1 rank continues from step ", printed)
    assert_same(tmp_path, stock)


def test_ranks_die_outside_of_a_training(stock, tmp_path):
    printed = run(tmp_path, 4, "begin:3,test3:0,save:1")
    # Before fit, in a batch of evaluate, before a save.
    assert re.search("left, and repeats? Model.fit\n", printed), printed
    assert re.search("rank 0 of 3 died; 2 ranks continue from step ", printed), printed
    assert re.search("left, and repeats? a save of a model\n", printed), printed
    assert_same(tmp_path, stock)


DIES_LAST = """
import os, signal, sys, time, keras, numpy as np
x = np.ones((16, 2))
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, x[:, :1], verbose=0)
model.optimizer.apply([weight.value for weight in model.weights])
if os.environ["COLLECTIVE_RANK"] == sys.argv[1]:
    os.kill(os.getpid(), signal.SIGKILL)
print("RESULT")
sys.exit(0)
"""


@pytest.mark.parametrize(
    "rank, expected", [("0", 1), pytest.param("1", 0, marks=pytest.mark.matrix)]
)
def test_a_rank_dies_after_the_last_call(rank, expected, tmp_path):
    """The lost output of rank 0 is reported."""
    script = tmp_path / "script.py"
    script.write_text(DIES_LAST)
    command = [*LAUNCHER, "-np", "3", "--min-np", "1", "--keras", str(script), rank]
    env = launch.environment(forked=True, PYTHONHASHSEED="0")
    code, printed = launch.run(command, env, 100, tmp_path)
    assert code == expected, printed
    assert printed.count("RESULT") == 1 - expected
    assert ("rank 0 died at the end of the script" in printed) == bool(expected)
    assert printed.count("If rank 0 dies in it, the others run it to its end") == 1


GROWS = (
    """
import json, os, sys, time, keras, numpy as np
keras.utils.set_random_seed(3)
keras.config.set_floatx("float64")
joins, joined = "COLLECTIVE_JOINS" in os.environ, "joined"
if joins:
    os.mkdir(joined)  # a newcomer has been admitted, and begins the script
rng = np.random.default_rng(0)
x, y = rng.normal(size=(48, 5)), rng.normal(size=(48, 1))
"""
    + MAKE
    + """class Dies(keras.callbacks.Callback):
    steps = 0
    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == 9 and os.environ.get("COLLECTIVE_RANK") == "1" and not joins:
            os.kill(os.getpid(), 9)
        if 9 < self.steps < 250 and "COLLECTIVE_RANK" in os.environ:
            time.sleep(0 if os.path.exists(joined) else 0.25)
best = keras.callbacks.EarlyStopping("loss", patience=200, restore_best_weights=True)
slower = keras.callbacks.ReduceLROnPlateau("loss", patience=2, min_delta=0.01)
first, second = make(), make()
h = first.fit(x, y, batch_size=8, epochs=60, validation_split=0.2, verbose=0,
              callbacks=[Dies(), best, slower])
first.save("first.keras")
g = second.fit(x, first.predict(x, verbose=0), epochs=2, verbose=0)
for _ in range(4):
    second.train_on_batch(x[:32], y[:32])
found = [h.history, g.history, second.evaluate(x, y, verbose=0)]
print("RESULT", json.dumps([*found, *[w.tolist() for w in first.get_weights()]]))
"""
)


def test_a_rank_joins_in_the_middle_of_an_epoch(tmp_path):
    """It replaces one that has died: the numbers are those of one process."""
    script = tmp_path / "script.py"
    script.write_text(GROWS)
    env = launch.environment(forked=True, PYTHONHASHSEED="0")
    stock_code, stock = launch.run([sys.executable, str(script)], env, 120, tmp_path)
    assert stock_code == 0, stock
    command = [*LAUNCHER, "-np", "2", "--min-np", "1", "--max-np", "2", "--keras"]
    code, printed = launch.run([*command, str(script)], env, 200, tmp_path)
    assert code == 0, printed
    assert "rank 1 of 2 died; 1 rank continues from step 9 " in printed, printed
    assert re.search("1 joined; 2 ranks continue from step ", printed), printed
    wanted, found = (json.loads(p.split("RESULT ")[1]) for p in (stock, printed))
    close(found, wanted)


@pytest.mark.matrix
def test_rank_zero_leaves(stock, tmp_path):
    command = [*LAUNCHER, "-np", "3", "--min-np", "1", "--keras", SCRIPT]
    variables = launch.environment(DEATHS="leaves24:0")
    code, printed = launch.run(command, variables, 120, tmp_path)
    assert code == 0 and "rank 0 of 3 left; 2 ranks continue from step 2" in printed
    assert len(re.findall("^RESULT of ", printed, re.M)) == 1, printed
    assert_same(tmp_path, stock)


WITH_MPI = f"""
import runpy, collective
from collective import backends
collective.distribute_keras("mpi", options=backends.Options(min_np=1))
runpy.run_path({SCRIPT!r}, run_name="__main__")
"""


@pytest.mark.matrix
def test_by_mpi(stock, tmp_path):
    if not processes.find_program("mpirun"):
        pytest.skip("there is no mpirun")
    command = [*launch.command("mpi", 3), "--with-ft", "ulfm", sys.executable]
    variables = launch.environment(DEATHS="step24:0,test3:1")
    code, printed = launch.run([*command, "-c", WITH_MPI], variables, 150, tmp_path)
    assert code == 0, printed
    assert "rank 0 of 3 died; 2 ranks continue from step 24 " in printed
    assert re.search("rank 0 of 2 died; 1 rank continues from step ", printed), printed
    assert_same(tmp_path, stock)


ENDS = """
import os, signal, keras, numpy as np
x = np.ones((16, 2))
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
def batches():
    for number in range(4):
        if number == 2 and os.environ["COLLECTIVE_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        yield x, x[:, :1]
try:
    model.evaluate(batches(), verbose=0)
except Exception:
    print("caught")
"""


@pytest.mark.matrix
@pytest.mark.parametrize(
    "ranks, least, expected, messages",
    [
        # Every rank holds the batch, so the step is repeated though nothing reads it again.
        (3, 1, 0, ["rank 1 of 3 died; 2 ranks continue from step "]),
        (
            2,
            2,
            1,
            ["of 2 ranks 1 is left, and --min-np is 2", "HINT: a smaller --min-np; "],
        ),
    ],
)
def test_a_rank_dies_in_a_generator(ranks, least, expected, messages, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ENDS)
    command = [*LAUNCHER, "-np", str(ranks), "--min-np", str(least), "--keras"]
    code, printed = launch.run(
        [*command, str(script)], launch.environment(), 60, tmp_path
    )
    assert code == expected and "caught" not in printed, printed
    assert all(message in printed for message in messages), printed
