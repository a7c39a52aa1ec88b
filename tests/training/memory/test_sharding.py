"""A sharded optimizer: the model of one process, with part of the memory on each rank.

Plain, this file starts itself on the ranks of a backend. They compare their training with
Keras' in one process; and the test continues from their checkpoint.
"""

from __future__ import annotations

import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import collective
from collective.backends import Options
from collective.backends.single import SingleBackend
from collective.environment import Environment
from collective.errors import UsageError
from collective.training import Checkpoint
from collective.training.keras_compat.held_parts import holder_of
from collective.training.keras_compat.tensorflow_names import wait_for
from collective.training.model.variables import optimizers_of
from collective.training.partition import backend_exchange, pieces, window
from collective.training.sharding.held import is_held
from tests import launch
from tests.training import small
from tests.training.programs import test_own_steps as own_steps
from tests.training.programs.own_steps import PROGRAMS

pytestmark = pytest.mark.usefixtures("clean_keras")
HERE = "tests/training/memory/test_sharding.py"
EARLY, ALL = 9, 14  # steps, in the second and in the third epoch
KINDS = keras.optimizers
AVERAGED = {"use_ema": True, "ema_momentum": 0.8}


OWN_STEPS = ("clips_itself", "gan")  # the second has two optimizers
# Optimizers for which no rank needs a whole gradient.
IN_PIECES = ("adam", "clipnorm", "global-clipnorm")


class Odd(keras.Optimizer):
    """Reads its slots in every way that has a rule for pieces, and in some without one."""

    def build(self, variables):
        super().build(variables)
        self.slots = self.add_optimizer_variables(variables, "slot", "ones")

    def update_step(self, gradient, variable, learning_rate):
        slot = self.slots[self._get_variable_index(variable)]
        read = ops.convert_to_tensor(slot)
        flat = ops.reshape(read, (-1,))
        sizes = [ops.max(flat), ops.min(read), ops.mean(read), tf.nn.l2_loss(read)]
        some = ops.cast(ops.any(read > 1.0), read.dtype) + ops.cast(
            ops.all(read > 0.0), read.dtype
        )
        of_rows = ops.mean(read, axis=-1, keepdims=True)  # this needs the whole slot
        turned = ops.transpose(ops.square(ops.transpose(read)))
        step = ops.where(gradient > 0, read, -read) * of_rows + 0.1 * turned
        step = step + sum(sizes) * 0.01 + some * 0.001
        row = ops.arange(read.shape[-1], dtype=read.dtype)
        self.assign(slot, 0.9 * read + ops.abs(gradient) + 0.01 * row)
        self.assign_sub(variable, learning_rate * (step + slot))


class Largest(keras.optimizers.SGD):
    """Writes the larger of two values into rows of a slot's variable."""

    def update_step(self, gradient, variable, learning_rate):
        slot = self.momentums[self._get_variable_index(variable)]
        slot.value.scatter_max(tf.IndexedSlices(gradient[:1], [0]))
        self.assign_sub(variable, learning_rate * gradient)


OPTIMIZERS = {
    "adam": lambda: KINDS.Adam(0.02, amsgrad=True),
    "adamw": lambda: KINDS.AdamW(0.02, weight_decay=0.1, **AVERAGED),
    "momentum": lambda: KINDS.SGD(0.1, momentum=0.9, nesterov=True),
    "lamb": lambda: KINDS.Lamb(0.02),
    "adafactor": lambda: KINDS.Adafactor(0.02),
    "clipnorm": lambda: KINDS.Adam(0.02, clipnorm=0.05),
    "global-clipnorm": lambda: KINDS.Adam(0.02, global_clipnorm=0.05),
    "averages": lambda: KINDS.RMSprop(0.02, ema_overwrite_frequency=4, **AVERAGED),
    "accumulation": lambda: KINDS.Adam(0.02, gradient_accumulation_steps=3),
    "scaled": lambda: KINDS.LossScaleOptimizer(
        KINDS.Adam(0.02, clipnorm=0.05), initial_scale=1024.0, dynamic_growth_steps=4
    ),
    "odd": lambda: Odd(0.001),
}


def of_everything():
    """Return a model with look-ups, state of layers, a constraint, and odd slots."""
    keras.utils.set_random_seed(3)
    given = keras.Input((4,), dtype="int32")
    x = keras.layers.Flatten()(keras.layers.Embedding(7, 3)(given))
    limit = keras.constraints.MaxNorm(0.5)
    x = keras.layers.Dense(5, "tanh", kernel_constraint=limit)(x)
    x = keras.layers.BatchNormalization()(x)
    model = keras.Model(given, keras.layers.Dense(1)(x))
    model.compile(KINDS.Adam(0.02), "mse", metrics=["mae"])
    return model


