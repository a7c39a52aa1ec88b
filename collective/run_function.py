"""``collective.run``: calls a function on every rank of a job that it starts.

As ``horovod.run``. The ranks are started by ``python -m collective.launch``, each as
``python -m collective.run_function FOLDER``: it reads the call from the folder and
writes its result there.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from collective.environment import detect
from collective.errors import CollectiveError, UsageError

LOG = logging.getLogger("collective")

# They choose between means that only Horovod has.
_IGNORED = ("disable_cache", "use_gloo", "network_interface", "network_interfaces")


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    start_timeout: float | None = None,
    verbose: bool | int | None = None,
    executable: str | None = None,
    **others: Any,
) -> list[Any]:
    """Calls ``func(*args, **kwargs)`` on every rank of a new job on this host.

    Args:
        func: Any function; it and its arguments are pickled by value.
        args, kwargs: Its arguments.
        num_proc: How many ranks.
        np: The same, by its older name.
        start_timeout: Seconds in which the ranks must have joined.
        verbose: Whether the launcher tells what it does.
        executable: The Python to run; this one by default.
        **others: Horovod's other options. None of them is done here.

    Returns:
        What each rank returned, in order.

    Raises:
        CollectiveError: If a rank failed; with what it raised.
        NotImplementedError: For an option that would change where ranks run.
    """
    _refuse(others)
    ranks = num_proc if np is None else np
    if ranks < 1:
        raise UsageError(f"num_proc={ranks}: at least 1 rank is needed", hint="np=2")
    with tempfile.TemporaryDirectory(prefix="collective-run-") as name:
        folder = Path(name)
        call = cloudpickle.dumps((func, tuple(args), dict(kwargs or {})))
        (folder / "call").write_bytes(call)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        if start_timeout is not None:
            environment["COLLECTIVE_START_TIMEOUT"] = str(start_timeout)
        command = [sys.executable, "-m", "collective.launch", "-np", str(ranks)]
        command += ["--verbose"] if verbose else []
        command += [executable or sys.executable, "-m", "collective.run_function", name]
        code = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL)
        return _results(folder, ranks, code.returncode)


def _refuse(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if value is None or value is False:
            continue
        if name not in _IGNORED:
            raise NotImplementedError(
                f"collective.run({name}=...): it starts the ranks of one job on this "
                "host\nHINT: start a script by python -m collective.launch or mpirun"
            )
        LOG.warning("collective.run: %s is ignored: there is nothing to choose", name)


def _results(folder: Path, ranks: int, code: int) -> list[Any]:
    # The first to fail: the others may have failed for want of it.
    failures = sorted(
        folder.glob("*.failure"), key=lambda file: file.stat().st_mtime_ns
    )
    for file in failures:
        raise CollectiveError(
            f"collective.run: rank {file.stem} of {ranks} failed\n{file.read_text()}",
            hint="see the last line above",
        )
    results = []
    for rank in range(ranks):
        result = folder / f"{rank}.result"
        if code or not result.exists():
            raise CollectiveError(
                f"collective.run: the job ended with {code}, and rank {rank} "
                f"{'with' if result.exists() else 'without'} a result",
                hint="see what the ranks printed",
            )
        results.append(cloudpickle.loads(result.read_bytes()))
    return results


def _rank(folder: Path) -> int:
    """One rank: the exit code."""
    rank = detect().rank
    try:
        func, args, kwargs = cloudpickle.loads((folder / "call").read_bytes())
        result = cloudpickle.dumps(func(*args, **kwargs))
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            error = RuntimeError("the function exited, and returned nothing")
        (folder / f"{rank}.failure").write_text(
            "".join(traceback.format_exception(error)).rstrip()
        )
        return 1
    (folder / f"{rank}.result").write_bytes(result)
    return 0


if __name__ == "__main__":
    sys.exit(_rank(Path(sys.argv[1])))
