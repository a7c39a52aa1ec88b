"""Runs Keras' own tests on two ranks of an unedited script, and beside them on plain Keras.

    python -m tests.keras_own CHECKOUT                    # trainers, callbacks, models, ...
    python -m tests.keras_own CHECKOUT --only callback    # files with this in their name

CHECKOUT is a clone of Keras at the tag of the installed version; where the wheel has a test
file, that is taken. Every rank runs every test, and each begins when all ranks have ended the
one before. A test that ends the job, or hangs, counts as failed, and the next job begins with
the test after it. The exit code is 0 if ours pass all tests that plain Keras passes, but for
those that ``EXCEPTIONS`` names with their reasons.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests import launch

FOLDERS = ("trainers", "trainers.data_adapters", "callbacks", "models")
# What some test files import at their top and use with other backends of Keras alone.
UNUSED = ("jax",)
SECONDS = 1800
# For how long a test may wait for the other rank: an iterator of an earlier test that failed,
# which TensorFlow destroys late, may stand still for a minute.
TEST_SECONDS = 180
# By a pattern for names of tests: the reason why they fail on ranks and not in plain Keras.
EXCEPTIONS = {
    "remote_monitor_test.py": "RemoteMonitor posts on rank 0 alone",
    "swap_ema_weights_with_tf_distribute": "it resets the context of TensorFlow, and with "
    "it whatever the job has made",
}


def copy_tests(checkout: Path, only: str, into: Path) -> None:
    """Copy the test files into a folder: a script's files, and not those of a library."""
    for name in FOLDERS:
        package = importlib.import_module(f"keras.src.{name}")
        for folder in (
            checkout.joinpath(*package.__name__.split(".")),
            *package.__path__,
        ):
            for file in Path(folder).glob("*_test.py"):
                if only in f"{package.__name__}.{file.stem}":
                    shutil.copy(file, into)


@contextlib.contextmanager
def models_for_trainers() -> Iterator[None]:
    """Inside, what tests import as Keras' trainer is a ``keras.Model``.

    Their models derive from it and from a layer, and a script's are models.
    """
    import keras
    from keras.src.backend.tensorflow import trainer

    stock = trainer.TensorFlowTrainer

    class TensorFlowTrainer(keras.Model):
        def __init__(self) -> None:
            stock.__init__(self)

        def __init_subclass__(cls) -> None:
            super().__init_subclass__()
            after = cls.__mro__[cls.__mro__.index(keras.Model) + 1 :]
            before = cls.__mro__[: cls.__mro__.index(TensorFlowTrainer)]
            for name in ("call", "build", "get_config"):
                if not any(name in vars(kind) for kind in before):
                    of = next((kind for kind in after if name in vars(kind)), None)
                    if of is not None:
                        setattr(cls, name, vars(of)[name])

    with mock.patch.object(trainer, "TensorFlowTrainer", TensorFlowTrainer):
        yield


def temporary_folder(_: Any) -> str:
    """Make a folder for a test, which all ranks share: a script asks, and not a library."""
    return tempfile.mkdtemp(dir=os.getcwd())


class Ranks:
    """A plugin of pytest by which the ranks stay together.

    Args:
        file: Gets a line for each test that has begun or ended.
        done: Names of the tests that are not run any more.
    """

    def __init__(self, file: Path, done: Sequence[str]):
        self._file, self._done = file, set(done)
        self._bad: dict[str, str] = {}
        self._backend: Any = None
        distribute = sys.modules.get("collective.distribute.unedited")
        if distribute is not None and distribute._distribution is not None:
            self._backend = distribute._distribution.job.backend

    def _write(self, name: str, outcome: str, why: str = "") -> None:
        # Not by ``open``: what a rank other than 0 appends so is kept from the disk.
        file = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, json.dumps([name, outcome, why]).encode() + b"\n")
        os.close(file)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        """Make importable what the tests of this backend do not use."""
        missing = []
        for name in UNUSED:
            try:
                importlib.import_module(name)
            except ImportError:
                sys.modules[name] = types.ModuleType(name)
                missing.append(name)
        with models_for_trainers():
            yield
        for name in missing:
            del sys.modules[name]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what earlier jobs have run."""
        items[:] = [item for item in items if item.nodeid not in self._done]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Begin a test once every rank has come to it, with the same random numbers."""
        import keras

        self._write(nodeid, "begun")
        if self._backend is not None:
            self._backend.barrier()
        keras.utils.set_random_seed(1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of a test."""
        if report.failed:
            self._bad[report.nodeid] = report.longreprtext
        if report.when == "teardown" or report.skipped:
            outcome = "skipped" if report.skipped else "passed"
            why = self._bad.get(report.nodeid, "")
            self._write(report.nodeid, "failed" if why else outcome, why)


def run(checkout: Path, folder: str) -> int:
    """Run a folder's tests in this process; write the outcome of each into the folder."""
    from keras.src import testing

    os.chdir(folder)
    testing.TestCase.get_temp_dir = temporary_folder
    sys.path.append(str(checkout))  # for its conftest.py
    rank = os.environ.get("COLLECTIVE_RANK", "0")
    done = Path(folder, "done.json")
    plugin = Ranks(
        Path(folder, f"rank{rank}"),
        json.loads(done.read_text()) if done.exists() else [],
    )
    words = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "conftest",
        "-W",
        "ignore",
        "--continue-on-collection-errors",  # of files that import other packages
    ]
    where = ["--rootdir", folder, "-c", os.devnull]
    return int(pytest.main([*words, *where, folder], plugins=[plugin]))


