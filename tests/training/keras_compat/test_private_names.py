"""The table of names that are used from inside Keras."""

from __future__ import annotations

import ast
import importlib.util
import logging

import keras
import pytest

from collective.errors import UsageError
from collective.training.keras_compat import private_names
from tests.test_imports import modules


def test_these_have_them():
    private_names.check()


def test_a_tensorflow_that_lacks_one_is_named():
    with pytest.raises(
        UsageError, match=r"lacks .*: tensorflow.python.eager.context.gone"
    ):
        private_names.check(of_tensorflow={"eager.context": "global_seed gone"})


def test_the_tables_have_what_the_product_imports():
    """The tables have every name of TensorFlow, and every module of Keras."""
    found: dict[str, set[str]] = {}
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.ImportFrom) and node.module):
                continue
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                module = whole if _is_module(whole) else node.module
                names = found.setdefault(module, set())
                if module != whole:
                    names.add(alias.name)
    inside = {m: n for m, n in found.items() if m.startswith("tensorflow.python.")}
    known = {
        f"tensorflow.python.{m}": {*names.split()}
        for m, names in private_names.TENSORFLOW.items()
    }
    assert [m for m, names in inside.items() if names - known.get(m, set())] == []
    assert set(inside) == set(known)
    of_keras = {
        m.removeprefix("keras.src.") for m in found if m.startswith("keras.src.")
    }
    assert of_keras <= {place.partition(":")[0] for place in private_names.KERAS}


def _is_module(name: str) -> bool:
    if not name.startswith(("keras.src.", "tensorflow.python.")):
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


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
