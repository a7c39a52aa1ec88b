"""A copy of parts of a Horovod checkout in which the word is replaced.

The copy is in a temporary folder: nothing of Horovod's comes into this repository.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

# But the tests' own tools, which use parts of Horovod's launcher: those are left.
_WORD = re.compile(r"\bhorovod\b(?!\.runner\.(common|util))")

# Names that are no interface, but that Horovod's tests import.
_CONFTEST = '''
import sys
import tensorflow as tf
import collective.tensorflow as hvd
import collective.tensorflow.util

hvd._executing_eagerly = tf.executing_eagerly
collective.tensorflow.util._executing_eagerly = tf.executing_eagerly
hvd.util = collective.tensorflow.util

import unittest.mock
sys.modules.setdefault("mock", unittest.mock)
'''


def copy(checkout: Path, target: Path) -> None:
    """Copies ``test/`` and ``examples/``, each word ``horovod`` as ``collective``.

    Raises:
        FileNotFoundError: The checkout is none of Horovod.
    """
    for folder in ("test", "examples"):
        shutil.copytree(checkout / folder, target / folder)
    for file in target.rglob("*.py"):
        file.write_text(_WORD.sub("collective", file.read_text()))
    (target / "test/parallel/conftest.py").write_text(_CONFTEST)
