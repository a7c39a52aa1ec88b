"""Runs a test file on several ranks at once; it is also the program of each rank.

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
# PYTHONPATH of processes that tests start, for sitecustomize.py in tests/lean.
PYTHONPATH = f"{ROOT / 'tests' / 'lean'}{os.pathsep}{ROOT}"

# Set for the ranks of a launch: the backend under test, and the folder for results.
BACKEND = "COLLECTIVE_TEST_BACKEND"
REFERENCE = "COLLECTIVE_TEST_REFERENCE"
MUTATION = "COLLECTIVE_TEST_MUTATION"
RESULTS = "COLLECTIVE_TEST_RESULTS"
DEADLINE = "COLLECTIVE_TEST_DEADLINE"
# Set by make test-gpu: other tests that it runs see the GPUs.
ON_GPU = "TESTS_ON_GPU"
# For a session and its workers: the path of the servers that fork ranks.
FORKSERVER = "TESTS_FORKSERVER"
# The folder of Open MPI's shared memory.
SEGMENTS = "OMPI_MCA_btl_sm_backing_directory"

# Many times the usual duration of the event that a test waits for, because the machine may
# be busy: then the import of TensorFlow alone takes 40 s.
PATIENCE_SECONDS = 120.0
# Factor between a deadline and the time that is enough on an idle machine.
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
#: Marks of a file whose tests start jobs of their own.
STARTS_RANKS = [pytest.mark.launches, NOT_ON_RANKS, NEEDS_CORE]


def launched() -> bool:
    """Return whether this process is one of the ranks of a launch."""
    return BACKEND in os.environ


@dataclass(frozen=True)
class Launch:
    """The result of a launch.

    Attributes:
        code: Exit status; None if the launch was killed at its deadline.
        output: The output of the ranks.
        outcomes: For each rank, ``passed``, ``failed`` or ``skipped`` of each test.
    """

    code: int | None
    output: str
    outcomes: list[dict[str, str]]

    def passed(self, *, skips: bool = False) -> int:
        """Return the number of passed tests, which are the same on every rank.

        Args:
            skips: Whether skipped tests are allowed.

        Raises:
            AssertionError: A test has failed, or ranks differ; or the launch failed.
        """
        assert self.code == 0, self.output
        first, *others = self.outcomes
        assert all(outcomes == first for outcomes in others), self.output
        found = [*first.values()]
        assert {*found} <= {"passed", *["skipped"] * skips}, self.output
        return found.count("passed")


def command(backend: str, ranks: int) -> list[str]:
    """Return the words that start ranks, to put before the program."""
    name = LAUNCHERS[backend]
    if name == "collectiverun":
        return [sys.executable, "-m", "collective.launch", "-np", str(ranks)]
    program = processes.find_program(name) or name
    more = ["--oversubscribe"] if name == "mpirun" else []
    if name == "horovodrun" and ranks > 2:
        more = ["--gloo"]  # MPI starts 2 ranks, so both are tested
    return [program, "-np", str(ranks), *more]


def redirect_dumps(config: pytest.Config) -> None:
    """Keep the flight recorder's dumps out of the checkout; tests cause many."""
    folder = tempfile.TemporaryDirectory(prefix="dumps-")
    os.environ[recorder.VARIABLE] = folder.name
    config.add_cleanup(folder.cleanup)


def redirect_segments(config: pytest.Config) -> None:
    """Give Open MPI a folder for its shared memory: a killed mpirun leaves files there."""
    memory = "/dev/shm"
    folder = tempfile.TemporaryDirectory(
        dir=memory if os.path.isdir(memory) else None, ignore_cleanup_errors=True
    )
    os.environ[SEGMENTS] = folder.name
    config.add_cleanup(folder.cleanup)


def prepare_forkserver(config: pytest.Config) -> None:
    """Have the ranks that this session starts forked off a process with TensorFlow."""
    folder = tempfile.TemporaryDirectory(prefix="forkserver-")
    os.environ[FORKSERVER] = os.path.join(folder.name, str(os.getpid()))
    config.add_cleanup(folder.cleanup)


def environment(*, forked: bool = False, **more: str) -> dict[str, str]:
    """Return the environment of a process that a test starts, outside of every job.

    Args:
        forked: Whether its ranks are forked off a process that has TensorFlow. This is for
            tests of their results, not of processes, because such a rank has no parent.
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
    # Two ranks that import TensorFlow may finish at very different times.
    env["COLLECTIVE_START_TIMEOUT"] = "300"
    env[recorder.VARIABLE] = os.environ.get(recorder.VARIABLE, "")
    # Keep the session's folder, and the path of a core that is not installed.
    for name in (SEGMENTS, "COLLECTIVE_LIBRARY"):
        if name in os.environ:
            env[name] = os.environ[name]
    # Several tests share the cores, so a rank that waits in MPI yields its core.
    env["OMPI_MCA_mpi_yield_when_idle"] = "1"
    # As in an activated environment, because horovodrun looks there for mpirun.
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
    """Run a command in a folder; at a deadline, end it and all its descendants.

    Args:
        arguments: Program and arguments.
        env: Its environment.
        seconds: Seconds that are enough on an idle machine.
        folder: Folder in which it runs.

    Returns:
        Exit status, or None after the deadline; and the output, stderr included.
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
    """Call ``subprocess.run`` in ``environment()``; return both outputs as text.

    ``seconds`` are enough on an idle machine; the deadline is later.
    """
    options = {"env": environment(), "timeout": PATIENCE * seconds} | options
    return subprocess.run(command, capture_output=True, text=True, **options)


def await_that(condition: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> Any:
    """Ask until the answer is true, and return it; fail after a while."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "this did not come about"
        time.sleep(0.02)
    return found


def _end(process: subprocess.Popen) -> None:
    """End a process, its group, and its descendants in groups of their own."""
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
    """Run tests on the ranks of a backend.

    Args:
        backend: One of ``LAUNCHERS``, or an in-process one for a process of its own.
        ranks: Number of ranks.
        tests: Arguments of pytest.
        reference: Folder with the results of one process.
        seconds: As for ``run``.
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
    """Run pytest on one rank: outcomes go to a file, output to rank 0's stdout only."""
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
