"""The promise to Keras programs: unedited, on any number of ranks, the same model.

Stock Keras trains every program of examples/keras, then ranks do. A job runs many programs one
after another in the same processes (``keras_programs.py``): alone, each gives the same bits,
and a launch takes longer than most of them.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests import launch
from tests.training.unedited.keras_programs import EXAMPLES, PROGRAMS, SECONDS, saved_as

DRIVER = "tests/training/unedited/keras_programs.py"
NAMES = sorted(file.stem for file in PROGRAMS.glob("*.py"))
# Programs in make test: the most different calls of fit, on two native ranks.
SOME = ["callbacks", "text_classification"]


class Tolerance(NamedTuple):
    """The allowed distance between the models of ranks and of one process.

    Attributes:
        weights: For a variable of the model, relative to its largest entry, or to
            ``SMALL`` if that is larger.
        state: The same for a variable of the optimizer, with any largest entry.
        numbers: The same for the numbers of a line that the program prints.
    """

    weights: float
    state: float
    numbers: float


# A bias begins at zero; its error matters in relation to the values that it is added to.
SMALL = 0.1
EXACT = {
    "float32": Tolerance(weights=1e-6, state=1e-5, numbers=1e-5),
    # The history and programs keep nine digits of a number.
    "float64": Tolerance(weights=1e-10, state=1e-10, numbers=1e-8),
}


@dataclass(frozen=True)
class Looser:
    """A program that cannot be equal to rounding, and the reason.

    Attributes:
        why: The reason.
        float32: Its tolerance.
        float64: Its tolerance in float64; None if only rounding in float32 differs.
    """

    why: str
    float32: Tolerance
    float64: Tolerance | None = None


LOOSER = {
    "batchnorm": Looser(
        "stock Keras without oneDNN is 1e-6 away: statistics of few rows amplify rounding",
        Tolerance(1e-5, 1e-4, 1e-5),
    ),
    "compiled_step": Looser(  # examples/loops
        "as batchnorm: float64 is equal to 1e-10",
        Tolerance(1e-5, 1e-4, 1e-5),
    ),
    "keras_on_batch": Looser(  # examples/loops
        "as batchnorm: a momentum of one bias; float64 is equal to 1e-10",
        Tolerance(1e-6, 1e-4, 1e-5),
    ),
    "pydataset": Looser(
        "stock Keras without oneDNN is 1.7e-6 away after 52 steps with momentum",
        Tolerance(5e-6, 2e-5, 1e-5),
    ),
    "retrieval": Looser(
        "stock Keras without oneDNN is 1e-6 away on an Intel Xeon: rows are coupled",
        Tolerance(3e-6, 1e-5, 1e-5),
    ),
    "text_classification": Looser(
        "look-ups of a row are added up, then once to the table: float32 rounds otherwise",
        Tolerance(3e-6, 3e-5, 1e-5),
        Tolerance(1e-10, 1e-10, 1e-8),
    ),
    "mixed_precision": Looser(
        "bfloat16 has eight bits: one rounding the other way is 0.4 % of a gradient",
        Tolerance(0.1, 2, 0.1),
        Tolerance(0.1, 2, 0.1),
    ),
    "transformer": Looser(
        "the gradient of a key's bias is zero but for rounding, and Adam divides by it",
        Tolerance(5e-3, np.inf, 1e-5),
        Tolerance(1e-10, np.inf, 1e-8),
    ),
}

# A callback object keeps its record on rank 0 only (docs/reference/sharp-bits.md), and only
# rank 0 shows its output: other ranks may print other numbers of it.
REMEMBERED = {"callbacks": {"epochs"}}

pytestmark = pytest.mark.launches


def test_there_are_enough_programs():
    programs = {file.stem for file in EXAMPLES.glob("*/*.py")}
    assert len(NAMES) >= 25 and set(SOME) <= set(NAMES) and set(LOOSER) <= programs
    for name in NAMES:
        source = (PROGRAMS / f"{name}.py").read_text()
        assert not re.search(r"\b(collective|horovod|distribute)\b", source), name


@pytest.fixture(scope="session")
def stock(once):
    """Return a folder with stock Keras' models, computed once for all workers."""

    def folder(precision: str, names: list[str]) -> Path:
        def train(made: Path) -> None:
            program = [sys.executable, DRIVER, str(made), *names]
            run(program, made, precision, len(names))

        return once(f"stock-{precision}-{len(names)}-{names[0]}", train)

    return folder


def run(command: list[str], folder: Path, precision: str, programs: int) -> str:
    """Run a job that trains programs; return its output and how it ended."""
    settings = {"floatx": precision, "epsilon": 1e-7, "backend": "tensorflow"}
    (folder / "keras.json").write_text(json.dumps(settings))
    env = launch.environment(
        forked=True, PYTHONHASHSEED="0", KERAS_HOME=str(folder), TMPDIR=str(folder)
    )
    code, output = launch.run(command, env, 120 + 15 * programs + SECONDS)
    return f"exit code {code}\n{output[-4000:]}"


