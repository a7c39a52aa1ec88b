"""Private files of ranks: the script's files are those of rank 0, whichever rank writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import launch

USES = """
import os, pathlib, shutil, sys
from collective.training.unedited.private_files import PrivateFiles

real = os.getcwd()
files = PrivateFiles()
there = pathlib.Path(real)
assert os.getcwd() != real and not files.has(os.path.join(real, "a.txt"))
assert open("a.txt").read() == "a" and open("../beside/b.txt").read() == "b"
assert sorted(os.listdir()) == ["a.txt", "c.txt", "d.txt", "sub", "tree"]

open("a.txt", "w").write("mine")
open("c.txt", "a").write("+")
open("sub/deep/new.txt", "x").write("new")
pathlib.Path("../beside/b.txt").write_text("mine")
os.makedirs("sub/made/more", exist_ok=True)
os.rename("d.txt", "e.txt")
open("e.txt", "r+").write("D")
shutil.rmtree("tree")
os.remove("sub/s.txt")
fd = os.open("raw", os.O_WRONLY | os.O_CREAT)
os.write(fd, b"raw")
os.close(fd)

assert open("a.txt").read() == "mine" and open("c.txt").read() == "c+"
assert open("e.txt").read() == "D" and not os.path.exists("d.txt")
assert open("sub/deep/old.txt").read() == "old"
assert not os.path.exists("tree") and not os.path.exists("sub/s.txt")
assert open("../beside/b.txt").read() == "mine"

(there / "later.txt").write_text("of rank 0")
(there / "sub" / "deep" / "later.txt").write_text("of rank 0")
assert not os.path.exists("later.txt")
files.refresh()
assert open("later.txt").read() == open("sub/deep/later.txt").read() == "of rank 0"
assert open("a.txt").read() == "mine" and not os.path.exists("tree")
assert not os.path.exists("d.txt") and not os.path.exists("sub/s.txt")
root = files.root
files.close()
assert os.getcwd() == real and not os.path.exists(root)
"""


BECOMES_RANK_ZERO = """
import os, pathlib
from collective.training.unedited.private_files import PrivateFiles

real = os.getcwd()
files = PrivateFiles()
there = pathlib.Path(real)
log = open("log.txt", "w")
log.write("written\\n")
log.flush()
log.write("buffered\\n")
open("a.txt", "w").write("whole")
open("only.txt", "w").write("of this rank")
os.makedirs("made/below")
os.chdir("made")
below = os.path.abspath("below")

(there / "log.txt").write_text("written\\n")
(there / "a.txt").write_text("ha")  # rank 0 died in the middle of it
assert files.hand_over() == [str(there / "a.txt")]
assert os.getcwd() == str(there / "made")
log.write("end\\n")
log.close()
open(os.path.join(below, "late.txt"), "w").write("late")
open("beside.txt", "w").write("real")
"""


def tree(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_the_real_files_stay_as_they_are(tmp_path):
    here, temporary = tmp_path / "work", tmp_path / "temporary"
    for name, text in {
        **{f"work/{n}.txt": n for n in "acd"},
        "work/sub/s.txt": "s",
        "work/sub/deep/old.txt": "old",
        "work/tree/t.txt": "t",
        "beside/b.txt": "b",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    temporary.mkdir()
    before = tree(tmp_path)
    environment = os.environ | {
        "PYTHONPATH": launch.PYTHONPATH,
        "TMPDIR": str(temporary),
    }
    done = subprocess.run(
        [sys.executable, "-c", USES], cwd=here, env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    later = {name: "of rank 0" for name in ("later.txt", "sub/deep/later.txt")}
    assert tree(tmp_path) == before | {f"work/{n}": text for n, text in later.items()}


SCRIPT = """
import keras, numpy as np, os, shutil, sys

tunes = sys.argv[1:] == ["tune"]
if tunes:
    import keras_tuner  # other ranks have private files from here on
rank = int(os.environ["COLLECTIVE_RANK"])
keras.utils.set_random_seed(1)
x = np.random.rand(16, 4).astype("float32")


def make(hp=None):
    width = hp.Int("width", 2, 8) if hp else 4
    model = keras.Sequential([keras.layers.Dense(width), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


with open("log.txt", "a") as file:  # one line, not one of each rank
    file.write("begins\\n")
shutil.rmtree("results", ignore_errors=True)
os.makedirs("results/deep")
model = make()
save = keras.callbacks.ModelCheckpoint("results/best.keras", monitor="loss")
model.fit(x, x[:, :1], verbose=0, callbacks=[save])
keras.saving.load_model("results/best.keras")
np.save("results/deep/x.npy", np.full(3, rank))
assert np.load("results/deep/x.npy")[0] == rank
os.remove("old.txt")
assert not os.path.exists("old.txt")
model.save("own.keras")
keras.saving.load_model("own.keras")

if tunes:
    for _ in range(2):
        tuner = keras_tuner.RandomSearch(
            make, "val_loss", 2, seed=1, directory="tuned", overwrite=True
        )
        data = {"validation_data": (x, x[:, :1])}
        tuner.search(x, x[:, :1], epochs=1, verbose=0, **data)
        best = tuner.get_best_models()[0]
    print("BEST", rank, best.evaluate(x, x[:, :1], verbose=0), file=sys.stderr)
"""


def run(tmp_path: Path, *arguments: str) -> str:
    here = tmp_path / "work"
    (here / "results").mkdir(parents=True)
    (here / "old.txt").write_text("old")
    (here / "results" / "old.txt").write_text("old")
    (here / "script.py").write_text(SCRIPT)
    start = [sys.executable, "-m", "collective.launch", "-np", "2", "--keras"]
    asked = [] if arguments else ["--private-files"]
    line = [*start, *asked, "script.py", *arguments]
    code, printed = launch.run(line, launch.environment(), 240, here)
    assert code == 0, printed
    assert (here / "log.txt").read_text() == "begins\n"
    assert not (here / "old.txt").exists()
    found = sorted(path.name for path in (here / "results").rglob("*"))
    assert found == ["best.keras", "deep", "x.npy"]
    return printed


@pytest.mark.launches
@launch.NOT_ON_RANKS
@launch.NEEDS_CORE
def test_a_script_leaves_the_files_of_rank_zero(tmp_path):
    run(tmp_path)


@pytest.mark.matrix
@launch.NOT_ON_RANKS
@launch.NEEDS_CORE
def test_keras_tuner_searches_one_folder_on_each_rank(tmp_path):
    pytest.importorskip("keras_tuner")
    printed = run(tmp_path, "tune")
    best = [line.split()[-1] for line in printed.splitlines() if "BEST" in line]
    assert len(best) == 2 and best[0] == best[1], printed


def test_a_rank_that_becomes_rank_zero_continues_with_the_real_files(tmp_path):
    command = [sys.executable, "-c", BECOMES_RANK_ZERO]
    ended = launch.capture(command, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert tree(tmp_path) == {
        "a.txt": "ha",
        "log.txt": "written\nbuffered\nend\n",
        "made/below/late.txt": "late",
        "made/beside.txt": "real",
        "only.txt": "of this rank",
    }
