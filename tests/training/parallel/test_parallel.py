"""Layers in parts over ranks: the same model, from a part of the memory on each rank.

Plain, this file starts itself on ranks, which compare what groups of them have trained
with what one process has; and it goes on from the checkpoint they leave.
"""

from __future__ import annotations

import os
import sys

import keras
import numpy as np
import pytest

from collective import backends
from collective.backends.devices import local_devices
from collective.errors import CollectiveError, UsageError
from collective.training import Checkpoint
from collective.training.loop.callbacks import Hooks
from collective.training.prepared import get_partition
from collective.training.variants.parallel import (
    ColumnParallelDense,
    RowParallelDense,
    ShardedEmbedding,
)
from tests import launch
from tests.training import cases, small
from tests.training.cases import differences

pytestmark = pytest.mark.usefixtures("clean_keras")
HERE = "tests/training/parallel/test_parallel.py"
EARLY, ALL = 9, 14  # steps, in the second and in the third epoch
RANKS = int(os.environ.get("COLLECTIVE_TEST_RANKS", "2"))
GROUPS = [parts for parts in (2, 4) if RANKS % parts == 0]


def pair(units, **more):
    """A column-parallel layer, and a row-parallel one that takes what it makes."""
    return [
        ColumnParallelDense(units, activation="tanh", gather_output=False, **more),
        RowParallelDense(8, activation="tanh", input_is_parallel=True, **more),
    ]


def clipped():
    """All three layers, each way to join and split, and what looks at all weights."""
    layers = [
        keras.Input((cases.LENGTH,), dtype="int32"),
        ShardedEmbedding(cases.WORDS, 4),  # a number that no group divides
        keras.layers.Flatten(),
        *pair(16, kernel_regularizer=keras.regularizers.L2(0.01)),
        ColumnParallelDense(8, activation="softmax"),
        keras.layers.LayerNormalization(),
        RowParallelDense(cases.CLASSES),
    ]
    optimizer = keras.optimizers.AdamW(
        0.02, global_clipnorm=0.1, weight_decay=0.1, use_ema=True, ema_momentum=0.8
    )
    return cases.compiled(keras.Sequential(layers), optimizer)


def scaled():
    layers = [keras.Input((cases.FEATURES,)), *pair(8)]
    layers += [keras.layers.Dense(cases.CLASSES)]
    inner = keras.optimizers.Adam(0.01, clipnorm=0.05)
    optimizer = keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=1024.0, dynamic_growth_steps=8
    )
    return cases.compiled(keras.Sequential(layers), optimizer)


def embedded():
    """Weighed losses, so that gradients are taken twice; and masks drawn alike."""
    layers = [
        keras.Input((cases.LENGTH,), dtype="int32"),
        ShardedEmbedding(cases.WORDS, 8, mask_zero=True),
        *pair(8),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(cases.CLASSES, kernel_regularizer="l2"),
    ]
    return cases.compiled(
        keras.Sequential(layers), cases.sgd(), weighted_metrics=["accuracy"]
    )


CASES = [
    cases.Case("clipped", clipped, cases.repeated, rows=(10, 7, 1), accumulate=2),
    cases.Case("scaled", scaled, cases.overflowing, rows=(10,)),
    cases.Case("embedded", embedded, cases.sentences, (10, 7, 3), replicas_matter=True),
]
# All on four ranks, by make test-equivalence.
CHOSEN = CASES if RANKS > 2 else CASES[:1]
on_four = pytest.mark.skipif(RANKS < 4, reason="on four ranks")


def model(optimizer=None):
    keras.utils.set_random_seed(11)
    layers = [keras.Input((small.FEATURES,)), *pair(8)]
    layers += [keras.layers.Dense(small.CLASSES)]
    return cases.compiled(keras.Sequential(layers), optimizer or small.adamw())


def trained(backend, folder, steps):
    """Of a training that ends in a checkpoint: its losses."""
    checkpoint = Checkpoint(folder, every=4, resume=True)
    result = small.train(backend, model=model, steps=steps, checkpoint=checkpoint)
    return np.array(result.losses)


def assert_close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


