"""An unedited script on several ranks has the results of ``python script.py``."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from collective.launch import processes
from tests import launch

pytestmark = pytest.mark.launches
SCRIPT = str(Path(__file__).with_name("unedited_script.py"))
KERAS = [sys.executable, "-m", "collective.launch", "-np", "2", "--keras"]
DISTRIBUTE = [sys.executable, "-m", "collective.distribute"]


def result(printed: str) -> dict:
    lines = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, printed
    return json.loads(lines[0].removeprefix("RESULT "))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


@pytest.fixture(scope="session")
def stock(once):
    """Run the script with Python alone; return its files and its result."""

    def train(made: Path) -> None:
        (made / "files").mkdir()
        command = [sys.executable, SCRIPT, str(made / "files")]
        code, printed = launch.run(
            command, launch.environment(forked=True, PYTHONHASHSEED="0"), 120
        )
        assert code == 0, printed
        (made / "printed").write_text(printed)

    made = once("unedited", train)
    return made / "files", result((made / "printed").read_text())


LINES = {
    "collectiverun --keras": KERAS,
    "one process": DISTRIBUTE,
    "tf-mirrored": [*DISTRIBUTE, "--backend", "tf-mirrored", "--devices", "2"],
    "mpirun": [*launch.command("mpi", 2), *DISTRIBUTE, "--backend", "mpi"],
}

_QUICK = ("collectiverun --keras", "tf-mirrored")


@launch.NEEDS_CORE
@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=[] if line in _QUICK else pytest.mark.matrix)
        for line in LINES
    ],
)
def test_it_trains_what_python_trains(line, stock, tmp_path):
    if "mpirun" in LINES[line][0] and not processes.find_program("mpirun"):
        pytest.skip("there is no mpirun")
    folder, wanted = stock
    code, printed = launch.run(
        [*LINES[line], SCRIPT, str(tmp_path)],
        launch.environment(forked=True, PYTHONHASHSEED="0"),
        200,
    )
    assert code == 0, printed
    found = result(printed)  # printed once
    assert re.findall("^done$", printed, re.M) == ["done"]
    assert "\x1b" not in printed and "not distributed" not in printed
    assert list(found) == list(wanted) == ["sequential", "functional", "Net"]
    for name, one in found.items():
        for part in ("history", "again"):
            for key, values in wanted[name][part].items():
                assert one[part][key] == pytest.approx(values, rel=2e-6), (name, key)
        assert one["epoch"] == wanted[name]["epoch"] and one["best"]
        assert one["evaluated"] == pytest.approx(wanted[name]["evaluated"], rel=2e-6)
        for part in ("predicted", "weights"):
            for mine, theirs in zip(one[part], wanted[name][part], strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=2e-6)
    # Rank 0 writes every file once, a callback's file, too.
    assert files(tmp_path) == files(folder)
    assert (tmp_path / "epochs.txt").read_text() == (folder / "epochs.txt").read_text()


LOADS = """
import sys, keras, numpy as np
model = keras.models.load_model(sys.argv[1])
assert type(model) is keras.Sequential and "collective" not in sys.modules
print(model.predict(np.full((1, 6), 0.5), verbose=0).shape)
"""


def run(program: str, tmp_path: Path, line: list[str], *arguments: str, **variables):
    script = tmp_path / "script.py"
    script.write_text(program)
    return launch.run(
        [*line, str(script), *arguments],
        launch.environment(**variables),
        120,
    )


SAVES = """
import os, sys, tempfile, numpy as np, keras, tensorflow as tf
from sklearn.model_selection import train_test_split
from collective.distribute import unedited as distribute
rank, folder = distribute._distribution.job.backend.rank, sys.argv[1]

# The precision is the script's, although collective was imported before it.
keras.config.set_floatx("float64")
assert keras.layers.Dense(1).dtype == "float64"

# No seed in the script: the ranks have the same numbers all the same.
x = np.random.default_rng().normal(size=(64, 6))
x, test = train_test_split(x)
order = list({"a", "b", "c", "d"})
drawn = [np.random.rand(), __import__("random").random(), float(tf.random.uniform([]))]
with open(f"{folder}/drawn{rank}", "w") as file:
    print(x.tolist(), order, drawn, file=file)

strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(x, x[:, :1], verbose=0)
model.train_on_batch(x, x[:, :1])

# What is saved is of batches that the ranks have compared, though not each at once.
for batch in (x, x + rank):
    model.train_on_batch(batch, x[:, :1])
try:
    model.save(f"{folder}/mixed.keras")
except ValueError as error:
    assert "the training rows are others on rank 1" in str(error)
else:
    raise AssertionError("a model of mixed rows was saved")
assert not os.path.exists(f"{folder}/mixed.keras")

# Rank 0 writes, and all read then; a path of one's own is written by each rank.
model.save(f"{folder}/model.keras")
assert os.path.exists(f"{folder}/model.keras")
keras.saving.save_model(model, f"{folder}/other.keras")
model.save_weights(f"{folder}/a.weights.h5")
os.replace(f"{folder}/a.weights.h5", f"{folder}/final.weights.h5")
model.fit(x, x[:, :1], verbose=0)
os.remove(f"{folder}/final.weights.h5")
model.export(f"{folder}/exported", verbose=False)
assert os.path.isdir(f"{folder}/exported")
with tempfile.TemporaryDirectory() as own:
    model.save(f"{own}/mine.keras")
    assert os.listdir(own) == ["mine.keras"]
