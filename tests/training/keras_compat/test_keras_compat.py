"""Names that the project uses inside Keras: each test fails when Keras changes one."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective.training import keras_compat
from tests.training import cases
from tests.training.cases import built, spec_of

pytestmark = pytest.mark.usefixtures("clean_keras")


def rows(count=6, data=cases.labelled):
    return data(np.random.default_rng(0), count, 0)


@pytest.fixture
def mlp(backends_by_name):
    return built(cases.mlp(cases.adam), backends_by_name("single"), spec_of(rows()))


def test_build_makes_every_variable(mlp):
    assert mlp.built and mlp.optimizer.built
    assert len(mlp.trainable_variables) == 4
    # Two moments for each variable, the iteration, the learning rate.
    assert len(mlp.optimizer.variables) == 2 * 4 + 2
    count = len(mlp.variables) + len(mlp.metrics_variables)
    mlp.train_on_batch(*rows()[:2])
    assert len(mlp.variables) + len(mlp.metrics_variables) == count


def test_build_reports_a_model_that_does_not_fit():
    x, y, _ = rows()
    spec = spec_of((x[:, 1:], y, None))
    with pytest.raises(ValueError, match="expected axis -1"):
        keras_compat.model.build(cases.mlp(cases.adam)(), tuple(spec)[:3])


def test_core_optimizer_and_expects_overflow():
    inner = keras.optimizers.SGD()
    outer = keras.optimizers.LossScaleOptimizer(inner)
    assert keras_compat.optimizers.core_optimizer(inner) is inner
    assert keras_compat.optimizers.core_optimizer(outer) is inner
    assert keras_compat.optimizers.expects_overflow(outer)
    assert not keras_compat.optimizers.expects_overflow(inner)


@pytest.mark.parametrize("as_given", [False, True])
def test_apply_takes_gradients_as_they_are(as_given, backends_by_name):
    """With two replicas Keras doubles a gradient that is already a sum."""
    backend = backends_by_name("tf-mirrored:2")
    with backend.scope():
        variable = keras.Variable(np.zeros(3), dtype="float32")
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([variable])

    @tf.function
    def update():
        def replica():
            given = [tf.constant([1.0, 2.0, 3.0])], [variable]
            if as_given:
                keras_compat.optimizers.apply(optimizer, *given)
            else:
                optimizer.apply(*given)
            return tf.zeros([])

        return backend.run(replica, ())

    update()
    factor = 1 if as_given else 2
    np.testing.assert_array_equal(
        np.array(variable), [-factor, -2 * factor, -3 * factor]
    )


def test_is_seed_state_finds_those_of_random_layers_only():
    layers = [keras.Input((3,)), keras.layers.BatchNormalization()]
    layers += [keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.5)]
    model = keras.Sequential(layers)
    found = [
        v for v in model.non_trainable_variables if keras_compat.seeds.is_seed_state(v)
    ]
    assert len(found) == 2 and len(model.non_trainable_variables) == 4


def test_takes_training():
    class Without(keras.Model):
        def call(self, x):
            return x

    assert not keras_compat.model.takes_training(Without())
    assert keras_compat.model.takes_training(cases.Subclassed())


def test_tf_variable_is_the_one_that_holds_the_value(mlp):
    keras_compat.model.tf_variable(mlp.trainable_variables[1]).assign(np.ones(16))
    np.testing.assert_array_equal(np.array(mlp.trainable_variables[1]), np.ones(16))


def test_overrides():
    class Own(keras.Model):
        def compute_loss(self, **kwargs):
            return 0.0

    assert keras_compat.model.overrides(Own(), "compute_loss")
    assert not keras_compat.model.overrides(Own(), "compute_metrics")
    assert not keras_compat.model.overrides(keras.Sequential(), "compute_loss")


def test_writes_are_undone_whoever_makes_them():
    """This includes variables made inside, and writes through the result of ``assign``."""
    ours, of_keras = tf.Variable(1.0), keras.Variable(np.ones(2))
    table = tf.Variable(tf.zeros([3]))
    function = tf.function(lambda: ours.assign_add(5.0))
    with keras_compat.undone_writes.undo_writes():
        of_keras.assign([7.0, 8.0])
        ours.assign(2.0).assign_add(3.0)
        function()
        table.scatter_nd_update([[1]], [4.0])
        made = tf.Variable(6.0)
        made.assign_sub(2.0)
        assert float(ours) == 10.0 and float(made) == 4.0
    assert of_keras.numpy().tolist() == [1.0, 1.0]
    assert (float(ours), float(made), table.numpy().tolist()) == (1.0, 6.0, [0.0] * 3)
    ours.assign(3.0)
    assert float(ours) == 3.0


def test_an_optimizer_is_its_own_again():
    """A step restores all that it replaces in a user's optimizer."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(clipnorm=1.0))
    optimizer.build([keras.Variable(np.ones(2))])
    inner = optimizer.inner_optimizer
    before = [{**vars(v)} for v in (optimizer, inner, inner.iterations)]
    known = keras_compat.optimizers
    with known.count_atomically(optimizer):
        assert "assign_add" in vars(inner.iterations)
    after = [{**vars(v)} for v in (optimizer, inner, inner.iterations)]
    assert [v.keys() for v in after] == [v.keys() for v in before]


def test_a_pass_takes_no_batch_of_a_generator_ahead():
    taken: dict[str, int] = {}

    def batches(name):
        for taken[name] in itertools.count(1):
            yield np.ones((2, 3)), np.ones((2, 1))

    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse", steps_per_execution=2)
    training, validation = batches("training"), batches("validation")
    more = {"validation_data": validation, "validation_steps": 3, "verbose": 0}
    with keras_compat.data.no_reading_ahead(3):
        made.fit(training, epochs=3, steps_per_epoch=4, **more)
    # Keras reads two batches of a generator for their shapes; each pass begins with them.
    assert taken == {"training": 12, "validation": 4 + 2 + 2}
    with keras_compat.data.no_reading_ahead():
        made.evaluate(training, steps=5, verbose=0)
    assert taken["training"] == 12 + 6


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras has none"
)
def test_an_optimizer_of_several_has_no_rate_of_its_own():
    kinds = keras.optimizers
    several = kinds.OptimizerMap(kinds.SGD(0.1), {".*kernel": kinds.Adam(0.1)})
    plain_rate = keras_compat.optimizers.plain_rate
    assert plain_rate(kinds.MultiOptimizer(several)) is None
    assert plain_rate(kinds.SGD(kinds.schedules.CosineDecay(0.1, 10))) is None
    scaled = kinds.LossScaleOptimizer(kinds.SGD(0.5))
    assert plain_rate(scaled) is scaled.inner_optimizer.learning_rate
