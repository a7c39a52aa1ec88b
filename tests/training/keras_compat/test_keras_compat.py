"""What the project takes from inside Keras: each test fails when Keras changes it."""

from __future__ import annotations

import functools

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
    # Two moments each, iteration, learning rate.
    assert len(mlp.optimizer.variables) == 2 * 4 + 2
    count = len(mlp.variables) + len(mlp.metrics_variables)
    mlp.train_on_batch(*rows()[:2])
    assert len(mlp.variables) + len(mlp.metrics_variables) == count


def test_build_reports_a_model_that_does_not_fit():
    x, y, _ = rows()
    spec = spec_of((x[:, 1:], y, None))
    with pytest.raises(ValueError, match="expected axis -1"):
        keras_compat.build(cases.mlp(cases.adam)(), tuple(spec)[:3])


def test_core_optimizer_and_expects_overflow():
    inner = keras.optimizers.SGD()
    outer = keras.optimizers.LossScaleOptimizer(inner)
    assert keras_compat.core_optimizer(inner) is inner
    assert keras_compat.core_optimizer(outer) is inner
    assert keras_compat.expects_overflow(outer)
    assert not keras_compat.expects_overflow(inner)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("switched_off", [False, True])
def test_switch_off_gradient_sum(switched_off, scaled, backends_by_name):
    """Under two replicas Keras doubles a gradient that is a sum already."""
    backend = backends_by_name("tf-mirrored:2")
    with backend.scope():
        variable = keras.Variable(np.zeros(3), dtype="float32")
        optimizer = keras.optimizers.SGD(1.0)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(
                optimizer, initial_scale=1.0
            )
        optimizer.build([variable])
    if switched_off:
        keras_compat.switch_off_gradient_sum(optimizer)

    @tf.function
    def update():
        def replica():
            optimizer.apply([tf.constant([1.0, 2.0, 3.0])], [variable])
            return tf.zeros([])

        return backend.run(replica, ())

    update()
    factor = 1 if switched_off else 2
    np.testing.assert_array_equal(
        np.array(variable), [-factor, -2 * factor, -3 * factor]
    )


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="of Keras 3.14 and later"
)
def test_switch_off_gradient_sum_reaches_every_optimizer_of_several(backends_by_name):
    backend = backends_by_name("tf-mirrored:2")
    kinds = keras.optimizers
    with backend.scope():
        one, two, three = (
            keras.Variable(np.zeros(3), dtype="float32", name=name) for name in "abc"
        )
        choice = kinds.OptimizerMap(kinds.SGD(1.0), {"b": kinds.SGD(0.5, use_ema=True)})
        optimizer = kinds.MultiOptimizer(choice)
        optimizer.build([one, two, three])
    assert len(keras_compat.single_optimizers(optimizer)) == 2
    keras_compat.switch_off_gradient_sum(optimizer)

    @tf.function
    def update():
        def replica():
            gradient = tf.constant([1.0, 2.0, 3.0])
            keras_compat.apply(
                optimizer,
                [gradient, gradient],  # the loss does not depend on the third
                [one, two],
                backend.assign,
                [one, two, three],
            )
            return tf.zeros([])

        return backend.run(replica, ())

    update()
    np.testing.assert_array_equal(np.array(one), [-1, -2, -3])
    np.testing.assert_array_equal(np.array(two), [-0.5, -1, -1.5])
    np.testing.assert_array_equal(np.array(three), [0, 0, 0])


def test_switch_off_gradient_sum_is_loud_where_it_cannot():
    with pytest.raises(RuntimeError, match="_all_reduce_sum_gradients"):
        keras_compat.switch_off_gradient_sum(object())


def test_loss_scale_is_what_apply_divides_by():
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=64.0
    )
    variable = keras.Variable(np.zeros(2), dtype="float32")
    optimizer.build([variable])
    scale = keras_compat.loss_scale(optimizer)
    assert float(scale) == 64
    optimizer.apply([tf.constant([1.0, 2.0]) * scale], [variable])
    np.testing.assert_array_equal(np.array(variable), [-1, -2])
    assert float(keras_compat.loss_scale(keras.optimizers.SGD())) == 1


def test_is_seed_state_finds_those_of_random_layers_only():
    layers = [keras.Input((3,)), keras.layers.BatchNormalization()]
    layers += [keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.5)]
    model = keras.Sequential(layers)
    found = [v for v in model.non_trainable_variables if keras_compat.is_seed_state(v)]
    assert len(found) == 2 and len(model.non_trainable_variables) == 4


