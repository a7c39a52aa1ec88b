"""Runs TensorFlow's and Keras' own tests of strategies, from their wheels, on ours.

    python -m tests.strategy_conformance            # in one process, and on two ranks
    python -m tests.strategy_conformance --one      # in one process only

Each test runs with our strategy and with the one of TensorFlow that it replaces: two devices
of one process and ``MirroredStrategy``, two ranks of ``native`` and
``MultiWorkerMirroredStrategy``. The exit code is 0 if ours passes all tests that TensorFlow's
passes, except those that ``EXCEPTIONS`` names with their reasons.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from tests import launch

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

KERAS = (
    "keras.src.backend.tensorflow.optimizer_distribute_test",
    "keras.src.backend.tensorflow.distribute_test",
)
LIBRARY = "tensorflow.python.distribute.strategy_test_lib"
SECONDS = 300
ONE, TWO = ["CPU:0"], ["CPU:0", "CPU:1"]
# By the name of a test: the reason why ours fails, and TensorFlow's does not.
EXCEPTIONS: dict[str, str] = {}


def strategy(which: str, devices: list[str]) -> Any:
    """Return ours in this process (``single``), TensorFlow's (``mirrored``), or by name."""
    import tensorflow as tf

    from collective.distribute import Strategy

    if which == "mirrored":
        return tf.distribute.MirroredStrategy(devices)
    if which == "single":
        return Strategy("single", devices=devices)
    return Strategy(_backend(which))


def _backend(name: str) -> Any:
    from collective import backends

    found: Any = _backend.__dict__.setdefault("found", {})
    if name not in found:
        found[name] = backends.get(name)
    return found[name]


def of_keras(which: str) -> unittest.TestSuite:
    """Return tests in Keras' wheel that make a MirroredStrategy of two devices."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    if which == "single":
        tf.distribute.MirroredStrategy = lambda *_, **__: strategy(which, TWO)
    context._reset_context = lambda: None  # the devices exist already
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


def of_tensorflow(which: str) -> unittest.TestSuite:
    """Return TensorFlow's cases of strategy tests that take one strategy."""
    library = importlib.import_module(LIBRARY)
    suite = unittest.TestSuite()
    for base in vars(library).values():
        if not (inspect.isclass(base) and issubclass(base, unittest.TestCase)):
            continue
        devices = ONE if "OneDevice" in base.__name__ else TWO
        tests = {}
        for name, case in inspect.getmembers(base, inspect.isfunction):
            parameters = list(inspect.signature(case).parameters.values())[1:]
            required = [p for p in parameters if p.default is p.empty]
            takes_one = [p.name for p in required] in (
                ["strategy"],
                ["distribution"],
                ["dist"],
                ["d"],
            )
            if name.startswith("_test_") and takes_one and name in vars(base):
                tests[name[1:]] = _with(name, which, devices)
        kind = type(base.__name__, (base,), tests)
        suite.addTests(kind(name) for name in tests)
    return suite


def _with(name: str, which: str, devices: list[str]) -> Any:
    def test(self: Any) -> None:
        getattr(self, name)(strategy(which, devices))

    return test


def run(which: str, file: str) -> None:
    """Run all tests, and write the outcome of each to a file, by its name."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    in_process = which in ("single", "mirrored")
    if in_process:
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, two)
    else:
        file += f".{_backend(which).rank}"  # before TensorFlow's first operation
    # It derives from Mirrored.
    importlib.import_module("collective.distribute.strategy")
    suites = [of_tensorflow(which)]
    if in_process:
        suites.append(of_keras(which))
    result = _Outcomes(sys.stderr, True, 1)
    unittest.TestSuite(suites).run(result)
    result.printErrors()
    Path(file).write_text(json.dumps(result.outcomes))


class _Outcomes(unittest.TextTestResult):
    """Keeps the outcome of each test."""

    def __init__(self, *args: Any):
        super().__init__(unittest.runner._WritelnDecorator(args[0]), *args[1:])
        self.outcomes: dict[str, str] = {}

    def _keep(self, test: Any, outcome: str) -> None:
        self.outcomes[test.id().removeprefix("__main__.")] = outcome

    def addSuccess(self, test: Any) -> None:
        super().addSuccess(test)
        self._keep(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self._keep(test, "skipped")

    def addFailure(self, test: Any, error: Any) -> None:
        super().addFailure(test, error)
        self._keep(test, "failed")

    def addError(self, test: Any, error: Any) -> None:
        super().addError(test, error)
        self._keep(test, "failed")


def outcomes(which: str, folder: str, verbose: bool) -> dict[str, str]:
    """Return for each test the worst outcome of all ranks."""
    file = os.path.join(folder, which)
    words = [sys.executable, "-m", "tests.strategy_conformance", "--run", which, file]
    if which not in ("single", "mirrored"):
        words = [*launch.command(which, 2), *words]
    _, output = launch.run(words, launch.environment(), SECONDS)
    files = sorted(Path(folder).glob(f"{which}*"))
    if not files:
        raise SystemExit(f"{which} ended without outcomes:\n{output[-4000:]}")
    if verbose:
        print(output)
    found: dict[str, str] = {}
    order = ["skipped", "passed", "failed"]
    for each in files:
        for name, outcome in json.loads(each.read_text()).items():
            found[name] = max(found.get(name, "skipped"), outcome, key=order.index)
    return found


def compare(ours: str, stock: str, verbose: bool) -> int:
    """Print failures; return how many of ours are without a reason."""
    with tempfile.TemporaryDirectory() as folder:
        mine, theirs = (outcomes(which, folder, verbose) for which in (ours, stock))
    bad = [name for name, outcome in mine.items() if outcome == "failed"]
    also = [name for name in bad if theirs.get(name) == "failed"]
    new = [name for name in bad if name not in also and name not in EXCEPTIONS]
    count = {how: list(mine.values()).count(how) for how in ("passed", "skipped")}
    print(
        f"{ours}: {len(mine)} tests, {count['passed']} passed, {count['skipped']} "
        f"skipped, {len(bad)} failed; {stock} fails in {len(also)} of these"
    )
    for name in bad:
        why = f"so does {stock}" if name in also else EXCEPTIONS.get(name, "NO REASON")
        print(f"   {name}: {why}")
    return len(new)


def main() -> int:
    """Return 1 if a failure of ours has no reason."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--one", action="store_true", help="in one process only")
    parser.add_argument("--verbose", action="store_true", help="what the tests print")
    parser.add_argument("--run", nargs=2, metavar=("WHICH", "FILE"), help="one kind")
    args = parser.parse_args()
    if args.run:
        run(*args.run)
        return 0
    bad = compare("single", "mirrored", args.verbose)
    if not args.one:
        bad += compare("native", "tf-multiworker", args.verbose)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
