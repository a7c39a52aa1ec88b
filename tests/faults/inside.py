"""What a fault does inside the ranks: a model and data with places to strike at.

    FAULT="kill forward 0,1 5" FAULT_FOLDER=... python train.py \\
        --model tests.faults.inside:model --data tests.faults.inside:rows

FAULT is a deed, a place, the ranks it strikes and the step. Without it the training is
undisturbed. What was struck, when and which process it was is left in the folder.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import collective
from collective import session
from collective.environment import detect
from collective.errors import CollectiveError
from collective.training.input.arrays import Arrays
from tests.faults import clock

ROWS, FEATURES, CLASSES = 53, 6, 3
FOLDER = Path(os.environ.get("FAULT_FOLDER", "."))
FIRST_CHECKPOINT = 3  # the step that it precedes
WRITING = "writing"  # the file that shows that a checkpoint is being written
PACE_SECONDS = float(os.environ.get("FAULT_PACE", "0"))  # that a step takes longer
HELD_SECONDS = 1.0
MUCH = 1 << 27  # numbers of 8 bytes
WAITS_SECONDS = 300.0  # a newcomer imports TensorFlow


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _lack_memory() -> None:
    """From now on this process gets next to no memory."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (32 << 20), resource.RLIM_INFINITY))


def _ask_for_memory() -> None:
    _lack_memory()
    np.ones(MUCH)


def _have_tensorflow_ask() -> int:
    _lack_memory()
    return MUCH


def _wait_for_newcomer() -> None:
    """On rank 0: until somebody waits to come in."""
    deadline = time.monotonic() + WAITS_SECONDS
    while not session.waiting() and time.monotonic() < deadline:
        time.sleep(0.01)


def _raise() -> None:
    raise RuntimeError("made to fail")


def _sleep() -> None:
    time.sleep(float(os.environ["FAULT_SECONDS"]))


def _hold_lock() -> None:
    """Keeps Python's lock, as an extension that never returns does."""
    ctypes.PyDLL(None).sleep(int(os.environ["FAULT_SECONDS"]))


def _abort() -> None:
    """As a library of the user that gives MPI up."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(3)


def _start_daemon() -> None:
    """Starts a process that leaves this one's group and parent, and does not end."""
    subprocess.run(["setsid", "sh", "-c", "sleep 1000000 &"], check=True)


def _fork() -> None:
    """Has a child call a collective, which must be refused."""
    child = os.fork()
    if child == 0:
        try:
            collective.allreduce(np.ones(3))
        except CollectiveError:
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0, "the child took part"


DEEDS: dict[str, Callable[[], int | None]] = {
    "kill": _kill,
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "leave": lambda: os._exit(0),
    "raise": _raise,
    "sleep": _sleep,
    "wait-for-newcomer": _wait_for_newcomer,
    "ask-for-memory": _ask_for_memory,
    "grow": _have_tensorflow_ask,
    "jump": lambda: clock.set_ahead(FOLDER, int(os.environ["FAULT_SECONDS"])),
    "fork": _fork,
    "daemon": _start_daemon,
    "hold-lock": _hold_lock,
    "abort": _abort,
    "print": lambda: print("x" * 5_000_000),
    "report": lambda: None,  # the test strikes from without, as soon as it is reported
}


class Fault:
    """The fault of this process, if there is one, and the steps of each place."""

    def __init__(self) -> None:
        deed, place, ranks, step = (
            os.environ.get("FAULT") or "report none - -1"
        ).split()
        self.place, self.step = place, int(step)
        self.deed = DEEDS[deed]
        self.rank = detect().rank
        self.strikes_here = str(self.rank) in ranks.split(",")
        self.counts: dict[str, int] = {}

    def at(self, place: str) -> int | None:
        """Called at each place in each step; what the deed returns."""
        step = self.counts[place] = self.counts.get(place, -1) + 1
        if place == "forward":
            time.sleep(PACE_SECONDS)
        if place == "forward" and self.place == "all-reduce" and step == self.step:
            self._meet_in_all_reduce()
        elif place == "forward" and self.place == "checkpoint" and self.rank:
            if self.strikes_here and step == self.step:
                _wait_for(FOLDER / WRITING)
                self.strike()
        elif place == self.place and self.strikes_here and step == self.step:
            if step >= FIRST_CHECKPOINT and (FOLDER / "runs").is_dir():
                _wait_for_one_of(FOLDER / "runs", "step-*")  # written beside the steps
            return self.strike()
        return None

    def _meet_in_all_reduce(self) -> None:
        """Whom it strikes goes ahead, and is struck while it waits for the others."""
        if self.strikes_here:
            threading.Timer(HELD_SECONDS / 2, self.strike).start()
        else:
            time.sleep(HELD_SECONDS)

    def writing(self) -> None:
        """Called in the middle of the writing of a checkpoint, on rank 0."""
        if self.place != "checkpoint":
            return
        (FOLDER / WRITING).touch()
        if self.strikes_here:
            self.strike()
        else:
            time.sleep(HELD_SECONDS)  # another rank is struck meanwhile

    def strike(self) -> int | None:
        self.note()
        return self.deed()

    def note(self) -> None:
        """Leaves word that it strikes now, and which process."""
        note = FOLDER / f"struck-{self.rank}"
        note.with_suffix(".part").write_text(f"{time.monotonic()} {os.getpid()}")
        note.with_suffix(".part").rename(note)


