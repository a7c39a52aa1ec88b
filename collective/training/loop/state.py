"""The state of a training between two steps: taken, kept, sent, put back.

It has everything that the next step depends on, and nothing of the rank or backend: a
state taken on four replicas continues on three, or on another backend. The order of rows
and the masks depend on the number of the step alone.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.training import keras_compat
from collective.training.model.record import record_of
from collective.training.model.variables import all_variables, outside_seeds
from collective.training.process import host_random
from collective.training.process.object_collectives import broadcast_object, gather_few
from collective.training.sharding.held import own_value

Gathered = Mapping[int, np.ndarray]
"""What ranks have shards or shares of, whole on rank 0, by the ``id`` of the variable."""


@dataclass(frozen=True)
class State:
    """What a training is at the end of a step."""

    epoch: int  # the epoch to continue with, from 0
    # The step to continue with; steps count on over epochs. It is the first of the next
    # epoch, while ``epoch`` is still this one, if its validation and the callbacks of its
    # end are still to run.
    step: int
    # Values of ``all_variables(model)``: weights, layer state with seed generators,
    # optimizer.
    variables: Sequence[np.ndarray]
    # What the metrics of the epoch so far are made of (``Reports.last``); empty
    # between epochs.
    sums: np.ndarray = field(default_factory=lambda: np.zeros(0))
    # float64, of every step before this one.
    losses: np.ndarray = field(default_factory=lambda: np.zeros(0))
    # Logs of the epochs that have ended, by name.
    history: dict[str, list[Any]] = field(default_factory=dict)
    # Global generators, as ``random_state`` returns them.
    random: dict[str, np.ndarray] = field(default_factory=dict)
    stopped: bool = False  # whether a callback has ended the training
    # What a communication hook keeps between steps, by name
    # (``collective.training.compression.hook_state``).
    hook: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def within_epoch(self) -> bool:
        """Return whether steps of ``epoch`` have been made."""
        return self.sums.size > 0

    def put(self, model: keras.Model) -> None:
        """Give the model and global generators this state. Every rank calls it.

        Not Python's and NumPy's where data may draw from them: those before are read
        again, and draw what they drew.
        """
        for variable, value in zip(all_variables(model), self.variables, strict=True):
            variable.assign(value)
        if (hook := record_of(model).hook) is not None:
            hook.put(self.hook)
        _put_random_state(self.random, model)
        model.stop_training = self.stopped


def values_of(
    model: keras.Model,
    buffers: Sequence[np.ndarray] | None = None,
    gathered: Gathered | None = None,
) -> list[np.ndarray]:
    """Return the values of ``all_variables(model)`` now, for ``State.variables``.

    Without buffers, nothing is copied on a CPU: TensorFlow's tensors do not change, and
    a variable whose memory is held elsewhere gets other memory with its next update. That
    memory is new, and to allocate it takes three times as long as to copy: a caller that
    takes states repeatedly passes the arrays of an earlier one.

    Args:
        buffers: Arrays to copy the values into, from an earlier call.
        gathered: What ``Position.gather`` returned.

    Returns:
        The buffers; or arrays that must not be written to.
    """
    whole = gathered or {}
    values = [
        whole[id(v)] if id(v) in whole else np.asarray(own_value(v))
        for v in all_variables(model)
    ]
    if buffers is None:
        return values
    for buffer, value in zip(buffers, values, strict=True):
        np.copyto(buffer, value)
    return list(buffers)


def broadcast(state: State, backend: Backend, root: int = 0) -> State:
    """Return the root's state on every rank. Every rank calls it."""
    arrays, about = flatten(state)
    about = broadcast_object(backend, about, root)
    if backend.rank != root:
        arrays = [np.empty(s["shape"], s["dtype"]) for s in about["arrays"]]
    return unflatten([backend.broadcast_array(array, root) for array in arrays], about)


def newest(mine: State, backend: Backend) -> tuple[State, int]:
    """Return the newest of all ranks' states, and the lowest rank that had it."""
    places = gather_few(backend, [mine.epoch, mine.step])
    root = max(range(backend.size), key=lambda rank: (*places[rank], -rank))
    return broadcast(mine, backend, root), root


