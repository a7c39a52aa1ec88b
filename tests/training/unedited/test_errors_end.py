"""An error of the script's own code is raised as by Python alone, and then the job is over."""

from __future__ import annotations

import itertools
import re
import sys
import time
from pathlib import Path

import pytest

from tests import launch
from tests.training.unedited import errors_script

SCRIPT = str(Path(errors_script.__file__))
# For how long a job may take to end: without a limit if a rank waits for another one.
SECONDS = 30.0
JOBS = {
    "no launcher": [],
    "one": ["-np", "1"],
    "two": ["-np", "2"],
    "elastic": ["-np", "2", "--min-np", "1"],
    "pieces": ["-np", "2", "--set", "shard_weights=True"],
}
OF_EACH_CHANGE = {("one", "fit", "callback"), ("two", "fit", "generator")}
LAUNCHED = [name for name, words in JOBS.items() if words]
pytestmark = [pytest.mark.launches, launch.NEEDS_CORE]


def matrix(*names: str, but: str) -> list:
    return [
        pytest.param(n, marks=[] if n == but else pytest.mark.matrix) for n in names
    ]


def run(job: str, folder: Path, *arguments: str) -> list[str]:
    """Run the script, which fails; return the lines before its last error."""
    launcher = [sys.executable, "-m", "collective.launch"]
    start = [*launcher, *JOBS[job], "--keras", SCRIPT]
    if "collective" in arguments:
        start = [*(launcher if JOBS[job] else []), *JOBS[job], sys.executable, SCRIPT]
    environment = launch.environment(forked=True, COLLECTIVE_RECORDER=str(folder))
    code, printed = launch.run([*start, *arguments], environment, 120, folder)
    ended = time.time()
    assert code == 1, printed
    lines = [re.sub(r"^\[[\d-]+\] ", "", line) for line in printed.splitlines()]
    raised = next(i for i, line in enumerate(lines) if line.startswith("RAISES"))
    assert ended - float(lines[raised].split()[1]) < SECONDS
    shown = lines[raised:].count("Traceback (most recent call last):")
    # Ranks do not know whether others have failed alike in the middle of a step.
    assert shown == 1 or (arguments and shown == 2), printed
    return lines[:raised]


@pytest.fixture(scope="module")
def stock(once) -> list[str]:
    """Return what the script prints before its end, by Python alone."""

    def train(made: Path) -> None:
        words = [sys.executable, SCRIPT]
        code, printed = launch.run(words, launch.environment(forked=True), 120)
        assert code == 1, printed
        (made / "printed").write_text(printed.partition("RAISES")[0])

    return (once("errors", train) / "printed").read_text().splitlines()


@pytest.mark.parametrize("job", matrix(*LAUNCHED, but="two"))
def test_a_script_may_catch_what_all_ranks_raise(job, stock, tmp_path):
    """Errors of callbacks, data and the script at batch 0, 6 and the last, of each call."""
    cases = [line for line in stock if line.split()[0] in errors_script.CALLS]
    assert len(cases) == 30 and "fit callback 0 Own" in cases
    found = run(job, tmp_path)
    assert [line for line in found if line in cases] == cases


@pytest.mark.parametrize("where", matrix("loss", "step", but="step"))
@pytest.mark.parametrize("job", matrix(*LAUNCHED, but="two"))
def test_an_error_within_a_step_ends_the_job(job, where, tmp_path):
    run(job, tmp_path, "fit", where)


@pytest.mark.parametrize(
    "job, call, where",
    [
        pytest.param(*case, marks=[] if case in OF_EACH_CHANGE else pytest.mark.matrix)
        for case in itertools.product(
            ("no launcher", "one", "two"),
            ("fit", "evaluate", "predict"),
            ("callback", "dataset", "generator"),
        )
    ],
)
def test_an_error_under_collective_fit_ends_the_job(job, call, where, tmp_path):
    run(job, tmp_path, call, where, "collective")