def of_everything_rows():
    rng = np.random.default_rng(4)
    return rng.integers(0, 7, (23, 4)).astype("int32"), rng.normal(size=(23, 1))


def by_keras(model, rows):
    """Return weights and the optimizer's variables after Keras' own training."""
    model.fit(*rows, batch_size=small.BATCH, epochs=2, shuffle=False, verbose=0)
    return [np.array(v) for v in (*model.weights, *model.optimizer.variables)]


def whole(model):
    """Return the same for a model whose slots are in pieces. Every rank calls it."""
    return [np.array(v) for v in (*model.weights, *model.optimizer.variables)]


def fit(backend, model, rows=None, **more):
    """Fit as the plain arguments of Keras have it."""
    rows = small.rows() if rows is None else rows
    more = {"batch_size": small.BATCH, "verbose": 0, "backend": backend} | more
    return collective.fit(model, *rows, **more)


def trained(backend, folder, steps, **more):
    """Train up to a checkpoint; return the losses, and the weights at the end."""
    result = fit(
        backend,
        small.everything()(),
        seed=5,
        steps=steps,
        checkpoint=Checkpoint(folder, every=4, resume=True),
        **more,
    )
    return np.concatenate(
        [result.losses, *(np.ravel(v) for v in result.model.trainable_variables)]
    )


def assert_close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


def assert_same(backend, make, rows, **more):
    """Check that a sharded optimizer trains the model of Keras."""
    keras.config.set_floatx("float64")
    wanted = small.on_rank_zero(backend, lambda: by_keras(make(), rows))
    keras.utils.clear_session(free_memory=False)
    words = {"epochs": 2, "shuffle": False, "shard_optimizer": True} | more
    model = fit(backend, make, rows, **words).model
    for got, value in zip(whole(model), wanted, strict=True):
        assert_close(got, value)
    return model


if launch.launched():

    @pytest.fixture
    def backend(backends_by_name):
        return backends_by_name(os.environ[launch.BACKEND])

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_trains_what_keras_trains(name, backend, monkeypatch, caplog):
        monkeypatch.setenv("COLLECTIVE_EXPLAIN", "1")
        keras.config.set_floatx("float64")
        with caplog.at_level("INFO", logger="collective"):
            model = assert_same(backend, small.model(OPTIMIZERS[name]), small.rows())
        if name in IN_PIECES:
            assert backend.rank or "4 summed in pieces" in caplog.text
        slots = [v for v in model.optimizer.variables if is_held(v)]
        held = sum(int(np.prod(holder_of(v).part.shape)) for v in slots)
        total = sum(int(np.prod(v.shape)) for v in slots)
        assert slots and abs(held - total / backend.size) <= len(slots)

    @pytest.mark.parametrize("pieces", [1, 2])
    def test_beside_look_ups_and_layers_with_state(pieces, backend):
        assert_same(backend, of_everything, of_everything_rows(), accumulate=pieces)

    @pytest.mark.parametrize("name", OWN_STEPS)
    def test_all_optimizers_of_an_own_step(name, backend):
        wanted, history = own_steps.by_keras(PROGRAMS[name])
        result = own_steps.train(backend, PROGRAMS[name], shard_optimizer=True)
        own_steps.assert_as_keras(result, wanted, history)
        for optimizer in optimizers_of(result.model):
            assert all(is_held(v) for v in optimizer.variables if v.ndim)

    def test_a_callback_saves_whole_slots(backend, tmp_path):
        file = tmp_path / "model.keras"
        saves = keras.callbacks.ModelCheckpoint(file)
        model = small.train(
            backend, callbacks=[saves], epochs=1, shard_optimizer=True
        ).model
        wanted = whole(model)
        if not backend.rank:
            saved = keras.models.load_model(file)
            kept = [np.array(v) for v in (*saved.weights, *saved.optimizer.variables)]
            for got, value in zip(kept, wanted, strict=True):
                np.testing.assert_array_equal(got, value)

    @pytest.mark.parametrize("built_by", ["Keras", "collective"])
    def test_slots_that_were_made_before_are_cut_with_their_values(built_by, backend):
        keras.config.set_floatx("float64")
        words = {"shuffle": False, "batch_size": small.BATCH, "verbose": 0}
        make = small.model(OPTIMIZERS["adam"])
        wanted = small.on_rank_zero(backend, lambda: by_keras(make(), small.rows()))
        model = make()
        if built_by == "Keras":
            model.fit(*small.rows(), **words)
        else:
            fit(backend, model, **words)
        assert not any(is_held(v) for v in model.optimizer.variables)
        fit(backend, model, shard_optimizer=True, **words)
        assert any(is_held(v) for v in model.optimizer.variables)
        for got, value in zip(whole(model), wanted, strict=True):
            assert_close(got, value)
        after = fit(backend, model, initial_epoch=1, epochs=2, **words)
        assert (
            after.history["loss"][0]
            < collective.evaluate(make(), *small.rows(), backend=backend, verbose=0)[0]
        )

    def test_a_callback_reads_and_writes_whole_slots(backend):
        def halve(epoch, logs):
            for slot in model.optimizer.variables[2:]:
                seen.append(np.array(slot))
                slot.assign(slot * 0.5)

        seen = []
        model = small.model()()
        halves = keras.callbacks.LambdaCallback(on_epoch_end=halve)
        fit(backend, model, callbacks=[halves], epochs=1, shard_optimizer=True)
        for before, slot in zip(seen, model.optimizer.variables[2:], strict=True):
            assert is_held(slot) and np.any(before)
            np.testing.assert_array_equal(np.array(slot), before * 0.5)

    def test_gradients_wait_until_others_are_sent(backend, monkeypatch):
        def wait(gate, ops):
            waits.append(gate)
            wait_for(gate, ops)

        waits = []
        monkeypatch.setattr(backend_exchange, "wait_for", wait)
        monkeypatch.setattr(window, "UNSENT_BYTES", 1)
        monkeypatch.setattr(pieces, "LARGE", 64)

        def make():
            keras.utils.set_random_seed(11)
            dense = keras.layers.Dense
            wide = [dense(64, "tanh", name=f"wide_{i}") for i in range(4)]
            return small.model(None, *wide)()

        assert_same(backend, make, small.rows())
        assert len({*waits}) >= 2 or not backend.sends_as_made

    def test_refuses_a_model_that_runs_eagerly(backend):
        with pytest.raises(UsageError, match="need a graph of the step"):
            fit(backend, small.model(run_eagerly=True)(), shard_optimizer=True)

    def test_refuses_what_has_no_rule_for_pieces(backend):
        with pytest.raises(UsageError, match="ResourceScatterMax reads or writes a"):
            fit(
                backend,
                small.model(lambda: Largest(0.1, momentum=0.9))(),
                shard_optimizer=True,
            )

    def test_checkpoints_are_whole(backend, reference):
        keras.config.set_floatx("float64")
        more = {"shard_optimizer": True}
        got = trained(backend, reference.folder / "by-one", ALL, **more)
        assert_close(got, np.load(reference.folder / "by-one.npy"))
        trained(backend, reference.folder / f"by-{backend.name}", EARLY, **more)