def _wait_for(file: Path) -> None:
    deadline = time.monotonic() + WAITS_SECONDS
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.005)


def _wait_for_one_of(folder: Path, names: str) -> None:
    deadline = time.monotonic() + WAITS_SECONDS
    while not any(folder.glob(names)) and time.monotonic() < deadline:
        time.sleep(0.005)


# Called for, so that what differs between ranks is no value that the model's code holds:
# ranks compare their models before they train.
@functools.cache
def fault() -> Fault:
    """Of this process."""
    return Fault()


fault()  # before there are threads that might make one each


def passing(place: str) -> tf.Operation:
    """An operation at which the fault is given its chance."""

    def call() -> None:
        fault().at(place)

    return tf.numpy_function(call, [], [])


@keras.saving.register_keras_serializable("faults")
class Place(keras.layers.Layer):
    """Passes its input on, by way of the place."""

    def call(self, x: Any) -> Any:
        with tf.control_dependencies([passing("forward")]):
            return tf.identity(x)


class Growing(keras.layers.Layer):
    """A place at which TensorFlow may have to ask for much memory."""

    def call(self, x: Any) -> Any:
        def call() -> np.int64:
            return np.int64(fault().at("forward") or 1)

        size = tf.numpy_function(call, [], tf.int64)
        return x + tf.cast(tf.reduce_sum(tf.zeros([size], tf.float64)), x.dtype)


class Written(keras.layers.Dense):
    """A layer that knows when it is saved."""

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)
        fault().writing()


class Adam(keras.optimizers.Adam):
    """With a place just before the update."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        with tf.control_dependencies([passing("update")]):
            grads = [tf.identity(g) for g in grads]
        super().apply(grads, trainable_variables)


class Flips(Adam):
    """On the last rank, a bit of one weight flips after the fifth update."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply(grads, trainable_variables)
        if fault().rank == 0:
            return
        weight = trainable_variables[0].value

        def flip(value: np.ndarray, update: np.int64) -> np.ndarray:
            if update == 5:
                fault().note()
                value.reshape(-1).view(np.uint32)[0] ^= 1
            return value

        weight.assign(tf.numpy_function(flip, [weight, self.iterations], weight.dtype))


def model(
    input_shape: tuple[int, ...],
    classes: int | None,
    optimizer: type = Adam,
    place: type = Place,
) -> keras.Model:
    """A small network, compiled."""
    layers = [
        keras.Input(input_shape),
        place(),
        Written(8, activation="tanh"),
        keras.layers.Dense(classes or CLASSES),
    ]
    made = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(optimizer(0.02), loss, metrics=["accuracy"])
    return made


def flipping(input_shape: tuple[int, ...], classes: int) -> keras.Model:
    """``model`` with a bit that flips."""
    return model(input_shape, classes, Flips)


def growing(input_shape: tuple[int, ...], classes: int) -> keras.Model:
    """``model`` that may ask for much memory."""
    return model(input_shape, classes, place=Growing)


def _arrays() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(ROWS, FEATURES)).astype(keras.config.floatx())
    return x, np.argmax(x[:, :CLASSES], axis=1).astype("int32")


class Rows(Arrays):
    """Arrays with a place in each reading."""

    def read(self, rows: tf.Tensor) -> Any:
        with tf.control_dependencies([passing("input")]):
            return super().read(tf.identity(rows))


def rows() -> Rows:
    """Random rows with labels that can be learned."""
    return Rows(*_arrays())


def not_a_number() -> tuple[np.ndarray, np.ndarray]:
    """One row is not a number, so one rank alone meets it."""
    x, y = _arrays()
    x[37, 2] = np.nan
    return x, y


def fewer() -> tuple[np.ndarray, np.ndarray]:
    """Rank 1 has fewer rows than the others."""
    x, y = _arrays()
    there = 30 if fault().rank else ROWS
    return x[:there], y[:there]


def ends_early() -> tf.data.Dataset:
    """Rank 1 has fewer rows than it says that it has."""
    dataset = tf.data.Dataset.from_tensor_slices(fewer())
    return dataset.apply(tf.data.experimental.assert_cardinality(ROWS))