try:
    model.save(f"{folder}/none/model.keras")
except OSError as error:
    print("caught", flush=True)
else:
    raise AssertionError("a save that failed on rank 0 is not an error here")

# Rank 0 decides, whatever the functions of the script say, and whoever has a callback.
plain = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
plain.compile("sgd", "mse")
given = [keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + rank))]
rates = plain.fit(x, x[:, :1], epochs=2, callbacks=given).history["learning_rate"]
assert np.allclose(rates, 0.1), rates
stops = keras.callbacks.EarlyStopping("loss", patience=0, mode="max")
hook = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)
for own in [stops] * rank, [hook] * (1 - rank):
    assert len(plain.fit(x, x[:, :1], epochs=4, verbose=0, callbacks=own).epoch) == 4
path = keras.utils.get_file("t.txt", origin=f"file://{__file__}", cache_dir=folder)
assert open(path).read() == open(__file__).read()
print("end", flush=True)
"""


@launch.NEEDS_CORE
def test_files_random_numbers_and_callbacks(tmp_path):
    code, printed = run(SAVES, tmp_path, [*KERAS, "--output", "all"], str(tmp_path))
    assert code == 0, printed
    assert printed.count("[0] end") == printed.count("[1] end") == 1, printed
    assert printed.count("] caught") == 2
    assert "is not distributed" not in printed
    drawn = [(tmp_path / f"drawn{rank}").read_text() for rank in range(2)]
    assert drawn[0] == drawn[1] and len(drawn[0]) > 1000
    program = tmp_path / "loads.py"
    program.write_text(LOADS)
    command = [sys.executable, str(program), str(tmp_path / "model.keras")]
    code, printed = launch.run(command, launch.environment(), 60)
    assert code == 0 and "(1, 1)" in printed, printed


FAILS = """
import sys, keras
from collective.distribute import unedited as distribute
job = distribute._distribution.job
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
def inner():
    raise ValueError("of the script")
how = sys.argv[1]
if how == "raise":
    inner()
if how == "exit":
    sys.exit(7)
if how == "alone" and job.backend.rank == 1:
    sys.exit("of rank 1")
if how == "usage":
    model.fit([[1.0, 2.0]], [[1.0]])
if how in ("alone", "apart"):
    model.compile("sgd", "mse")
    if how == "apart" and job.backend.rank == 0:
        model.save(sys.argv[2])
    model.fit([[1.0, 2.0]], [[1.0]], verbose=0)
"""


@launch.NEEDS_CORE
@pytest.mark.parametrize(
    "how",
    [
        *("raise", "alone", "apart"),
        *(
            pytest.param(how, marks=pytest.mark.matrix)
            for how in ("exit", "usage", "none")
        ),
    ],
)
def test_a_script_that_fails_ends_the_job(how, tmp_path):
    arguments = how, str(tmp_path / "m.keras")
    code, printed = run(
        FAILS, tmp_path, KERAS, *arguments, forked=True, PYTHONHASHSEED="0"
    )
    errors = "".join(
        line[4:] + "\n"
        for line in printed.splitlines()
        if line.startswith(("[0]", "[1]"))
    )
    own = str(tmp_path / "script.py")
    if how == "none":
        assert code == 0 and "called no fit, evaluate or predict" in errors, printed
        return
    if how == "alone":  # rank 0 waits in fit
        assert code == 1 and "[1] of rank 1" in printed, printed
        return
    if how == "exit":
        assert code == 7 and "Traceback" not in printed, printed
        return
    assert code == 1, printed  # as by plain Python
    if how == "apart":
        assert "rank 1 is in Model.fit, and rank 0 in a save" in errors, printed
        return
    # The output has each line of the script once, and only those.
    assert errors.count("Traceback") == 1, printed
    shown = re.findall(r'^  File "(.*?)", line', errors, re.M)
    assert shown == [own] * (2 if how == "raise" else 1), printed
    last = {"raise": "ValueError: of the script", "usage": "call `compile()`"}[how]
    assert last in errors and "died" not in printed, printed


@launch.NEEDS_CORE
@pytest.mark.skipif(not shutil.which("script"), reason="there is no script(1)")
def test_a_bar_is_drawn_on_a_terminal(tmp_path):
    program = tmp_path / "short.py"
    program.write_text(
        "import keras\nimport numpy as np\n"
        "m = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "m.compile('sgd', 'mse')\n"
        "m.fit(np.ones((64, 2)), np.ones((64, 1)), batch_size=8)\n"
    )
    line = " ".join([*KERAS, str(program)])
    shown = launch.capture(
        ["script", "-qec", line, os.devnull], 120, stdin=subprocess.DEVNULL
    )
    assert shown.returncode == 0, shown.stdout
    assert "\x1b[32m━" in shown.stdout and "8/8" in shown.stdout
