"""A copy of parts of a Horovod checkout in which the word is replaced.

The copy is in a temporary folder: nothing of Horovod's comes into this repository.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

# But the tests' own tools, which use parts of Horovod's launcher: those are left.
_WORD = re.compile(r"\bhorovod\b(?!\.runner\.(common|util))")

# What Keras 3 forces: arguments that have gone or are new, and variables without ref().
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
    (r"keras\.losses\.mean_squared_error", "keras.losses.MeanSquaredError()"),
    (r"\bopt\.variables\(\)", "opt.variables"),
    (r"checkpoint-\{epoch\}\.h5", "checkpoint-{epoch}.keras"),
    (r"tf\.keras\.backend\.set_value\((.*?), (.*)\)", r"\1.assign(\2)"),
)  # fmt: skip
# Examples take minutes on the machines that they were written for.
_SHORTER = (
    (r"\b500 // ", "12 // "),
    (r"\b10000 // ", "24 // "),
    (r"epochs=24\b", "epochs=4"),
    (r"shuffle\(10000\)", "shuffle(2000)"),
)

# Names that are no interface, but that Horovod's tests import.
_CONFTEST = """
import tensorflow as tf
import collective.tensorflow as hvd
import collective.tensorflow.util

hvd._executing_eagerly = tf.executing_eagerly
collective.tensorflow.util._executing_eagerly = tf.executing_eagerly
hvd.util = collective.tensorflow.util
"""


def copy(checkout: Path, target: Path) -> None:
    """Copies ``test/`` and ``examples/``, each word ``horovod`` as ``collective``.

    Raises:
        FileNotFoundError: The checkout is none of Horovod.
    """
    for folder in ("test", "examples"):
        shutil.copytree(checkout / folder, target / folder)
    for file in target.rglob("*.py"):
        text = _WORD.sub("collective", file.read_text())
        shorter = _SHORTER if "examples" in file.parts else ()
        for old, new in (*_KERAS_3, *shorter):
            text = re.sub(old, new, text)
        file.write_text(text)
    (target / "test/parallel/conftest.py").write_text(_CONFTEST)
