"""Models by name: they fit the data, end in logits, and learn."""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import pytest

from collective.errors import UsageError
from collective.training.calls.models import MODELS, build
from collective.training.input.datasets import load
from collective.training.input.pipeline import Input


def fails(message, what, **keywords):
    with pytest.raises(UsageError, match=message) as caught:
        build(what, **{"input_shape": (8, 8, 1), "classes": 10, **keywords})
    assert "\nHINT: " in str(caught.value)


@pytest.fixture
def policy():
    """Return a function that sets a dtype policy for one test."""
    before = keras.config.dtype_policy()
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy(before)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("mlp", (8, 8, 1)),
        ("mlp", (5,)),
        ("cnn", (8, 8, 1)),
        ("cnn", (28, 28)),
        ("cnn", (32, 32, 3)),
        ("cnn", (3, 3, 1)),
        ("transformer", (8, 8, 1)),
        ("transformer", (6, 4)),
        ("transformer", (12,)),
        ("resnet50", (32, 32, 3)),
    ],
)
def test_models_give_logits(name, shape):
    model = build(name, input_shape=shape, classes=7)
    assert model.input_shape == (None, *shape)
    logits = model(np.random.default_rng(0).integers(0, 3, (2, *shape)))
    assert logits.shape == (2, 7)
    # There is no softmax: rows do not add up to one.
    assert np.abs(np.sum(logits, 1) - 1).max() > 1e-4


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["mixed_bfloat16", "float64"])
def test_logits_have_the_variables_precision(policy, name, precision):
    policy(precision)
    model = build(name, input_shape=(32, 32, 3), classes=2)
    (output,) = model.outputs
    assert output.dtype == ("float64" if precision == "float64" else "float32")
    if precision == "mixed_bfloat16":
        assert model.layers[2].compute_dtype == "bfloat16"


def test_cnn_reads_the_digits():
    data = load("digits")
    keras.utils.set_random_seed(0)
    model = build("cnn", input_shape=(8, 8, 1), classes=10)
    model.compile(
        keras.optimizers.Adam(3e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    plan = Input(data.train, 64)
    steps = plan.dataset(0, 10 * plan.steps_per_epoch, range(1), 1)
    model.fit(steps.map(lambda b: (b.x, b.y)), shuffle=False, verbose=0)
    assert data.test is not None
    test = next(iter(Input(data.test, 360).dataset(0, 1, range(1), 1)))
    _, accuracy = model.evaluate(test.x, test.y, verbose=0)
    assert accuracy >= 0.97


def test_models_of_the_user(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_models.py").write_text(
        "import keras\n"
        "def both(input_shape, classes):\n"
        "    return keras.Sequential([keras.Input(input_shape),\n"
        "        keras.layers.Flatten(), keras.layers.Dense(classes)])\n"
        "def one(classes=2): return both((3,), classes)\n"
        "def any(**given): return both(**given)\n"
        "def wrong(): return 3\n"
        "def broken(): import no_such_module_at_all\n"
    )
    shape: dict[str, Any] = {"input_shape": (4,), "classes": 5}
    assert build("my_models:both", **shape).output_shape == (None, 5)
    assert build("my_models:one", **shape).input_shape == (None, 3)
    assert build("my_models:any", **shape).input_shape == (None, 4)
    fails("returned a int, not a keras.Model", "my_models:wrong")
    fails("no function 'none'", "my_models:none")
    fails("no module 'not_there.at_all'", "not_there.at_all:none")
    # The user must see a missing module in the user's own code.
    with pytest.raises(ModuleNotFoundError):
        build("my_models:broken", **shape)
    sys.modules.pop("my_models")


def test_models_that_do_not_fit():
    fails(r"no model 'vgg'\nHINT: --model mlp \| cnn", "vgg")
    fails("the data has none", "mlp", classes=None)
    fails("32x32 or larger", "resnet50")
    fails("takes images", "cnn", input_shape=(5,))
