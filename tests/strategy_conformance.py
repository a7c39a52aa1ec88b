"""Runs TensorFlow's and Keras' own tests of strategies against ours, from their wheels.

    python -m tests.strategy_conformance

On two devices of one process: these tests look at the replicas of all devices at once.
What crosses processes is tested by ``tests/training/distribute``. Exit code 0 where
nothing fails but what ``EXCEPTIONS`` names with its reason.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import unittest
from typing import Any
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

KERAS = (
    "keras.src.backend.tensorflow.optimizer_distribute_test",
    "keras.src.backend.tensorflow.distribute_test",
)
LIBRARY = "tensorflow.python.distribute.strategy_test_lib"
# By the name of a test: why it fails.
EXCEPTIONS: dict[str, str] = {}


def strategy() -> Any:
    """Ours, on two devices of this process."""
    from collective.distribute import Strategy

    return Strategy("single", devices=["CPU:0", "CPU:1"])


def of_keras() -> unittest.TestSuite:
    """The tests in Keras' wheel, which make a MirroredStrategy."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    tf.distribute.MirroredStrategy = lambda *_, **__: strategy()
    context._reset_context = lambda: None  # the devices are there
    tf.config.set_logical_device_configuration = mock.Mock()
    suite = unittest.TestSuite()
    for name in KERAS:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            print(f"not in this wheel: {name}: {error}")
            continue
        suite.addTests(unittest.defaultTestLoader.loadTestsFromModule(module))
    return suite


def of_tensorflow() -> unittest.TestSuite:
    """The cases of TensorFlow's library of strategy tests that take one strategy."""
    library = importlib.import_module(LIBRARY)
    suite = unittest.TestSuite()
    for base in vars(library).values():
        if not (inspect.isclass(base) and issubclass(base, unittest.TestCase)):
            continue
        tests = {}
        for name, case in inspect.getmembers(base, inspect.isfunction):
            parameters = list(inspect.signature(case).parameters.values())[1:]
            required = [p for p in parameters if p.default is p.empty]
            takes_one = [p.name for p in required] in (["strategy"], ["distribution"])
            if name.startswith("_test_") and takes_one and name in vars(base):
                tests[name[1:]] = _with_ours(name)
        kind = type(base.__name__, (base,), tests)
        suite.addTests(kind(name) for name in tests)
    return suite


def _with_ours(name: str) -> Any:
    def test(self: Any) -> None:
        getattr(self, name)(strategy())

    return test


def main() -> int:
    """Prints each failure; returns 1 where one has no reason."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    importlib.import_module("collective.distribute.strategy")  # derives from Mirrored
    suite = unittest.TestSuite([of_tensorflow(), of_keras()])
    result = unittest.TextTestRunner(verbosity=1).run(suite)
    bad = [str(test) for test, _ in [*result.failures, *result.errors]]
    unnamed = [name for name in bad if name.split(" ")[0] not in EXCEPTIONS]
    print(f"{result.testsRun} run, {len(bad)} failed, {len(unnamed)} without a reason")
    for name in unnamed:
        print("  ", name)
    return int(bool(unnamed))


if __name__ == "__main__":
    sys.exit(main())
