"""The table of what is taken from inside Keras."""

from __future__ import annotations

import logging

import keras
import pytest

from collective.errors import UsageError
from collective.training.keras_compat import private_names


def test_this_keras_has_them():
    private_names.check()


@pytest.mark.parametrize(
    "table, missing",
    [
        ({"no_such_module": "f"}, "keras.src.no_such_module"),
        ({"layers.layer:Missing": "f"}, "keras.src.layers.layer:Missing"),
        ({"layers.layer:Layer": "_losses _gone"}, "keras.src.layers.layer:Layer._gone"),
        ({"losses.loss": "Loss gone"}, "keras.src.losses.loss.gone"),
    ],
)
def test_a_keras_that_lacks_one_is_named(table, missing):
    with pytest.raises(UsageError) as caught:
        private_names.check(table)
    assert caught.value.message.endswith(f": {missing}")
    assert f"keras {keras.__version__} lacks" in caught.value.message
    assert "pip install" in caught.value.hint


@pytest.mark.parametrize(
    "version, warns", [("3.99.0", True), ("4.0.0rc1", True), ("3.15.9", False)]
)
def test_a_newer_keras_is_warned_about(version, warns, monkeypatch, caplog):
    monkeypatch.setattr(keras, "__version__", version)
    logger = logging.getLogger("collective")
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level("WARNING"):
        private_names.check()
    assert (f"keras {version} is newer than" in caplog.text) == warns