def outcomes(
    on_ranks: bool, checkout: Path, only: str, verbose: bool
) -> dict[str, tuple[str, str]]:
    """Return for each test the worst outcome of all ranks, and its reason."""
    found: dict[str, tuple[str, str]] = {}
    words = ["-m", "tests.keras_own", str(checkout), "--run"]
    before = [*launch.command("native", 2), "--keras"] if on_ranks else []
    start = [*before, *(["python"] if on_ranks else [sys.executable])]
    environment = launch.environment(
        COLLECTIVE_TIMEOUT=str(TEST_SECONDS),
        COLLECTIVE_RECORDER="",
        PYTHONPATH=str(launch.ROOT),  # tests need SciPy, which tests/lean hides
    )
    while True:
        with tempfile.TemporaryDirectory(prefix="keras-own-") as folder:
            copy_tests(checkout, only, Path(folder))
            Path(folder, "done.json").write_text(json.dumps([*found]))
            code, printed = launch.run([*start, *words, folder], environment, SECONDS)
            if verbose:
                print(printed)
            ended, last = _read(sorted(Path(folder).glob("rank*")))
        found |= ended
        if last is None:
            if not found:
                raise SystemExit(f"no test has run:\n{printed[-4000:]}")
            return found
        found[last] = "failed", f"the job ended ({code}):\n{printed[-3000:]}"


def _read(files: Sequence[Path]) -> tuple[dict[str, tuple[str, str]], str | None]:
    """Return the outcomes in some files, and the test in which the job has ended."""
    order = ["skipped", "passed", "failed"]
    found: dict[str, tuple[str, str]] = {}
    begun: list[list[str]] = []
    ended: list[set[str]] = []
    for file in files:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        begun.append([name for name, outcome, _ in lines if outcome == "begun"])
        ended.append({name for name, outcome, _ in lines if outcome != "begun"})
        for name, outcome, why in lines:
            before = found.get(name, ("skipped", ""))
            if outcome != "begun":
                rank = file.name.removeprefix("rank")
                mine = outcome, why and f"rank {rank}: {why}"
                found[name] = max(before, mine, key=lambda pair: order.index(pair[0]))
    names = list(dict.fromkeys(name for names in begun for name in names))
    last = next((n for n in names if not all(n in some for some in ended)), None)
    found.pop(last or "", None)
    return found, last


def compare(checkout: Path, only: str, verbose: bool) -> int:
    """Print what fails on ranks and not in plain Keras; return how many have no reason."""
    stock, ours = (outcomes(on, checkout, only, verbose) for on in (False, True))
    bad = 0
    for name, (outcome, why) in ours.items():
        if outcome != "failed" or stock.get(name, ("failed",))[0] == "failed":
            continue
        reason = next((r for p, r in EXCEPTIONS.items() if re.search(p, name)), "")
        bad += not reason
        print(f"{name}: {reason or 'NO REASON'}")
        if not reason:
            lines = why.splitlines() if verbose else why.splitlines()[-12:]
            print("\n".join(f"    {line}" for line in lines))
    for title, of in (("plain Keras", stock), ("two ranks", ours)):
        found = [outcome for outcome, _ in of.values()]
        counts = {how: found.count(how) for how in ("passed", "failed", "skipped")}
        print(f"{title}: {len(of)} tests, {counts}")
    return bad


def main() -> int:
    """Return 1 if a failure of ours has no reason."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", default="", help="test modules with this in the name")
    parser.add_argument("--verbose", action="store_true", help="what the tests print")
    parser.add_argument("--run", metavar="FOLDER", help="as one rank")
    args = parser.parse_args()
    if args.run:
        return run(args.checkout.resolve(), args.run)
    return int(compare(args.checkout.resolve(), args.only, args.verbose) > 0)


if __name__ == "__main__":
    sys.exit(main())
