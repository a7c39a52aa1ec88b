"""Variables that ranks hold in parts: what code sees of them, and which are cut."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective.errors import UsageError
from collective.training.keras_compat import held_parts
from collective.training.keras_compat.held_parts import StandIn, holder_of
from collective.training.partition.layouts import Sharded
from collective.training.partition.mesh import parts
from collective.training.partition.mesh.layouts import VariableLayout
from collective.training.sharding import held
from collective.training.sharding.placing import Placing

pytestmark = pytest.mark.usefixtures("clean_keras")
WHOLE = np.arange(12.0, dtype="float32").reshape(3, 4)


class Kept:
    """Holds a variable whole, in an array."""

    path = "a/kernel"

    def __init__(self, value: Any = WHOLE):
        self.value, self.reads = np.array(value), 0

    def whole(self) -> tf.Tensor:
        self.reads += 1
        return tf.constant(self.value)

    def write(self, value: tf.Tensor) -> None:
        self.value = value.numpy()

    def traced_handle(self, own: Any) -> Any:
        raise UsageError("a function reads it", hint="none")


@pytest.fixture
def variable():
    made = keras.Variable(WHOLE, name="kernel")
    held_parts.hold(made, StandIn(made.shape, tf.float32, True, Kept()))
    return made


def test_code_that_runs_eagerly_sees_the_whole_value(variable):
    kept = holder_of(variable)
    assert variable.shape == (3, 4) and variable.value.trainable
    for found in (
        np.array(variable),
        variable.numpy(),
        variable.value.numpy(),
        (variable * 1.0).numpy(),
        keras.ops.convert_to_numpy(variable),
        variable[:].numpy(),
        tf.matmul(tf.eye(3), variable).numpy(),
        tf.gather(variable.value, [0, 1, 2]).numpy(),
        keras.ops.take(variable, [0, 1, 2], axis=0).numpy(),
        tf.raw_ops.AddV2(x=variable.value, y=tf.zeros([])).numpy(),
        tf.raw_ops.Relu(features=variable.value).numpy(),
    ):
        np.testing.assert_array_equal(found, WHOLE)
    assert kept.reads >= 9


def test_what_code_assigns_is_kept(variable):
    kept = holder_of(variable)
    variable.assign(WHOLE + 1)
    np.testing.assert_array_equal(kept.value, WHOLE + 1)
    variable.assign_add(np.ones_like(WHOLE))
    variable.value.assign_sub(WHOLE)
    np.testing.assert_array_equal(kept.value, np.full_like(WHOLE, 2))
    variable.value.scatter_add(tf.IndexedSlices(tf.ones([1, 4]), tf.constant([2])))
    np.testing.assert_array_equal(kept.value[:, 0], [2, 2, 3])
    with pytest.raises(ValueError, match="shape"):
        variable.value.assign(np.zeros([2, 2], "float32"))


def test_a_function_that_is_not_made_for_parts_is_refused(variable):
    # TensorFlow has words of its own around it.
    with pytest.raises((UsageError, ValueError), match="a function reads it"):
        tf.function(lambda: variable * 2.0, autograph=False)()
    with pytest.raises(UsageError, match="a function reads it"):
        tf.function(lambda: variable.assign(WHOLE), autograph=False)()
    with pytest.raises(UsageError, match="cannot be copied"):
        copy.deepcopy(variable.value)
    found = keras.layers.Lambda(lambda x: x @ variable)(keras.Input((3,)))
    assert found.shape == (None, 4)


def test_inside_made_whole_it_is_an_ordinary_variable(variable):
    stand_in = variable.value
    with held_parts.made_whole([variable, keras.Variable(1.0)]):
        assert type(variable.value) is not StandIn
        doubled = tf.function(lambda: variable * 2.0, autograph=False)()
        np.testing.assert_array_equal(doubled, WHOLE * 2)
    assert variable.value is stand_in


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("blocks", [1, 3])
def test_parts_are_joined_again(axis, blocks):
    shape = [5, 5]
    shape[axis] = 2 * blocks * 2
    value = tf.reshape(tf.range(5.0 * shape[axis]), shape)
    layout = Sharded(axis, (2,) * blocks)
    cut = [parts.part_of(value, layout, place, 2) for place in range(2)]
    assert {tuple(p.shape) for p in cut} == {parts.shape_of_part(shape, layout)}
    np.testing.assert_array_equal(parts.joined(cut, layout), value)


class Ranks(SimpleNamespace):
    """The first of two ranks on a mesh, which agree and exchange nothing."""

    def agreed(self, value: tf.Tensor) -> tf.Tensor:
        return value

    def part(self, value: tf.Tensor, layout: VariableLayout) -> Any:
        cuts = [(a, layout.cut[a]) for a in self.mesh.model_axes if a in layout.cut]
        for _, cut in cuts:
            value = parts.part_of(value, cut, 0, 2)
        return value, cuts


@pytest.fixture
def placed(monkeypatch):
    """Make a model and an optimizer with options; return the parts by path."""

    def make(mesh=None, layouts=None, build=None, **options):
        placing = Placing(SimpleNamespace(rank=0, size=2), **options)
        monkeypatch.setattr(
            placing, "ranks_of", lambda mesh: Ranks(mesh=mesh, pieces=(0, 2))
        )
        distribution = None
        if mesh is not None:
            devices = keras.distribution.DeviceMesh(
                mesh, ("batch", "model"), [f"cpu:{i}" for i in range(np.prod(mesh))]
            )
            layout_map = keras.distribution.LayoutMap(devices)
            for pattern, axes in layouts.items():
                layout_map[pattern] = axes
            distribution = keras.distribution.ModelParallel(layout_map=layout_map)
        monkeypatch.setattr(keras.distribution, "distribution", lambda: distribution)
        with placing.making():
            model = build()
        optimizer = getattr(model, "optimizer", None)
        variables = [*model.variables, *(optimizer.variables if optimizer else [])]
        found = {v.path: holder_of(v) for v in variables}
        return placing, {p: tuple(h.part.shape) for p, h in found.items() if h}, found

    return make


def model():
    layers = [keras.layers.Dense(4, name="up"), keras.layers.LSTM(2, name="long")]
    made = keras.Sequential([keras.Input((3, 3)), *layers])
    made.compile(keras.optimizers.Adam())
    made.optimizer.build(made.trainable_variables)
    return made


def test_a_layout_map_cuts_weights_and_their_slots(placed):
    layouts = {
        ".*up/kernel": (None, "model"),
        ".*up/bias": ("batch",),
        ".*long/.*/bias": ("model",),
    }
    _, found, holders = placed((2, 2), layouts, model)
    assert found == {
        "sequential/up/kernel": (3, 2),
        "sequential/up/bias": (2,),
        "sequential/long/lstm_cell/bias": (4,),
        "adam/sequential_up_kernel_momentum": (3, 2),
        "adam/sequential_up_kernel_velocity": (3, 2),
        "adam/sequential_up_bias_momentum": (2,),
        "adam/sequential_up_bias_velocity": (2,),
        "adam/sequential_long_lstm_cell_bias_momentum": (4,),
        "adam/sequential_long_lstm_cell_bias_velocity": (4,),
    }
    # Of each gate a rank has some units: Keras begins the second one with ones.
    bias = holders["sequential/long/lstm_cell/bias"]
    np.testing.assert_array_equal(bias.part, [0, 1, 0, 0])
    assert [axis for axis, *_ in bias.steps] == ["model"]


def test_axes_that_do_not_divide_stay_whole_and_are_named(placed):
    placing, found, _ = placed(
        (1, 2), {".*up/kernel": ("model", None)}, model, shard_optimizer=False
    )
    assert not found
    assert placing.kept_whole == {
        "sequential/up/kernel": "axis 0 of 3 is not divided by 2 ('model'); 48 bytes"
    }


def test_options_cut_weights_or_slots(placed):
    def normed():
        layers = [keras.layers.Dense(4), keras.layers.BatchNormalization()]
        made = keras.Sequential([keras.Input((3,)), *layers])
        made.compile(keras.optimizers.SGD(momentum=0.9))
        made.optimizer.build(made.trainable_variables)
        return made

    _, found, _ = placed(build=normed, shard_weights=True)
    assert found["sequential/dense/kernel"] == (6,)
    assert "sequential/batch_normalization/moving_mean" not in found
    assert len(found) == 4 + 4
    keras.backend.clear_session()
    _, found, _ = placed(build=normed, shard_optimizer=True)
    assert len(found) == 4 and all("momentum" in path for path in found)


def test_a_loop_that_runs_eagerly_is_refused(placed):
    _, _, holders = placed(
        (1, 2), {".*up/kernel": (None, "model")}, model, shard_optimizer=False
    )
    one = holders["sequential/up/kernel"]
    with tf.GradientTape(), pytest.raises(UsageError, match="runs eagerly"):
        one.whole()
    with pytest.raises(UsageError, match="a function of the script reads"):
        one.traced_handle("own")
    with held.tracing():
        assert one.traced_handle("own") == "own"