EACH = "test_trains_what_keras_trains"
# The optimizers that make test trains, and what else it leaves out.
FEW = {"adam", "adafactor", "global-clipnorm", "odd"}
LEFT_OUT = [
    "test_beside_look_ups_and_layers_with_state[1]",  # [2] does the same in two pieces
    *(f"{EACH}[{name}]" for name in OPTIMIZERS if name not in FEW),
]


@pytest.mark.launches
@pytest.mark.parametrize(
    "name, ranks, left_out",
    [
        ("native", 2, LEFT_OUT),
        *(
            pytest.param(name, ranks, [], marks=pytest.mark.matrix)
            for name in ("native", "mpi", "tf-multiworker")
            for ranks in (2, 3, 4)
        ),
    ],
)
def test_on_ranks(name, ranks, left_out, tmp_path, backends_by_name):
    keras.config.set_floatx("float64")
    single = backends_by_name("single")
    trained(single, tmp_path / "by-one", EARLY)
    wanted = trained(single, tmp_path / "wanted", ALL)
    np.save(tmp_path / "by-one.npy", wanted)
    tests = [HERE, *(f"--deselect={HERE}::{some}" for some in left_out)]
    ended = launch.launch(name, ranks, tests, tmp_path, seconds=280)
    chosen = len(OPTIMIZERS) - len(left_out) + len(OWN_STEPS)
    assert ended.passed(skips=True) == chosen + 10
    assert_close(trained(single, tmp_path / f"by-{name}", ALL), wanted)


PLAIN = pytest.mark.skipif(launch.launched(), reason="one process shows it")


class Several(SingleBackend):
    """Stands for two replicas in one process."""

    def __init__(self):
        super().__init__(Options(), Environment())
        self.replicas, self.local_replicas = 2, range(2)


def alone():
    return SingleBackend(Options(), Environment())


@PLAIN
def test_refuses_several_replicas_in_a_process():
    with pytest.raises(UsageError, match="replicas in one process") as caught:
        small.train(Several(), shard_optimizer=True)
    assert caught.value.exit_code == 2


@PLAIN
def test_takes_an_optimizer_that_has_trained_before():
    model, other = small.model()(), small.model()()
    for each, sharded in ((model, True), (other, False)):
        each.fit(*small.rows(), verbose=0, shuffle=False)
        small.train(alone(), model=each, steps=2, shard_optimizer=sharded)
    for got, wanted in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(got, wanted)
