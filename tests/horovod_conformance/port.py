"""A copy of parts of a Horovod checkout in which the word is replaced.

The copy is in a temporary folder: no code of Horovod enters this repository.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

_WORD = re.compile(r"\bhorovod\b")
# The tests' own tools use parts of Horovod's launcher: those stay.
_WORD_IN_TESTS = re.compile(r"\bhorovod\b(?!\.runner\.(common|util))")

# Changes for Keras 3: removed and new arguments, and variables without ref().
_KERAS_3 = (
    (r"\blr=", "learning_rate="),
    (r"\boptimizer\.lr\b", "optimizer.learning_rate"),
    (r", fused=False", ""),
    (r",\s*experimental_run_tf_function=\w+", ""),
    (r"super\(\).__init__\(name=name, \*\*kwargs\)",
     'super().__init__(**{"learning_rate": 1.0, "name": name, **kwargs})'),
    (r"def update_step\(self, gradient, variable\)",
     "def update_step(self, gradient, variable, learning_rate)"),
    (r"\b(var|v)\.ref\(\)", r"\1.value.ref()"),
    (r"\bevaluate\((\w+\.moving_\w+)\)", r"evaluate(\1.value)"),
    (r"keras\.losses\.mean_squared_error", "keras.losses.MeanSquaredError()"),
    (r"\bopt\.variables\(\)", "opt.variables"),
    (r"checkpoint-\{epoch\}\.h5", "checkpoint-{epoch}.keras"),
    (r"tf\.keras\.backend\.set_value\((.*?), (.*)\)", r"\1.assign(\2)"),
    (r"\bopt\.lr\b", "opt.learning_rate"),
    (r"\bfit_generator\(", "fit("),
    (r"\bevaluate_generator\((\w+), ", r"evaluate(\1, steps="),
    (r",\s*workers=4", ""),
    (r"from keras\.preprocessing(.*) import (image\b|ImageDataGenerator)",
     r"from tensorflow.keras.preprocessing\1 import \2"),
)  # fmt: skip
# Changes for TensorFlow 2: it has no sessions.
_TENSORFLOW_2 = (
    (r"config = tf\.ConfigProto\(\)\n(config\..*\n)*K\.set_session\(.*\n", ""),
)
# No downloads, and only seconds of steps: the examples were written for GPUs.
_SHORTER = (
    (r"tf\.keras\.datasets\.mnist\.load_data", '__import__("example").load_data'),
    (r"from keras\.datasets import mnist", "import example as mnist"),
    (r"\.run\(main,", '.run(__import__("functools").partial('
     '__import__("example").checked, main),'),
    (r"\b500 // ", "12 // "),
    (r"\b10000 // ", "24 // "),
    (r"epochs=24,", "epochs=4,"),
    (r"shuffle\(10000\)", "shuffle(2000)"),
)  # fmt: skip

# Names that are not an interface, but that Horovod's tests import.
_CONFTEST = """
import tensorflow as tf
import collective.tensorflow as hvd
import collective.tensorflow.util

hvd._executing_eagerly = tf.executing_eagerly
collective.tensorflow.util._executing_eagerly = tf.executing_eagerly
hvd.util = collective.tensorflow.util
"""


def copy(checkout: Path, target: Path, word: str) -> None:
    """Copy ``test/`` and ``examples/``, with ``word`` for each word ``horovod``.

    Raises:
        FileNotFoundError: The folder is not a checkout of Horovod.
    """
    for folder in ("test", "examples"):
        shutil.copytree(checkout / folder, target / folder)
        tests = folder == "test"
        found = _WORD_IN_TESTS if tests else _WORD
        edits = _KERAS_3 if tests else _KERAS_3 + _TENSORFLOW_2 + _SHORTER
        for file in (target / folder).rglob("*.py"):
            text = found.sub(word, file.read_text())
            for old, new in edits:
                text = re.sub(old, new, text)
            file.write_text(text)
    (target / "tools").mkdir()
    shutil.copy(Path(__file__).with_name("example.py"), target / "tools")
    if word == "collective":
        (target / "test/parallel/conftest.py").write_text(_CONFTEST)
