"""A ``train_step`` of the model's own beside options that change how a step computes.

Plain, this file trains in one process, and starts itself on 2 and 3 ranks.
"""

from __future__ import annotations

import functools
import os

import numpy as np
import pytest

from collective.errors import UsageError
from tests import launch
from tests.training.custom_step.own_steps import PROGRAMS
from tests.training.custom_step.test_own_steps import assert_as_keras, by_keras, train

HERE = "tests/training/custom_step/test_composed_steps.py"
NAME = os.environ.get(launch.BACKEND, "single")
pytestmark = [pytest.mark.usefixtures("clean_keras"), pytest.mark.trains]
ON_RANKS = pytest.mark.skipif(not launch.launched(), reason="needs several ranks")
#: Those with one optimizer, that of ``model.compile``.
SHARDED = ["clips_itself", "of_keras_guide", "masks_and_weights"]


@pytest.fixture
def backend(backends_by_name):
    return backends_by_name(NAME)


@functools.cache
def of_keras(name):
    """As ``by_keras``, which trains each program once."""
    return by_keras(PROGRAMS[name])


@ON_RANKS
@pytest.mark.parametrize("name", SHARDED)
def test_its_optimizer_is_sharded(name, backend):
    wanted, history = of_keras(name)
    result = train(backend, PROGRAMS[name], shard_optimizer=True)
    assert_as_keras(result, wanted, history)
    sizes = [int(np.prod(v.shape)) for v in result.model.optimizer._trainable_variables]
    whole = [int(np.prod(v.shape)) for v in result.model.trainable_variables]
    assert sizes == [-(-size // backend.replicas) for size in whole]


@ON_RANKS
def test_a_second_optimizer_is_not_sharded(backend):
    with pytest.raises(UsageError, match="which is not that of"):
        train(backend, PROGRAMS["gan"], shard_optimizer=True)


#: With metrics, gradients that the step clips or scales, noise that is drawn by rows, state.
CUT = [
    "clips_itself",
    "of_keras_guide",
    "vae",
    "sum_by_hand",
    "loss_scaling",
    "moving_average",
]
PLAIN = pytest.mark.skipif(launch.launched(), reason="one process shows it")


@pytest.mark.parametrize("name", CUT)
def test_on_micro_batches_it_is_that_on_the_batch(name, backend):
    """Of three rows and more, or none: the last batch has two."""
    wanted, history = of_keras(name)
    result = train(backend, PROGRAMS[name], accumulate=3)
    assert_as_keras(result, wanted, history)


@pytest.mark.parametrize(
    "name, accumulate",
    [
        # In one process by turns: what a program adds, each of the two shows.
        pytest.param(
            name,
            accumulate,
            marks=[]
            if launch.launched() or number % 2 == accumulate % 2
            else pytest.mark.matrix,
        )
        for number, name in enumerate(CUT)
        for accumulate in (1, 2)
    ],
)
def test_on_virtual_replicas_it_is_that_on_the_batch(name, accumulate, backend):
    """Of which ranks hold one or more; some are without rows in the last batch."""
    wanted, history = of_keras(name)
    result = train(backend, PROGRAMS[name], virtual_replicas=5, accumulate=accumulate)
    assert_as_keras(result, wanted, history)


@PLAIN
@pytest.mark.parametrize(
    "name, words",
    [
        ("gan", "it (takes gradients after its update by|has two updates)"),
        ("masks_and_weights", "has a loss that is divided by weights"),
        ("own_metrics", "norm.* differs"),
    ],
)
@pytest.mark.parametrize("option", ["accumulate", "virtual_replicas"])
def test_what_cannot_be_cut_is_refused(name, words, option, backend):
    with pytest.raises(UsageError, match=words):
        train(backend, PROGRAMS[name], **{option: 2})


@pytest.mark.launches
def test_some_composed_steps_on_ranks(tmp_path):
    chosen = [HERE, "-k", "of_keras_guide"]
    ended = launch.launch("native", 2, chosen, tmp_path, seconds=420)
    assert ended.passed() == 4


@pytest.mark.launches
@pytest.mark.matrix
@pytest.mark.parametrize("name, ranks", [("native", 2), ("native", 3), ("mpi", 2)])
def test_composed_steps_on_ranks(name, ranks, tmp_path):
    ended = launch.launch(name, ranks, [HERE], tmp_path, seconds=600)
    assert ended.passed(skips=True) == len(SHARDED) + 1 + 3 * len(CUT)
