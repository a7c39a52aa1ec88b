"""Sharded optimizer state: the same model, from a part of the memory on each rank.

Plain, this file starts itself on the ranks of a backend, which compare what they have
trained with what one process has; and it goes on from the checkpoint they leave.
"""

from __future__ import annotations

import os

import keras
import numpy as np
import pytest

from collective.backends import Options
from collective.backends.single import SingleBackend
from collective.environment import Environment
from collective.errors import UsageError
from collective.training import Checkpoint
from collective.training.prepared import get_partition
from tests import launch
from tests.training import cases, small
from tests.training.cases import CASES, differences

pytestmark = pytest.mark.usefixtures("clean_keras")
HERE = "tests/training/memory/test_sharding.py"
EARLY, ALL = 9, 14  # steps, in the second and in the third epoch


def constrained():
    """What acts on whole variables, and on the same way as one process has it."""
    constraint = keras.constraints.MaxNorm(0.5)
    layers = [
        keras.Input((cases.FEATURES,)),
        keras.layers.Dense(7, "tanh", kernel_constraint=constraint),
        keras.layers.Dense(cases.CLASSES),
    ]
    optimizer = keras.optimizers.AdamW(
        0.02,
        global_clipnorm=0.1,
        weight_decay=0.1,
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=4,
    )
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return cases.compiled(keras.Sequential(layers), optimizer)


def scaled_and_clipped():
    inner = keras.optimizers.Adam(0.01, clipnorm=0.05)
    return keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=1024.0, dynamic_growth_steps=8
    )


CHOSEN = [
    cases.Case("constrained", constrained, accumulate=2),
    cases.Case(
        "scaled-and-clipped",
        cases.mlp(scaled_and_clipped),
        cases.overflowing,
        rows=(10,),
    ),
    *(
        c
        for c in CASES
        if c.name in ("weighted-mean", "subclassed", "accumulate-empty-replica")
    ),
]


def trained(backend, folder, steps, **more):
    """Of a training that ends in a checkpoint: losses, and weights at the end."""
    result = small.train(
        backend,
        model=small.everything(),
        steps=steps,
        checkpoint=Checkpoint(folder, every=4, resume=True),
        **more,
    )
    return np.concatenate(
        [result.losses, *(np.ravel(v) for v in result.model.trainable_variables)]
    )


def assert_close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


if launch.launched():

    @pytest.fixture
    def backend(backends_by_name):
        return backends_by_name(os.environ[launch.BACKEND])

    @pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
    def test_trains_what_one_process_trains(case, backend, reference):
        got = cases.train(case, backend, "float64", shard=True)
        wanted = reference(case, "float64")
        if backend.rank:  # parts are gathered on rank 0
            wanted = {k: v for k, v in wanted.items() if k in got}
        assert differences(got, wanted, "float64") == []

    def test_keeps_its_shard(backend):
        spec = cases.spec_of(CHOSEN[0].batch(0))
        model = cases.built(CHOSEN[0].model, backend, spec, shard=True)
        shards = get_partition(model)
        for variable in model.optimizer.variables:
            whole = shards.shape_of(variable)
            if whole is not None:
                assert variable.shape == (-(-int(np.prod(whole)) // backend.size),)
        kept = [v for v in model.optimizer.variables if shards.shape_of(v)]
        assert len(kept) == 3 * len(model.trainable_variables)

    def test_checkpoints_are_whole(backend, reference):
        keras.config.set_floatx("float64")
        more = {"shard_optimizer": True}
        got = trained(backend, reference.folder / "by-one", ALL, **more)
        assert_close(got, np.load(reference.folder / "by-one.npy"))
        trained(backend, reference.folder / f"by-{backend.name}", EARLY, **more)


@pytest.mark.launches
@pytest.mark.parametrize(
    "name, ranks",
    [
        ("native", 2),
        *(
            pytest.param(name, ranks, marks=pytest.mark.matrix)
            for name in ("native", "mpi", "tf-multiworker")
            for ranks in (2, 3, 4)
            if (name, ranks) != ("native", 2)
        ),
    ],
)
def test_on_ranks(name, ranks, reference, tmp_path, backends_by_name):
    pytest.importorskip("mpi4py")
    for case in CHOSEN:
        reference(case, "float64")
    for file in reference.folder.glob("*.npz"):
        (tmp_path / file.name).symlink_to(file)
    keras.config.set_floatx("float64")
    single = backends_by_name("single")
    trained(single, tmp_path / "by-one", EARLY)
    wanted = trained(single, tmp_path / "wanted", ALL)
    np.save(tmp_path / "by-one.npy", wanted)
    ended = launch.launch(name, ranks, [HERE], tmp_path, seconds=280)
    assert ended.passed() == len(CHOSEN) + 2 + len(REFUSED)
    assert_close(trained(single, tmp_path / f"by-{name}", ALL), wanted)


class Several(SingleBackend):
    """Two replicas in one process."""

    def __init__(self):
        super().__init__(Options(), Environment())
        self.replicas, self.local_replicas = 2, range(2)


def alone():
    return SingleBackend(Options(), Environment())


REFUSED = {
    "replicas in one process": (Several, keras.optimizers.Adam),
    "treat each element": (alone, keras.optimizers.Lamb),
    "built with whole": (alone, keras.optimizers.Adam),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refuses_what_cannot_be_sharded(message):
    make_backend, optimizer = REFUSED[message]
    model = small.model(optimizer)()
    if message == "built with whole":
        model.optimizer.build(model.trainable_variables)
    with pytest.raises(UsageError, match=message) as caught:
        small.train(make_backend(), model=model, shard_optimizer=True)
    assert caught.value.exit_code == 2
