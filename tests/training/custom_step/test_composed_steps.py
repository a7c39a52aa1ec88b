"""A ``train_step`` of the model's own beside options that change how a step computes.

Plain, this file trains in one process, and starts itself on 2 and 3 ranks.
"""

from __future__ import annotations

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


@ON_RANKS
@pytest.mark.parametrize("name", SHARDED)
def test_its_optimizer_is_sharded(name, backend):
    wanted, history = by_keras(PROGRAMS[name])
    result = train(backend, PROGRAMS[name], shard_optimizer=True)
    assert_as_keras(result, wanted, history)
    sizes = [int(np.prod(v.shape)) for v in result.model.optimizer._trainable_variables]
    whole = [int(np.prod(v.shape)) for v in result.model.trainable_variables]
    assert sizes == [-(-size // backend.replicas) for size in whole]


@ON_RANKS
def test_a_second_optimizer_is_not_sharded(backend):
    with pytest.raises(UsageError, match="which is not that of"):
        train(backend, PROGRAMS["gan"], shard_optimizer=True)


@pytest.mark.launches
@pytest.mark.parametrize(
    "name, ranks",
    [
        ("native", 2),
        pytest.param("native", 3, marks=pytest.mark.matrix),
        pytest.param("mpi", 2, marks=pytest.mark.matrix),
    ],
)
def test_composed_steps_on_ranks(name, ranks, tmp_path):
    ended = launch.launch(name, ranks, [HERE], tmp_path, seconds=420)
    assert ended.passed(skips=True) == len(SHARDED) + 1
