"""Replicas that have become different: the report names them, the tensor and the step.

Plain, it runs on three devices of one process; ``test_fit`` starts it on ranks.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest

from collective.errors import CollectiveError
from collective.training.loop.position import Position
from collective.training.observers.desync import DesyncAlarm
from tests.training import cases
from tests.training.by_hand import Steps
from tests.training.small import NAMES

pytestmark = pytest.mark.usefixtures("clean_keras")
EVERY, FLIPPED_AFTER = 3, 4
CASE = cases.Case("desync", cases.mlp(cases.adam))


@pytest.fixture(params=[name for name in NAMES if name != "single"])
def backend(request, backends_by_name):
    return backends_by_name(request.param)


def flip(backend, variable: keras.Variable, bit: int, replica: int) -> None:
    """Flip a bit of the last number of a variable (float32), on one replica only."""
    copies = getattr(variable.value, "values", [variable.value])
    for copy, number in zip(copies, backend.local_replicas, strict=True):
        if number == replica:
            flat = copy.numpy()
            flat.reshape(-1).view(np.uint32)[-1] ^= 1 << bit
            copy.assign(flat)


def made(backend):
    spec = cases.spec_of(CASE.batch(0))
    model = cases.built(CASE.model, backend, spec)
    return model, Steps(model, backend)


def take(step, alarm, numbers) -> None:
    for number in numbers:
        alarm.before_input(number)
        step(cases.own_part(CASE.batch(number), alarm.backend))


def test_copies_in_one_process_are_rounded_alike(backends_by_name):
    backend = backends_by_name("tf-mirrored:2")
    model, step = made(backend)
    alarm = DesyncAlarm(Position(model, backend), EVERY)
    take(step, alarm, range(FLIPPED_AFTER))
    kernel = model.trainable_variables[-2]
    flip(backend, kernel, 0, 1)
    first, other = kernel.value.values
    assert np.any(first.numpy() != other.numpy())
    take(step, alarm, range(FLIPPED_AFTER, 7))
    np.testing.assert_array_equal(first.numpy(), other.numpy())


@pytest.mark.parametrize("pick", ["weight", "optimizer's state"])
def test_names_replica_tensor_and_step(pick, backend):
    model, step = made(backend)
    alarm = DesyncAlarm(Position(model, backend), EVERY)
    odd = backend.replicas - 1
    take(step, alarm, range(FLIPPED_AFTER))
    kernel = model.trainable_variables[-2]
    moment = next(v for v in model.optimizer.variables if "momentum" in v.name)
    # The lowest bit of the moment would disappear by rounding as it decays.
    # Copies of one process may differ by rounding.
    lowest = 0 if backend.size > 1 else 20
    variable, bit = (kernel, lowest) if pick == "weight" else (moment, 23)
    flip(backend, variable, bit, odd)
    take(step, alarm, range(FLIPPED_AFTER, 6))  # not checked, so all continues
    with pytest.raises(CollectiveError) as error:
        take(step, alarm, [6])
    kind = "rank" if backend.size > 1 else "replica"
    message = str(error.value)
    assert message.startswith(f"step 6: {kind} {odd} has other values in ")
    if pick == "weight":  # all ranks add the same to it, so no other tensor changes
        others = "the others." if backend.replicas > 2 else f"{kind} 0; there is no"
        assert f" in {kernel.path!r} than {others}" in message
    assert message.count("At step 3 all were the same.") == 1
    assert "\nHINT: " in message
    assert error.value.everywhere and error.value.exit_code == 1


class Four:
    """Stands for a backend of four ranks in the text of an error."""

    replicas = size = 4


@pytest.mark.parametrize("values, message", [
    ("aaba", "rank 2 has other values in 'b' than the others"),
    ("abab", "ranks 1 and 3 have other values in 'b' than rank 0; there is no majority"),
    ("abcd", "ranks 1, 2 and 3 have other values in 'b' than rank 0; there is no"),
    ("abbb", "rank 0 has other values in 'b' than the others"),
])  # fmt: skip
def test_the_majority_decides_who_is_odd(values, message):
    alarm = DesyncAlarm.__new__(DesyncAlarm)
    alarm.backend, alarm.every = Four(), 100
    rows = np.array([[ord(v)] * 8 for v in values], np.float32)
    of_tensors = np.stack([np.zeros_like(rows), rows, np.ones_like(rows)], axis=1)
    error = str(alarm._error(rows, of_tensors, ["a", "b", "c"], 200))
    assert error.startswith(f"step 200: {message}")
    assert "At step 100 all were the same" in error


def test_one_replica_has_nothing_to_compare(backends_by_name):
    if NAMES[0] != "single":
        pytest.skip("several ranks")
    assert not DesyncAlarm.is_needed(backends_by_name("single"), EVERY)
