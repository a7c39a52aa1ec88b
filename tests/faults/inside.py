"""Injects faults inside ranks: a model and data with places for faults.

    FAULT="kill forward 0,1 5" FAULT_FOLDER=... python train.py \\
        --model tests.faults.inside:model --data tests.faults.inside:rows

FAULT is an action, a place, the affected ranks and the step. Without it the training runs
undisturbed. A file in the folder records the place, the time and the process of the fault.
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
FIRST_CHECKPOINT = 3  # the step before which it is written
WRITING = "writing"  # the file that shows that a checkpoint is being written
PACE_SECONDS = float(os.environ.get("FAULT_PACE", "0"))  # added to each step
HELD_SECONDS = 1.0
MUCH = 1 << 27  # numbers of 8 bytes
WAITS_SECONDS = 300.0  # because a newcomer imports TensorFlow


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    """Stop this process before this thread does anything else.

    A signal to the process wakes another thread, and this one may end the step meanwhile.
    """
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def _lack_memory() -> None:
    """Limit this process to almost no further memory."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (32 << 20), resource.RLIM_INFINITY))


def _ask_for_memory() -> None:
    _lack_memory()
    np.ones(MUCH)


def _have_tensorflow_ask() -> int:
    _lack_memory()
    return MUCH


def _wait_for_newcomer() -> None:
    """Wait, on rank 0, until a process waits to join."""
    deadline = time.monotonic() + WAITS_SECONDS
    while not session.waiting() and time.monotonic() < deadline:
        time.sleep(0.01)


def _raise() -> None:
    raise RuntimeError("made to fail")


def _sleep() -> None:
    time.sleep(float(os.environ["FAULT_SECONDS"]))


def _hold_lock() -> None:
    """Keep Python's lock, like an extension that never returns."""
    ctypes.PyDLL(None).sleep(int(os.environ["FAULT_SECONDS"]))


def _abort() -> None:
    """Abort, like a user's library that gives MPI up."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(3)


def _start_daemon() -> None:
    """Start a process that leaves this one's group and parent, and does not end."""
    subprocess.run(["setsid", "sh", "-c", "sleep 1000000 &"], check=True)


def _fork() -> None:
    """Have a child call a collective, which must be refused."""
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
    "stop": _stop,
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
    "report": lambda: None,  # the test injects it from outside after the report
}


class Fault:
    """The fault of this process, if there is one, and a step counter for each place."""

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
        """Run the action if it is due here; called at each place in each step."""
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
                _wait_for_one_of(FOLDER / "runs", "step-*")  # another thread writes it
            return self.strike()
        return None

    def _meet_in_all_reduce(self) -> None:
        """Have the affected rank run ahead, and inject the fault while it waits."""
        if self.strikes_here:
            threading.Timer(HELD_SECONDS / 2, self.strike).start()
        else:
            time.sleep(HELD_SECONDS)

    def writing(self) -> None:
        """Inject the fault in the middle of writing a checkpoint, on rank 0."""
        if self.place != "checkpoint":
            return
        (FOLDER / WRITING).touch()
        if self.strikes_here:
            self.strike()
        else:
            time.sleep(HELD_SECONDS)  # the fault affects another rank in this time

    def strike(self) -> int | None:
        self.note()
        return self.deed()

    def note(self) -> None:
        """Record the present time and process of the fault in a file."""
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


# A function, so that the model's code holds no value that differs between ranks: ranks
# compare their models before they train.
@functools.cache
def fault() -> Fault:
    """Return the fault of this process."""
    return Fault()


fault()  # called before threads exist that might each make one


def passing(place: str) -> tf.Operation:
    """Return an operation at which the fault may happen."""

    def call() -> None:
        fault().at(place)

    return tf.numpy_function(call, [], [])


@keras.saving.register_keras_serializable("faults")
class Place(keras.layers.Layer):
    """Passes its input on through a place for faults."""

    def call(self, x: Any) -> Any:
        with tf.control_dependencies([passing("forward")]):
            return tf.identity(x)


class Growing(keras.layers.Layer):
    """A place at which TensorFlow may need much memory."""

    def call(self, x: Any) -> Any:
        def call(rows: np.int32) -> np.int64:
            return np.int64(fault().at("forward") or 1)

        # Of a stateful function, all ranks take the result of rank 0.
        size = tf.numpy_function(call, [tf.shape(x)[0]], tf.int64, stateful=False)
        return x + tf.cast(tf.reduce_sum(tf.zeros([size], tf.float64)), x.dtype)


class Written(keras.layers.Dense):
    """A layer that notices when it is saved."""

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)
        fault().writing()


class Adam(keras.optimizers.Adam):
    """Adam with a place just before the update."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        with tf.control_dependencies([passing("update")]):
            grads = [tf.identity(g) for g in grads]
        super().apply(grads, trainable_variables)


class Flips(Adam):
    """Flips a bit of one weight after the fifth update, on the last rank."""

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

        # Of a stateful function, all ranks would take the result of rank 0.
        inputs = [weight, self.iterations]
        weight.assign(tf.numpy_function(flip, inputs, weight.dtype, stateful=False))


def model(
    input_shape: tuple[int, ...],
    classes: int | None,
    optimizer: type = Adam,
    place: type = Place,
) -> keras.Model:
    """Return a small network, compiled."""
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
    """Return ``model`` with a bit that flips."""
    return model(input_shape, classes, Flips)


def growing(input_shape: tuple[int, ...], classes: int) -> keras.Model:
    """Return ``model``, which may need much memory."""
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
    """Return random rows with labels that can be learned."""
    return Rows(*_arrays())


def not_a_number() -> tuple[np.ndarray, np.ndarray]:
    """Return rows of which one is not a number, so only one rank meets it."""
    x, y = _arrays()
    x[37, 2] = np.nan
    return x, y


def fewer() -> tuple[np.ndarray, np.ndarray]:
    """Return rows; rank 1 has fewer than the others."""
    x, y = _arrays()
    there = 30 if fault().rank else ROWS
    return x[:there], y[:there]


def ends_early() -> tf.data.Dataset:
    """Return a data set; rank 1 has fewer rows than it announces."""
    dataset = tf.data.Dataset.from_tensor_slices(fewer())
    return dataset.apply(tf.data.experimental.assert_cardinality(ROWS))