def test_takes_training():
    class Without(keras.Model):
        def call(self, x):
            return x

    assert not keras_compat.takes_training(Without())
    assert keras_compat.takes_training(cases.Subclassed())


def test_tf_variable_is_the_one_that_holds_the_value(mlp):
    keras_compat.tf_variable(mlp.trainable_variables[1]).assign(np.ones(16))
    np.testing.assert_array_equal(np.array(mlp.trainable_variables[1]), np.ones(16))


def test_overrides():
    class Own(keras.Model):
        def compute_loss(self, **kwargs):
            return 0.0

    assert keras_compat.overrides(Own(), "compute_loss")
    assert not keras_compat.overrides(Own(), "compute_metrics")
    assert not keras_compat.overrides(keras.Sequential(), "compute_loss")


@pytest.mark.parametrize(
    "loss",
    [
        lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        lambda: "sparse_categorical_crossentropy",
        lambda: keras.losses.sparse_categorical_crossentropy,
    ],
    ids=["object", "name", "function"],
)
def test_unreduced_has_one_value_per_row(loss):
    """However the loss was given; and what it returns is the compiled loss."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, "softmax")])
    model.compile(loss=loss())
    x, y, weight = rows(data=cases.weighted)
    before = keras_compat.compiled_loss(model, y, model(x), weight)
    calls = []

    def call(*arguments):
        calls.append(keras_compat.unreduced(*arguments))
        return tf.constant(42.0)

    with keras_compat.replace_losses(model, call):
        total = keras_compat.compiled_loss(model, y, model(x), weight)
    ((values, seen, mask, reduction, counted),) = calls
    assert values.shape == (6,) and mask is None and float(total) == 42
    assert reduction == "sum_over_batch_size" and not counted
    np.testing.assert_array_equal(np.reshape(seen, [-1]), weight)
    assert float(before) == pytest.approx(float(tf.reduce_mean(values * weight)))
    after = keras_compat.compiled_loss(model, y, model(x), weight)
    assert float(after) == float(before) != 42  # and Keras' own mean is back


def test_unreduced_has_the_mask(backends_by_name):
    data = rows(data=cases.sentences)
    model = built(cases.masked, backends_by_name("single"), spec_of(data))
    masks = []

    def call(*arguments):
        found = keras_compat.unreduced(*arguments)
        masks.append(found.mask)
        return tf.reduce_sum(found.values)

    with keras_compat.replace_losses(model, call):
        keras_compat.compiled_loss(model, data[1], model(data[0]), None)
    np.testing.assert_array_equal(masks[0], data[0] != 0)


def test_unreduced_leaves_the_mean_of_a_loss_inside():
    inner = keras.losses.MeanSquaredError()

    class Outer(keras.losses.Loss):
        def call(self, y, y_pred):
            return keras.ops.mean(y_pred, axis=-1) + inner(y, y_pred)

    y, y_pred = tf.zeros([4, 3]), tf.ones([4, 3])
    found = keras_compat.unreduced(Outer(), y, y_pred, None)
    np.testing.assert_array_equal(found.values, [2.0] * 4)


@pytest.mark.parametrize(
    "function, counted",
    [
        (lambda y, p: keras.ops.reshape(p, [-1]), False),
        (lambda y, p: tf.boolean_mask(p, p > 0), True),
        (lambda y, p: keras.ops.mean(p, axis=0), False),
        (lambda y, p: keras.ops.mean(p), False),
        (keras.losses.mean_absolute_error, False),
    ],
    ids=["flattened", "by data", "a class", "scalar", "of Keras"],
)
def test_unreduced_knows_whether_data_decide_the_number_of_values(function, counted):
    loss = keras.losses.get(function)
    if not isinstance(loss, keras.losses.Loss):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
        model.compile(loss=function)
        model._compile_loss.build(tf.zeros([4, 3]), tf.zeros([4, 3]))
        (loss,) = (entry.loss for entry in model._compile_loss._flat_losses)

    @tf.function(autograph=False)
    def of(y, y_pred):
        found = keras_compat.unreduced(loss, y, y_pred, None)
        assert found.counted == counted
        return found.values

    of.get_concrete_function(*2 * [tf.TensorSpec([None, 3])])


@pytest.mark.parametrize("shapes", [([4], [4, 1]), ([4, 1], [4]), ([4, 5], [4, 5])])
def test_same_rank(shapes):
    """Without it, [4] times [4, 1] is [4, 4] and nobody notices."""
    values, weight = keras_compat.same_rank(*(tf.ones(shape) for shape in shapes))
    assert values.shape.num_elements() == (values * weight).shape.num_elements()


def test_compiled_loss_is_none_where_there_is_none():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    model.compile()
    assert keras_compat.compiled_loss(model, None, None, None) is None
    assert keras_compat.loss_trackers(model) == []


def test_custom_loss_sees_the_added_losses():
    class Own(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, **kwargs):
            return keras.ops.sum(y_pred - y) + sum(self.losses)

    model = Own()
    model.compile()
    added = [tf.constant(2.0), tf.constant(3.0)]
    got = keras_compat.custom_loss(
        model, None, tf.ones(2), 4 * tf.ones(2), None, added, True
    )
    assert float(got) == 6 + 5
    assert model.losses == []


def test_metrics_and_loss_trackers(backends_by_name):
    data = rows(data=cases.two_and_two)
    model = built(cases.functional, backends_by_name("single"), spec_of(data))
    assert [m.name for m in keras_compat.loss_trackers(model)] == [
        "kind_loss",
        "size_loss",
    ]
    names = [m.name for m in keras_compat.metrics(model)]
    assert "loss" not in names and "kind_loss" not in names
    variables = [v for m in keras_compat.metrics(model) for v in m.variables]
    assert len(variables) == 4  # total and count of accuracy and of mae


@pytest.mark.parametrize(
    "make, data",
    [
        (cases.classifier, cases.binary),
        (cases.functional, cases.two_and_two),
        (cases.mlp(cases.sgd), cases.weighted),
    ],
    ids=["auc", "two outputs", "weighted"],
)
def test_metric_sums_add_up_to_what_keras_says(make, data, backends_by_name):
    """Two halves from zero, added, against Keras' own metrics over all rows."""
    whole = rows(10, data)
    model = built(make, backends_by_name("single"), spec_of(whole))
    variables = [v for m in keras_compat.metrics(model) for v in m.variables]
    zeros = [tf.zeros(v.shape, v.dtype) for v in variables]

    def sums(part):
        x, y, weight = (
            tf.nest.map_structure(lambda t: None if t is None else t[part], leaf)
            for leaf in whole
        )
        return keras_compat.metric_sums(model, zeros, x, y, model(x), weight)

    added = [a + b for a, b in zip(sums(slice(3)), sums(slice(3, 10)), strict=True)]
    assert all(not np.any(np.array(v)) for v in model.metrics_variables)
    results = keras_compat.metric_results(model, added)
    x, y, weight = whole
    wanted = model.evaluate(x, y, sample_weight=weight, return_dict=True, verbose=0)
    for name, value in results.items():
        assert value == pytest.approx(wanted[name], rel=1e-5)
    assert results.keys() >= {n for n in wanted if "loss" not in n}


