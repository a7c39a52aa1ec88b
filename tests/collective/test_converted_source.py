"""Functions that AutoGraph converts leave no files."""

from __future__ import annotations

import inspect
import os
import tempfile

import pytest
import tensorflow as tf

from collective import tensorflow_ops


def test_a_converted_function_has_its_source_and_no_file(tmp_path, monkeypatch):
    tensorflow_ops.keep_in_memory()  # a second time changes nothing
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def doubled(x):
        if x > 0:
            x = x * 2
        return x

    assert float(tf.function(doubled)(tf.constant(3.0))) == 6
    converted = tf.autograph.to_graph(doubled)
    assert "if_stmt" in inspect.getsource(converted)
    made = inspect.getsourcefile(converted)
    assert made is not None and made.startswith(str(tmp_path))
    assert [n for n in os.listdir(tmp_path) if n != "__pycache__"] == []
    with pytest.raises(
        TypeError, match=r"(?s)in user code:.*test_converted_source\.py"
    ):
        tf.function(lambda x: _refuses(x))(tf.constant(1.0))


def _refuses(x):
    raise TypeError("refused")
