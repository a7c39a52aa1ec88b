"""The search for layouts: many trials on one graph, and what is found of small models."""

from __future__ import annotations

import logging
from typing import Any

import keras
import numpy as np
import pytest

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.partition.layouts import WHOLE
from collective.training.partition.mesh import suggestion
from collective.training.partition.mesh.layouts import Mesh, blocks_of, lay_out
from collective.training.partition.mesh.trials import Trials, exchanged_bytes
from collective.training.partition.partition import Partition, Placed
from collective.training.partition.plans import Rows

L = keras.layers
MESH = Mesh({"batch": 2, "model": 2}, "batch")


def attention() -> Any:
    inputs = keras.Input((6,), dtype="int32")
    h = L.Embedding(20, 8)(inputs)
    n = L.LayerNormalization()(h)
    h = h + L.MultiHeadAttention(2, 4)(n, n, use_causal_mask=True)
    return keras.Model(inputs, L.Dense(20)(L.Dense(16, activation="gelu")(h)))


def recurrent() -> Any:
    layers = [
        keras.Input((5, 4)),
        L.LSTM(8, return_sequences=True, use_cudnn=False),
        L.Conv1D(8, 2),
        L.BatchNormalization(),
        L.GlobalAveragePooling1D(),
        L.Dense(2),
    ]
    return keras.Sequential(layers)


def layout_of(variable: Any, axis: int, blocks: dict[str, int]) -> Any:
    """Return how a variable is cut along one of its axes, or WHOLE."""
    path, shape = keras_compat.model.path_of(variable), variable.shape
    names = ["model" if place == axis else None for place in range(len(shape))]
    layout, _ = lay_out(path, shape, names, MESH, blocks.get(path, 1))
    return layout.cut.get("model", WHOLE)


@pytest.mark.parametrize("make", [attention, recurrent])
def test_a_trial_exchanges_what_a_partition_of_its_own_does(make: Any) -> None:
    model, draws = make(), np.random.default_rng(0)
    traced = suggestion._traced(model, None)
    trials, blocks = Trials(traced, 2, 4, 100), blocks_of(model)
    count = len(traced.graph.inputs) - len(traced.graph.captures)
    placed: dict[int, Any] = {}
    found = set()
    for _ in range(10):  # each differs in a few variables from the one before
        for number in draws.choice(len(model.trainable_variables), 2):
            variable = model.trainable_variables[number]
            axis = int(draws.integers(-1, len(variable.shape)))
            handle = keras_compat.model.tf_variable(variable).handle
            placed[id(handle)] = layout_of(variable, axis, blocks)
        by_id = {key: Placed(layout, []) for key, layout in placed.items()}
        alone = Partition(
            traced, [WHOLE] * count, Rows.places(2), None, by_id, range(count)
        )
        found.add(trials.exchanged(placed))
        assert trials.exchanged(placed) == exchanged_bytes(alone.graph, 4, 100)
    assert len(found) > 3


def test_a_model_that_is_small_beside_a_message_is_cut() -> None:
    model = keras.Sequential([keras.Input((4,)), L.Dense(6), L.Dense(2)])
    found = suggestion.suggest(model, MESH, rows=1)
    assert any(path.endswith("kernel") for path in found)
    odd = keras.Sequential([keras.Input((3,)), L.Dense(1)])
    assert suggestion.suggest(odd, MESH, rows=1) == {}


def test_inputs_may_be_a_dictionary() -> None:
    a, b = keras.Input((8,)), keras.Input((8,))
    made = keras.Model({"a": a, "b": b}, L.Dense(8)(a) + L.Dense(8)(b))
    assert suggestion.suggest(made, MESH)


class Own(keras.Model):
    """A model that Keras knows no symbolic inputs of."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = L.Embedding(9, 8), L.Dense(64), L.Dense(8)

    def call(self, x: Any) -> Any:
        return self.down(keras.ops.relu(self.up(self.words(x["a"]))))


def test_inputs_that_are_not_symbolic_are_given_or_follow_from_what_was_built() -> None:
    model, x = Own(), {"a": np.zeros((2, 5), "int32")}
    model(x)
    found = suggestion.suggest(model, MESH, x=x, rows=1)
    assert any(len(names) == 2 for names in found.values())
    assert suggestion.suggest(model, MESH, rows=1) == found


def test_a_model_that_cannot_be_called_by_its_shapes_is_refused() -> None:
    class Picky(Own):
        def call(self, x: Any) -> Any:
            assert x["a"].dtype == "int32", "only words"
            return super().call(x)

    model = Picky()
    model({"a": np.zeros((2, 5), "int32")})
    with pytest.raises(UsageError, match=r"(?s)no symbolic inputs.*only words"):
        suggestion.suggest(model, MESH)


def test_a_long_search_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(suggestion, "_SLOW", 0.0)
    with caplog.at_level(logging.INFO, "collective"):
        suggestion.suggest(attention(), MESH)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "layouts of 15 weights" in said[0]


def test_a_weight_is_cut_along_the_axis_along_which_its_gradient_comes() -> None:
    """Else the slots of an optimizer would travel whole in every step."""
    layers = [L.Dense(1024, "relu"), L.Dense(1024, "relu"), L.Dense(1)]
    model = keras.Sequential([keras.Input((512,)), *layers])
    found = suggestion.suggest(model, MESH, rows=1)
    kernels = [v for v in model.trainable_variables if len(v.shape) == 2]
    axes = [found[v.path].index("model") for v in kernels]
    assert axes == [1, 0, 0]


def test_weights_that_are_settled_stay_as_they_are() -> None:
    model = attention()
    table = model.trainable_variables[0].path
    found = suggestion.suggest(model, MESH, rows=1, settled={table: (None, "model")})
    assert table not in found and any("query/kernel" in path for path in found)


def test_frozen_matrices_are_cut() -> None:
    model = keras.Sequential([keras.Input((64,)), L.Dense(256), L.Dense(64)])
    model.layers[0].trainable = False
    found = suggestion.suggest(model, MESH, rows=1)
    assert model.layers[0].kernel.path in found