if launch.launched():

    @pytest.fixture(scope="module", autouse=True)
    def devices():
        local_devices(2)  # before TensorFlow starts

    @pytest.fixture(scope="module", params=GROUPS)
    def backend(request):
        options = backends.Options(tensor_parallel=request.param)
        made = backends.get("native", options)
        yield made
        made.barrier()

    @on_four
    def test_places_layers_on_devices_of_each_rank(reference):
        backend = backends.get("native", backends.Options(model_parallel=2))
        got = cases.train(CASES[0], backend, "float64", check_every=3)
        assert differences(got, reference(CASES[0], "float64"), "float64") == []

    @pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
    def test_trains_what_one_process_trains(case, backend, reference):
        got = cases.train(case, backend, "float64", check_every=3)
        wanted = reference(case, "float64", backend.replicas)
        if backend.rank:  # parts are gathered on rank 0
            wanted = {k: v for k, v in wanted.items() if k in got}
        assert differences(got, wanted, "float64") == []

    def test_keeps_its_shard(backend):
        made = cases.built(clipped, backend, cases.spec_of(CASES[0].batch(0)))
        table = made.layers[0].embeddings
        assert abs(table.shape[0] - cases.WORDS / backend.tensor.parts) < 1
        parts = get_partition(made)
        assert parts.shape_of(table) == (cases.WORDS, 4)
        cut = [v for v in made.optimizer.variables if parts.shape_of(v)]
        assert (
            len(cut) == 3 * 7
        )  # two moments and an average: 1 table, 4 kernels, 2 biases

    def test_checkpoints_are_whole(backend, reference):
        keras.config.set_floatx("float64")
        parts = backend.tensor.parts
        got = trained(backend, reference.folder / f"from-one-{parts}", ALL)
        assert_close(got, np.load(reference.folder / "by-one.npy"))
        trained(backend, reference.folder / f"by-{parts}", EARLY)

    REFUSED = {
        "no layer of model": {"model": small.model()},
        "treat each element": {"model": lambda: model(keras.optimizers.Lamb())},
        "built with whole": {"model": lambda: built(model())},
        "cut already": {"shard_optimizer": True},
        "units, which": {"model": lambda: of(ColumnParallelDense(7))},
        "inputs, which": {"model": lambda: of(RowParallelDense(3), 7)},
        "a constraint": {
            "model": lambda: of(RowParallelDense(3, kernel_constraint="max_norm"))
        },
        "not a sum over": {
            "model": lambda: of(
                RowParallelDense(
                    3, kernel_regularizer=keras.regularizers.OrthogonalRegularizer()
                )
            )
        },
        "needs all units": {
            "model": lambda: of(
                ColumnParallelDense(8, activation="softmax", gather_output=False)
            )
        },
        "along the axis": {"model": lambda: of(ShardedEmbedding(1, 3))},
    }

    def of(layer, features=small.FEATURES):
        layers = [keras.Input((features,)), layer, keras.layers.Dense(small.CLASSES)]
        return cases.compiled(keras.Sequential(layers), cases.sgd())

    def built(made):
        made.optimizer.build(made.trainable_variables)
        return made

    @pytest.mark.parametrize("message", REFUSED)
    def test_refuses_layers_that_cannot_be_split(message, backend):
        arguments = {"model": model} | REFUSED[message]
        with pytest.raises(UsageError, match=message) as caught:
            small.train(backend, steps=1, **arguments)
        assert caught.value.exit_code == 2

    def test_callbacks_read_and_change_whole_weights(backend):
        """On rank 0; the others have shards of what it wrote."""
        seen = {}

        class Doubling(keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                table = self.model.layers[0].embeddings
                seen["shape"], seen["before"] = tuple(table.shape), table.numpy()
                table.assign(2 * table)

            def on_train_batch_begin(self, batch, logs=None):
                seen.setdefault("after", self.model.layers[0].get_weights()[0])

        case, steps = CASES[0], 1
        made = cases.built(clipped, backend, cases.spec_of(case.batch(0)))
        hooks = Hooks(Doubling(), made, backend, {})
        hooks.agree()
        hooks.call("on_train_begin", (), {})
        hooks.call("on_train_batch_begin", (0, steps), 0, {})
        parts, table = get_partition(made), made.layers[0].embeddings
        whole = parts.gather(everywhere=True)[id(table)]
        assert table.shape[0] < cases.WORDS
        if backend.rank == 0:
            assert seen["shape"] == (cases.WORDS, 4) == seen["before"].shape
            assert_close(seen["after"], 2 * seen["before"])
            assert_close(whole, seen["after"])
        assert_close(np.asarray(table), parts.cut(table, whole))

    @on_four
    def test_names_the_rank_that_is_not_finite(backend):
        def poisoned():
            made = model()
            if backend.rank == backend.tensor.parts - 1:  # of the first replica
                made.layers[0].kernel.assign(made.layers[0].kernel * np.nan)
            return made

        with pytest.raises(CollectiveError, match="not finite on rank") as caught:
            small.train(backend, model=poisoned, steps=2, terminate_on_nan=True)
        assert caught.value.everywhere
        backend.barrier()


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_on_ranks(ranks, reference, tmp_path, backends_by_name):
    groups = [parts for parts in (2, 4) if ranks % parts == 0]
    for case in CASES if ranks > 2 else CHOSEN:
        for parts in groups:
            reference(case, "float64", ranks // parts)
    for file in reference.folder.glob("*.npz"):
        (tmp_path / file.name).symlink_to(file)
    keras.config.set_floatx("float64")
    single = backends_by_name("single")
    for parts in groups:
        trained(single, tmp_path / f"from-one-{parts}", EARLY)
    wanted = trained(single, tmp_path / "wanted", ALL)
    np.save(tmp_path / "by-one.npy", wanted)
    more = {"COLLECTIVE_TEST_RANKS": str(ranks)}
    ended = launch.launch("native", ranks, [HERE], tmp_path, seconds=420, **more)
    assert ended.code == 0, ended.output
    assert all(len(outcomes) > 15 for outcomes in ended.outcomes)
    message = {outcome for outcomes in ended.outcomes for outcome in outcomes.values()}
    assert message <= {"passed", "skipped"}, ended.output
    for parts in groups:
        assert_close(trained(single, tmp_path / f"by-{parts}", ALL), wanted)


WRONG = {
    "2 ranks cannot be cut into groups of 3": "--tensor-parallel 3",
    "with a rank that dies": "--tensor-parallel 2 --min-np 1",
    "an option of backend 'native'": "--tensor-parallel 2 --backend mpi",
    "no layer of model 'mlp'": "--tensor-parallel 2 --model mlp",
    "--tensor-parallel does not work with layers on several": "--tensor-parallel 2 --model-parallel 2",
}


@pytest.mark.launches
@pytest.mark.matrix
@pytest.mark.parametrize("message", WRONG)
def test_wrong_options_end_with_2(message):
    arguments = [sys.executable, "train.py", "--steps", "1", *WRONG[message].split()]
    start = launch.command("mpi" if "mpi" in message else "native", 2)
    code, printed = launch.run(
        [*start, *arguments], launch.environment(forked=True), 100
    )
    assert code == 2 and message in printed and "HINT: " in printed