def differences(got: Path, wanted: Path, name: str, rank: int, precision: str) -> str:
    """Return the errors of a rank's model on one line; empty if there are none."""
    if (failed := got / f"{name}.{rank}.error").exists():
        return failed.read_text().strip().rpartition("\n  ")[2].partition("\n")[2]
    if not (got / f"{name}.{rank}.npz").exists():
        return "did not end"
    allowed = EXACT[precision]
    if name in LOOSER:
        allowed = getattr(LOOSER[name], precision) or allowed
    found = []
    with (
        np.load(got / f"{name}.{rank}.npz") as values,
        np.load(wanted / f"{name}.0.npz") as reference,
    ):
        if len(values.files) != len(reference.files):
            return f"{len(values.files)} variables, not {len(reference.files)}"
        for ours, theirs in zip(values.files, reference.files, strict=True):
            state = theirs.split()[0].endswith("optimizer")
            limit = allowed.state if state else allowed.weights
            error = distance(values[ours], reference[theirs], 0 if state else SMALL)
            if not error <= limit:
                found.append((error / limit, f"{theirs}: {error:.2g} relative"))
    printed, expected = numbers(got, name, rank), numbers(wanted, name, 0)
    if [n for n, _ in printed] != [n for n, _ in expected]:
        return f"prints {[n for n, _ in printed]}, not {[n for n, _ in expected]}"
    for (label, ours), (_, theirs) in zip(printed, expected, strict=True):
        if rank and label in REMEMBERED.get(name, ()):
            continue
        error = distance(ours, theirs, SMALL)
        if not error <= allowed.numbers:
            found.append((error / allowed.numbers, f"{label}: {error:.2g} relative"))
    found.sort(reverse=True)
    return "; ".join(text for _, text in found[:3]) + (
        f"; {len(found)} in all" if len(found) > 3 else ""
    )


def distance(value: np.ndarray, reference: np.ndarray, least: float) -> float:
    """Return the largest difference, relative to the largest entry or ``least``."""
    if value.shape != reference.shape:
        return np.inf
    value, reference = value.astype("float64"), reference.astype("float64")
    largest = max(np.abs(reference).max(initial=0), least) or 1.0
    return float(np.abs(value - reference).max(initial=0) / largest)


def numbers(folder: Path, name: str, rank: int) -> list[tuple[str, np.ndarray]]:
    """Return the lines ``label: number number ...`` that a program has printed."""
    found = []
    for line in (folder / f"{name}.{rank}.txt").read_text().splitlines():
        if parts := re.fullmatch(r"(\w+): ([-+.\de ]+|nan)", line):
            found.append((parts[1], np.array(parts[2].split(), "float64")))
    return found


def check(folder, stock, backend, ranks, precision, names, *options):
    """Train programs on ranks, and compare each rank's model with stock Keras."""
    if importlib.util.find_spec("collective.distribute") is None:
        pytest.skip("there is no collective.distribute, which runs unedited programs")
    if backend == "mpi":
        pytest.importorskip("mpi4py")
    wanted = stock(precision, names)
    for name in names:
        assert differences(wanted, wanted, name, 0, precision) == "", "stock Keras"
    printed = train(folder, backend, ranks, precision, names, options)
    wrong = {
        f"{name} on rank {rank}": text
        for name in names
        for rank in range(ranks)
        if (text := differences(folder, wanted, name, rank, precision))
    }
    table = "\n".join(f"{where}: {text}" for where, text in wrong.items())
    assert not wrong, f"{table}\n{printed}"
    saved = [n for n in names if not (folder / saved_as(n)).exists()]
    assert saved == [], "saved nothing"


def train(folder, backend, ranks, precision, names, options=()):
    """Train programs on ranks, in as few jobs as possible; return their output."""
    runner = [sys.executable, "-m", "collective.distribute", "--backend", backend]
    runner += options
    start = [*launch.command(backend, ranks), *runner, DRIVER, str(folder)]
    printed, remaining = "", list(names)
    while remaining:
        printed += run([*start, *remaining], folder, precision, len(remaining))
        # If a job has ended before its last program, the next job begins after that.
        ended = [i for i, n in enumerate(remaining) if finished(folder, n, ranks)]
        remaining = remaining[max(ended, default=-1) + 2 :]
    return printed


def finished(folder: Path, name: str, ranks: int) -> bool:
    """Return whether every rank has trained a program, or failed in it."""
    return all(
        any((folder / f"{name}.{rank}.{end}").exists() for end in ("npz", "error"))
        for rank in range(ranks)
    )


def test_some_programs_on_two_ranks(tmp_path, stock):
    check(tmp_path, stock, "native", 2, "float32", SOME)


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("backend", ["native", "mpi"])
def test_every_program(tmp_path, stock, backend, ranks, precision):
    check(tmp_path, stock, backend, ranks, precision, NAMES)
