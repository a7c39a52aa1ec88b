"""Runs a test file on several ranks at once, and is what each of those ranks runs.

``launch`` is for a test in a plain pytest session: it starts N processes, waits, and
returns the outcome of every test on every rank. As a script, this file is one rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from collective import library, recorder
from collective.launch import processes
from tests.lean import forkserver

ROOT = Path(__file__).resolve().parent.parent
# Of processes that tests start: sitecustomize.py in tests/lean says what for.
PYTHONPATH = f"{ROOT / 'tests' / 'lean'}{os.pathsep}{ROOT}"

# Set for the ranks of a launch: the backend under test, and where they write results.
BACKEND = "COLLECTIVE_TEST_BACKEND"
REFERENCE = "COLLECTIVE_TEST_REFERENCE"
MUTATION = "COLLECTIVE_TEST_MUTATION"
RESULTS = "COLLECTIVE_TEST_RESULTS"
DEADLINE = "COLLECTIVE_TEST_DEADLINE"
# Set by make test-gpu: what it runs of other tests sees the GPUs.
ON_GPU = "TESTS_ON_GPU"
# Of a session and its workers: the path of the servers that fork ranks.
FORKSERVER = "TESTS_FORKSERVER"
# The folder of Open MPI's shared memory.
SEGMENTS = "OMPI_MCA_btl_sm_backing_directory"

# Many times as long as what a test waits for takes, as the machine may be busy: to import
# TensorFlow takes 40 s on one that is.
PATIENCE_SECONDS = 120.0
# By so much a deadline is longer than what is enough on a machine that has little to do.
PATIENCE = 4

# Process backends and the launcher that starts their ranks.
LAUNCHERS = {
    "mpi": "mpirun",
    "tf-multiworker": "mpirun",
    "native": "collectiverun",
    "horovod": "horovodrun",
}

NEEDS_CORE = pytest.mark.skipif(
    not library.path().exists(), reason="the core was not built"
)
NOT_ON_RANKS = pytest.mark.skipif(
    "COLLECTIVE_RANK" in os.environ, reason="starts ranks itself"
)
#: Of a file whose tests start jobs of their own.
STARTS_RANKS = [pytest.mark.launches, NOT_ON_RANKS, NEEDS_CORE]


def launched() -> bool:
    """Whether this process is one of the ranks of a launch."""
    return BACKEND in os.environ


@dataclass(frozen=True)
class Launch:
    """The result of a launch.

    Attributes:
        code: Exit status; None if the launch was killed at its deadline.
        output: What the ranks printed.
        outcomes: For each rank, ``passed``, ``failed`` or ``skipped`` of each test.
    """

    code: int | None
    output: str
    outcomes: list[dict[str, str]]

    def passed(self, *, skips: bool = False) -> int:
        """How many tests have passed, the same ones on every rank.

        Args:
            skips: Whether there may be others, which were skipped.

        Raises:
            AssertionError: One has not, or ranks differ; or the launch failed.
        """
        assert self.code == 0, self.output
        first, *others = self.outcomes
        assert all(outcomes == first for outcomes in others), self.output
        found = [*first.values()]
        assert {*found} <= {"passed", *["skipped"] * skips}, self.output
        return found.count("passed")


def command(backend: str, ranks: int) -> list[str]:
    """The words that start ranks, to put before the program."""
    name = LAUNCHERS[backend]
    if name == "collectiverun":
        return [sys.executable, "-m", "collective.launch", "-np", str(ranks)]
    program = processes.find_program(name) or name
    more = ["--oversubscribe"] if name == "mpirun" else []
    if name == "horovodrun" and ranks > 2:
        more = ["--gloo"]  # by MPI with 2: so both are tested
    return [program, "-np", str(ranks), *more]


def redirect_dumps(config: pytest.Config) -> None:
    """Keeps the flight recorder's dumps of the events that tests cause out of the checkout."""
    folder = tempfile.TemporaryDirectory(prefix="dumps-")
    os.environ[recorder.VARIABLE] = folder.name
    config.add_cleanup(folder.cleanup)


def redirect_segments(config: pytest.Config) -> None:
    """Gives Open MPI a folder for its shared memory: a killed mpirun leaves files there."""
    memory = "/dev/shm"
    folder = tempfile.TemporaryDirectory(
        dir=memory if os.path.isdir(memory) else None, ignore_cleanup_errors=True
    )
    os.environ[SEGMENTS] = folder.name
    config.add_cleanup(folder.cleanup)


def prepare_forkserver(config: pytest.Config) -> None:
    """Has the ranks that this session starts forked off a process with TensorFlow."""
    folder = tempfile.TemporaryDirectory(prefix="forkserver-")
    os.environ[FORKSERVER] = os.path.join(folder.name, str(os.getpid()))
    config.add_cleanup(folder.cleanup)


