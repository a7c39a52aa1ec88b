"""Ctrl-C in a training acts between steps, and can be caught; a second one acts at once."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import pytest

import collective
from tests import launch
from tests.training.small import model, rows

CALLS = ("fit", "eager", "evaluate", "predict")
SCRIPT = """
import os, signal, sys, keras, numpy as np
times, target = int(sys.argv[1]), os.getpid() if sys.argv[2] == "self" else os.getppid()

class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs):
        for _ in range(times if batch == 1 else 0):
            os.kill(target, signal.SIGINT)
        if times > 1:
            print("went on")

model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((80, 2))
model.fit(x, x[:, :1], 8, epochs=10**6, verbose=0, callbacks=[Interrupt()])
"""


def run(folder: Path, ranks: int, *arguments: str) -> subprocess.CompletedProcess:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    start = [*launch.command("native", ranks), "--keras"]
    if ranks == 1:
        start = [sys.executable, "-m", "collective.distribute"]
    return subprocess.run(
        [*start, str(script), *arguments],
        cwd=folder,
        env=launch.environment(forked=ranks > 1, COLLECTIVE_RECORDER=""),
        capture_output=True,
        text=True,
    )


@pytest.fixture
def as_python_does():
    """Restore Python's handler, because a launcher in this process has left its own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_it_is_raised_when_a_step_has_ended(as_python_does):
    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:
                os.kill(os.getpid(), signal.SIGINT)

    made = model()()
    words = {"batch_size": 10, "verbose": 0, "backend": "single"}
    with pytest.raises(KeyboardInterrupt):
        collective.fit(made, *rows(), **words, callbacks=Interrupt())
    assert int(made.optimizer.iterations) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    collective.fit(made, *rows(), **words)  # the signal is forgotten


CAUGHT = """
import os, signal, sys, time, keras, numpy as np

rank, launcher = int(os.environ["COLLECTIVE_RANK"]), int(os.environ["LAUNCHER"])
keras.utils.set_random_seed(1)

class Interrupt(keras.callbacks.Callback):
    def __init__(self, of, batch):
        super().__init__()
        self.of, self.at = of, batch

    def hit(self, batch, logs=None):
        if batch == self.at and rank == self.of:
            os.kill(os.getpid(), signal.SIGINT)
        if batch == self.at and self.of == "launcher" and rank == 0:
            os.kill(launcher, signal.SIGINT)
            time.sleep(0.5)  # until it has come to the ranks

    on_train_batch_end = on_test_batch_end = on_predict_batch_end = hit

def model(**more):
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse", **more)
    return made

if "mesh" in sys.argv:  # each rank has half of the kernel
    names = keras.distribution
    mesh = names.DeviceMesh((1, 2), ("batch", "model"), names.list_devices())
    layouts = names.LayoutMap(mesh)
    layouts[".*kernel"] = ("model", None)
    names.set_distribution(names.ModelParallel(layout_map=layouts))
x = np.arange(160.0).reshape(80, 2) / 160
y = x[:, :1]
for call, of, batch in (
    ("fit", 1, 3), ("fit", 0, 9), ("eager", 1, 3), ("evaluate", 0, 3), ("predict", 1, 0)
):
    if "mesh" in sys.argv and (call, of) != ("fit", 1):
        continue
    made = model(run_eagerly=call == "eager")
    words = {"verbose": 0, "callbacks": [Interrupt(of, batch)]}
    try:
        if call in ("fit", "eager"):
            made.fit(x, y, 8, epochs=3, **words)
        elif call == "evaluate":
            made.evaluate(x, y, 8, **words)
        else:
            made.predict(x, 2, **words)
        print("no interrupt")
    except KeyboardInterrupt:
        made.save(f"{call}.keras")
    same = keras.saving.load_model(f"{call}.keras").evaluate(x, y, verbose=0)
    assert np.isclose(made.evaluate(x, y, verbose=0), same)
    print(call, int(made.optimizer.iterations), flush=True)
try:
    model().fit(x, y, 8, verbose=0, callbacks=[Interrupt("launcher", 9)])
finally:
    time.sleep(0.2)
    print("finally", flush=True)
print("not reached")
"""


@pytest.mark.launches
@launch.NEEDS_CORE
@pytest.mark.parametrize("words", [[], ["mesh"]], ids=["rows", "mesh"])
def test_a_script_catches_it_on_every_rank_between_the_same_steps(tmp_path, words):
    """The script goes on as plain Python does; what it does not catch ends the job."""
    (tmp_path / "script.py").write_text(CAUGHT)
    start = [*launch.command("native", 2), "--keras", "script.py", *words]
    # The shell becomes the launcher, whose number the ranks get so.
    shell = ["sh", "-c", 'LAUNCHER=$$ exec "$@"', "sh"]
    ended = subprocess.run(
        [*shell, *start],
        cwd=tmp_path,
        env=launch.environment(forked=True, COLLECTIVE_RECORDER=""),
        capture_output=True,
        text=True,
        timeout=300,
    )
    others = ["fit 11", "eager 5", "evaluate 0", "predict 0"]
    said = ended.stdout.splitlines()
    assert said == ["fit 5", *([] if words else others), "finally"], ended
    assert ended.returncode == 130
    assert ended.stderr.count("KeyboardInterrupt") == 1, ended.stderr
    assert ended.stderr.endswith("collective.launch: interrupted\n"), ended.stderr
    names = {file.name for file in tmp_path.iterdir()}
    calls = CALLS[:1] if words else CALLS
    assert names == {"script.py", *(f"{call}.keras" for call in calls)}


@pytest.mark.launches
@launch.NEEDS_CORE
def test_a_second_one_ends_at_once(tmp_path):
    ended = run(tmp_path, 2, "2", "self")
    assert ended.returncode == 130 and ended.stdout == "went on\n"
    assert "Traceback" not in ended.stderr, ended.stderr


@pytest.mark.launches
@launch.NEEDS_CORE
def test_of_one_process_it_is_as_with_python(tmp_path):
    ended = run(tmp_path, 1, "1", "self")
    assert ended.returncode == 130
    assert ended.stderr.splitlines()[-1] == "KeyboardInterrupt", ended.stderr


@pytest.mark.launches
@launch.NEEDS_CORE
def test_while_modules_are_imported_it_is_one_line(tmp_path):
    (tmp_path / "script.py").write_text("import keras\n")
    start = [*launch.command("native", 2), "--verbose", "--keras", "script.py"]
    started = subprocess.Popen(
        start,
        cwd=tmp_path,
        env=launch.environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stderr is not None
    lines = iter(started.stderr.readline, "")
    named = (line for line in lines if re.search(r"rank \d is process", line))
    for pid in [line.split()[5] for line in itertools.islice(named, 2)]:
        # Before it, Python itself may still start, whose own traceback is none of ours.
        while "tensorflow" not in Path(f"/proc/{pid}/maps").read_text():
            time.sleep(0.01)
    started.send_signal(signal.SIGINT)
    # TensorFlow may have logged before the signal came.
    logged = re.compile(r" ended |^\[\S+\] (WARNING: All log messages|[IWE]\d{4} )")
    said = [line for line in lines if not logged.search(line)]
    assert started.wait() == 130 and said == ["collective.launch: interrupted\n"]