def flatten(state: State) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Return a state as arrays, ``variables`` first, and what JSON can hold.

    The dict describes the arrays, too, by name, shape and dtype.
    """
    named = {f"variable {i}": v for i, v in enumerate(state.variables)}
    named |= {"sums": state.sums, "losses": state.losses}
    named |= {f"random {name}": array for name, array in state.random.items()}
    named |= {f"hook {name}": array for name, array in state.hook.items()}
    about = {
        "epoch": state.epoch,
        "step": state.step,
        "stopped": state.stopped,
        "history": {
            name: [np.asarray(v).tolist() for v in values]
            for name, values in state.history.items()
        },
        "arrays": [
            {"name": name, "shape": list(array.shape), "dtype": array.dtype.name}
            for name, array in named.items()
        ],
    }
    return list(named.values()), about


def unflatten(arrays: Sequence[np.ndarray], about: dict[str, Any]) -> State:
    """Return the state of which ``flatten`` made this."""
    named = {s["name"]: a for s, a in zip(about["arrays"], arrays, strict=True)}
    return State(
        epoch=about["epoch"],
        step=about["step"],
        variables=[a for name, a in named.items() if name.startswith("variable ")],
        sums=named["sums"],
        losses=named["losses"],
        history={
            name: [v if isinstance(v, float) else np.array(v) for v in values]
            for name, values in about["history"].items()
        },
        random=_under("random ", named),
        stopped=about["stopped"],
        hook=_under("hook ", named),
    )


def _under(prefix: str, named: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        name.removeprefix(prefix): array
        for name, array in named.items()
        if name.startswith(prefix)
    }


def random_state(model: keras.Model) -> dict[str, np.ndarray]:
    """Return the states of the global generators, those of Python, NumPy and Keras.

    And of Keras' generators that the step asks and the model does not track.
    TensorFlow's own stateful generators cannot be read and are left alone.

    Returns:
        Integers, and floats for a half-used pair of normals.
    """
    _, words, spare = random.getstate()
    state = {
        "python": np.array(words, np.uint32),
        "python_spare": np.array([np.nan if spare is None else spare]),
    }
    kind, key, *rest = np.random.get_state()
    if kind == "MT19937":
        state["numpy"] = np.array(key, np.uint32)
        state["numpy_spare"] = np.array(rest, np.float64)
    if (seed := keras_compat.seeds.global_seed_state()) is not None:
        state["keras"] = np.array(seed)
    for i, variable in enumerate(outside_seeds(model)):
        state[f"seed {i}"] = np.asarray(variable.read_value())
    return state


def _put_random_state(state: dict[str, np.ndarray], model: keras.Model) -> None:
    if state and not host_random.is_read():
        _put_host_random(state)
    if "keras" in state:
        keras_compat.seeds.make_global_seed_state().assign(state["keras"])
    for i, variable in enumerate(outside_seeds(model)):
        if f"seed {i}" in state:
            variable.assign(state[f"seed {i}"])


def _put_host_random(state: dict[str, np.ndarray]) -> None:
    spare = float(state["python_spare"][0])
    words = tuple(int(word) for word in state["python"])
    random.setstate((3, words, None if np.isnan(spare) else spare))
    if "numpy" in state:
        place, has, value = state["numpy_spare"]
        np.random.set_state(("MT19937", state["numpy"], int(place), int(has), value))


def state_sha256(model: keras.Model, gathered: Gathered | None = None) -> str:
    """Return the digest of weights, layer state and optimizer state, in 64 hexadecimal digits.

    Of each variable, in the order of ``all_variables``: dtype, shape and bytes. Names do
    not count: Keras numbers them by how many layers a process has made. Seeds of random
    layers do not count: a training leaves them as they are, and ``model.save`` does not
    write those of every layer.

    Args:
        gathered: Whole variables of which ranks have shards. Without them, a rank's
            digest is that of its own shards.
    """
    digest = hashlib.sha256()
    values = values_of(model, gathered=gathered)
    for variable, value in zip(all_variables(model), values, strict=True):
        if keras_compat.seeds.is_seed_state(variable):
            continue
        about = f"{tf.as_dtype(value.dtype).name}{list(value.shape)};"
        digest.update(about.encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()
