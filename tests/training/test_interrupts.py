"""Ctrl-C in a training acts between steps, without a dump; a second one acts at once."""

from __future__ import annotations

import os
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
        env=launch.environment(COLLECTIVE_RECORDER="", TF_CPP_MIN_LOG_LEVEL="2"),
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
    assert int(made.optimizer.iterations) == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    collective.fit(made, *rows(), **words)  # the signal is forgotten


def test_a_second_one_ends_at_once(tmp_path):
    ended = run(tmp_path, 1, "2", "self")
    assert ended.returncode == 130 and ended.stdout == "went on\n"
    assert "Traceback" not in ended.stderr, ended.stderr


@pytest.mark.launches
@launch.NEEDS_CORE
def test_of_a_job(tmp_path):
    ended = run(tmp_path, 2, "1", "launcher")
    said = ended.stderr.splitlines()
    assert ended.returncode == 130 and said[-1] == "collective.launch: interrupted"
    assert "Traceback" not in ended.stderr and "flight recorder" not in ended.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["script.py"]


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
    pid = next(line for line in lines if "rank 1 is process" in line).split()[5]
    while "tensorflow" not in Path(f"/proc/{pid}/maps").read_text():
        time.sleep(0.01)
    started.send_signal(signal.SIGINT)
    said = [line for line in lines if " ended " not in line]
    assert started.wait() == 130 and said == ["collective.launch: interrupted\n"]
