"""Data sets by name: their contents, their form, and suggestions for unknown names."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from collective.errors import UsageError
from collective.training.input.datasets import Data, load
from collective.training.input.pipeline import Input


def whole(source):
    """Return all rows in their order."""
    plan = Input(source, len(source), shuffle=False)
    return next(plan.dataset(0, 1, range(1), 1).as_numpy_iterator())


def fails(message, what, **keywords):
    with pytest.raises(UsageError, match=message) as caught:
        load(what, **keywords)
    assert "\nHINT: " in str(caught.value)


@pytest.fixture
def module(monkeypatch, tmp_path):
    """Make a module of the user in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_rows.py").write_text(
        "import numpy as np\n"
        "from collective.training.input.datasets import Data\n"
        "from collective.training.input.conversion import as_source\n"
        "def arrays(): return np.zeros((6, 2)), np.arange(6)\n"
        "def seeded(seed): return np.full((4, 1), seed), np.full(4, 0.5)\n"
        "def full(): return Data('mine', as_source(arrays()), None, 7)\n"
        "def wrong(): return 'rows'\n"
        "def stream():\n"
        "    import tensorflow as tf\n"
        "    return tf.data.Dataset.from_tensor_slices(arrays())\n"
    )
    yield "my_rows"
    sys.modules.pop("my_rows", None)


def test_digits():
    data = load("digits")
    assert (data.name, data.classes) == ("digits", 10)
    assert data.test is not None and (len(data.train), len(data.test)) == (1437, 360)
    train, test = whole(data.train), whole(data.test)
    assert train.x.shape == (1437, 8, 8, 1) and train.x.dtype == np.float32
    assert (train.x.min(), train.x.max()) == (0, 1)
    assert train.y.dtype == np.int32
    # No class is rare in either part, and no image is in both.
    assert min(np.bincount(test.y)) > 20
    images = np.concatenate([train.x, test.x]).reshape(1797, -1)
    assert len(np.unique(images, axis=0)) == 1797


def test_the_split_of_the_digits_depends_on_nothing():
    assert (
        load("digits", seed=9).train.fingerprint() == load("digits").train.fingerprint()
    )
    # Two accuracies always refer to the same test rows.
    assert whole(load("digits").test).y[:8].tolist() == [1, 9, 6, 6, 2, 8, 4, 0]


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    fails("pip install scikit-learn", "digits")


def test_synthetic():
    data = load("synthetic:6x5x3:40")
    assert data.test is not None and (len(data.train), len(data.test)) == (2048, 512)
    assert data.classes == 40
    train, test = whole(data.train), whole(data.test)
    assert train.x.shape == (2048, 6, 5, 3) and 0 <= train.y.min() < train.y.max() < 40
    rows = np.concatenate([train.x, test.x]).reshape(2560, -1)
    assert len(np.unique(rows, axis=0)) == 2560
    assert load("synthetic").train.spec[0].shape == (32, 32, 3)
    other = load("synthetic:6x5x3:40", seed=1)
    assert other.train.fingerprint() != data.train.fingerprint()
    fails("empty row or no class", "synthetic:8x0")


def test_npz_keeps_floats_and_scales_the_bytes_of_images(tmp_path):
    pixels = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4)
    floats = tmp_path / "floats.npz"
    images = tmp_path / "images.npz"
    np.savez(floats, x=pixels * 1.0, y=np.array([0.5, 1]))
    np.savez(images, x_train=pixels, y_train=[0, 3], x_test=pixels, y_test=[5, 0])
    data = load(str(floats))
    np.testing.assert_array_equal(whole(data.train).x, pixels)
    assert data.test is None and data.classes is None
    data = load(str(images))
    assert data.classes == 6 and data.test is not None
    x = whole(data.test).x
    np.testing.assert_allclose(x, pixels[..., None] / 255, rtol=1e-6)
    assert x.dtype == np.float32


def test_functions_of_the_user(module):
    data = load(f"{module}:arrays")
    assert (len(data.train), data.test, data.classes) == (6, None, 6)
    data = load(f"{module}:seeded", seed=4)
    assert whole(data.train).x[0, 0] == 4 and data.classes is None
    assert load(f"{module}:full").classes == 7
    assert isinstance(load(f"{module}:stream"), Data)
    fails("a str is not data", f"{module}:wrong")
    fails("no function 'none'.*\nHINT: it has: arrays, seeded", f"{module}:none")
    fails("no module 'not_there'", "not_there:none")
    fails("no function ''", f"{module}:")
    fails("does not name a function", ":arrays")


def test_an_unknown_name_lists_what_exists(tmp_path):
    fails("no data set 'digit'", "digit")
    fails(r"HINT: --data digits \| synthetic", "digit")
    fails("none.npz does not exist", str(tmp_path / "none.npz"))
    (tmp_path / "table.csv").write_text("1,2\n")
    fails("table.csv cannot be read as .npz", str(tmp_path / "table.csv"))