def environment(*, forked: bool = False, **more: str) -> dict[str, str]:
    """The environment of a process that a test starts: that of no launcher's rank.

    Args:
        forked: Whether ranks below it are forked off a process that has TensorFlow: for
            tests of what they compute, not of processes, as it is nobody's child.
        more: Further variables.
    """
    prefixes = (
        "OMPI_",
        "PMI",
        "PRTE_",
        "HOROVOD_",
        "SLURM_",
        "COLLECTIVE_",
        "TF_CONFIG",
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
    env |= {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": PYTHONPATH}
    # Of two ranks that import TensorFlow, one may be much later than the other.
    env["COLLECTIVE_START_TIMEOUT"] = "300"
    env[recorder.VARIABLE] = os.environ.get(recorder.VARIABLE, "")
    # The session's folder; and a core that is not the installed one.
    for name in (SEGMENTS, "COLLECTIVE_LIBRARY"):
        if name in os.environ:
            env[name] = os.environ[name]
    # Several tests share the cores: a rank that waits in MPI yields its core.
    env["OMPI_MCA_mpi_yield_when_idle"] = "1"
    # As where the environment is activated: horovodrun looks for mpirun there.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    if os.geteuid() == 0:
        env |= dict.fromkeys(
            ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"
        )
    if forked and (path := os.environ.get(FORKSERVER)):
        forkserver.start(path, env)
        env[forkserver.VARIABLE] = path
    return env | more


def run(
    arguments: list[str], env: dict[str, str], seconds: float, folder: Path = ROOT
) -> tuple[int | None, str]:
    """Runs a command in a folder; at a deadline ends it and all its descendants.

    Args:
        arguments: Program and arguments.
        env: Its environment.
        seconds: That are enough where the machine is not busy.
        folder: Where it runs.

    Returns:
        Exit status, None past the deadline; and the output, stderr included.
    """
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            arguments,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(PATIENCE * seconds)
        except BaseException as error:
            _end(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = None
        printed.seek(0)
        return code, printed.read().decode(errors="replace")


def capture(
    command: Sequence[Any], seconds: float = 60, **options: Any
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run``, in ``environment()``: the two outputs apart, as text.

    ``seconds`` are enough where the machine is not busy; the deadline is later.
    """
    options = {"env": environment(), "timeout": PATIENCE * seconds} | options
    return subprocess.run(command, capture_output=True, text=True, **options)


def await_that(condition: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> Any:
    """Asks until the answer is true, and returns it; fails after a while."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "this did not come about"
        time.sleep(0.02)
    return found


def _end(process: subprocess.Popen) -> None:
    """Ends a process, its group, and its descendants in groups of their own."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(3)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(60)


def launch(
    backend: str,
    ranks: int,
    tests: list[str],
    reference: Path,
    *,
    seconds: float = 240,
    start: Callable[[list[str]], list[str]] | None = None,
    **more: str,
) -> Launch:
    """Runs tests on the ranks of a backend.

    Args:
        backend: One of ``LAUNCHERS``, or an in-process one for a process of its own.
        ranks: How many.
        tests: Arguments of pytest.
        reference: Folder with the results of one process.
        seconds: As of ``run``.
        start: Turns the command of one rank into the one that starts all; by default
            the backend's own launcher on this host.
        more: Environment variables.
    """
    with tempfile.TemporaryDirectory() as results:
        env = environment(
            forked=True,
            **{
                BACKEND: backend,
                REFERENCE: str(reference),
                RESULTS: results,
                DEADLINE: str(PATIENCE * seconds - 10),
            },
            **more,
        )
        program = [sys.executable, "-m", "tests.launch", *tests]
        if start is not None:
            program = start(program)
        elif backend in LAUNCHERS:
            program = [*command(backend, ranks), *program]
        code, output = run(program, env, seconds)
        outcomes = [_outcomes(Path(results, str(r))) for r in range(ranks)]
        for rank in range(1, ranks):
            quiet = Path(results, f"{rank}.out")
            if quiet.exists() and code != 0:
                tail = quiet.read_text(errors="replace")[-4000:]
                output += f"\n--- the last output of rank {rank} ---\n{tail}"
    return Launch(code, output, outcomes)


def _outcomes(file: Path) -> dict[str, str]:
    if not file.exists():
        return {}
    return dict(json.loads(line) for line in file.read_text().splitlines())


def main() -> int:
    """Runs pytest on one rank: outcomes go to a file, output to rank 0's stdout only."""
    from collective.environment import detect

    rank, results = detect().rank, Path(os.environ[RESULTS])
    if rank:
        out = os.open(results / f"{rank}.out", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
    faulthandler.dump_traceback_later(float(os.environ[DEADLINE]), exit=True)

    class Outcomes:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or report.outcome != "passed":
                with (results / str(rank)).open("a") as file:
                    print(json.dumps([report.nodeid, report.outcome]), file=file)

    options = ["-q", "-p", "no:cacheprovider", "--tb=short"]
    code = pytest.main([*options, *sys.argv[1:]], plugins=[Outcomes()])
    faulthandler.cancel_dump_traceback_later()
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