def _update(optimizer, gradients, variables):
    keras_compat.apply(optimizer, gradients, variables, lambda *_: None)


def test_a_partitioned_variable_is_updated_as_a_whole_one():
    """In parts, clipped by the norm of all of them, constrained, and counted in place."""
    from tensorflow.python.distribute.sharded_variable import ShardedVariable

    ended = []
    for cut in (False, True):
        kernel = keras.Variable(np.ones((5, 2)), dtype="float32")
        if cut:
            parts = [tf.Variable(tf.ones((rows, 2))) for rows in (3, 2)]
            kernel._value = ShardedVariable(parts)
        bias = keras.Variable(np.zeros(2), dtype="float32")
        for variable in (kernel, bias):
            variable.constraint = keras.constraints.MaxNorm(1.5, axis=0)
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9, clipnorm=0.3)
        optimizer.build(keras_compat.flatten_partitioned([kernel, bias]))
        keras_compat.count_atomically(optimizer)
        gradients = [tf.reshape(tf.range(10.0), (5, 2)), tf.constant([3.0, 4.0])]

        step = tf.function(
            functools.partial(_update, optimizer, gradients, (kernel, bias)),
            autograph=False,
        )
        step()
        step()
        ended.append([tf.convert_to_tensor(v).numpy() for v in (kernel, bias)])
        assert int(optimizer.iterations) == 2
        kinds = [op.type for op in step.get_concrete_function().graph.get_operations()]
        updated = len(keras_compat.flatten_partitioned([kernel, bias]))
        assert kinds.count("AssignAddVariableOp") == updated + 1  # and the counter
    for whole, parts in zip(*ended, strict=True):
        np.testing.assert_allclose(parts, whole, rtol=1e-6)
