"""``collective.run``: calls a function on every rank of a job that it starts.

As ``horovod.run``. The ranks are started by ``python -m collective.launch``, each as
``python -m collective.run_function FOLDER``: it reads the call from the folder and
writes its result there. With several hosts the folder is in the working directory, which
they must share.
"""

from __future__ import annotations

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
from collective.net import private_files

# Horovod's options that are options of the launcher, too.
_LAUNCHER = {
    "hosts": "--hosts",
    "hostfile": "--hostfile",
    "ssh_port": "--ssh-port",
    "ssh_identity_file": "--ssh-identity-file",
    "network_interface": "--network-interfaces",
    "network_interfaces": "--network-interfaces",
    "mpi_args": "--mpi-args",
    "output_filename": "--output-filename",
    "use_gloo": "--gloo",
    "use_mpi": "--mpi",
    "disable_cache": "--disable-cache",
    "verbose": "--verbose",
}


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    start_timeout: float | None = None,
    executable: str | None = None,
    **options: Any,
) -> list[Any]:
    """Calls ``func(*args, **kwargs)`` on every rank of a new job.

    Args:
        func: Any function; it and its arguments are pickled by value.
        args, kwargs: Its arguments.
        num_proc: Number of ranks.
        np: Alias of ``num_proc``.
        start_timeout: Seconds until all ranks must have joined.
        executable: The Python of the ranks; this one by default.
        **options: ``hosts``, ``hostfile``, ``ssh_port``, ``ssh_identity_file``,
            ``network_interfaces``, ``mpi_args``, ``output_filename``, ``use_gloo``,
            ``use_mpi``, ``disable_cache`` and ``verbose``, as of the launcher.

    Returns:
        The results, by rank.

    Raises:
        CollectiveError: If a rank failed; with its traceback.
        NotImplementedError: For Horovod's elastic options.
    """
    chosen = _launcher_options(options)
    ranks = num_proc if np is None else np
    if ranks < 1:
        raise UsageError(f"num_proc={ranks}: at least 1 rank is needed", hint="np=2")
    elsewhere = options.get("hosts") or options.get("hostfile")
    with tempfile.TemporaryDirectory(
        prefix="collective-run-", dir=os.getcwd() if elsewhere else None
    ) as name:
        folder = Path(name)
        call = cloudpickle.dumps((func, tuple(args), dict(kwargs or {})))
        private_files.write(folder / "call", call)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        if start_timeout is not None:
            environment["COLLECTIVE_START_TIMEOUT"] = str(start_timeout)
        command = [sys.executable, "-m", "collective.launch", "-np", str(ranks)]
        command += chosen
        command += [executable or sys.executable, "-m", "collective.run_function", name]
        code = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL)
        return _results(folder, ranks, code.returncode)


def _launcher_options(options: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        if name not in _LAUNCHER:
            raise NotImplementedError(
                f"collective.run({name}=...) is not supported: the ranks of its jobs "
                f"are fixed\nHINT: one of: {', '.join(_LAUNCHER)}"
            )
        flag = name in ("use_gloo", "use_mpi", "disable_cache", "verbose")
        if not isinstance(value, str) and not flag and isinstance(value, Sequence):
            value = ",".join(value)
        found.append(_LAUNCHER[name] if flag else f"{_LAUNCHER[name]}={value}")
    return found


def _results(folder: Path, ranks: int, code: int) -> list[Any]:
    # The first to fail: other ranks may have failed because of it.
    failures = sorted(
        folder.glob("*.failure"), key=lambda file: file.stat().st_mtime_ns
    )
    for file in failures:
        raise CollectiveError(
            f"collective.run: rank {file.stem} of {ranks} failed\n{file.read_text()}",
            hint="the last line above says why",
        )
    results = []
    for rank in range(ranks):
        result = folder / f"{rank}.result"
        if code or not result.exists():
            raise CollectiveError(
                f"collective.run: the job ended with exit code {code}, and rank {rank} "
                f"{'with' if result.exists() else 'without'} a result",
                hint="the output of the ranks, above, says why",
            )
        results.append(cloudpickle.loads(private_files.read(result)))
    return results


def _rank(folder: Path) -> int:
    """Runs one rank; returns its exit code."""
    rank = detect().rank
    if not (folder / "call").exists():
        print(
            f"collective.run: rank {rank} does not see {folder}\n"
            "HINT: call collective.run in a directory that all hosts share",
            file=sys.stderr,
        )
        return 1
    try:
        func, args, kwargs = cloudpickle.loads(private_files.read(folder / "call"))
        result = cloudpickle.dumps(func(*args, **kwargs))
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            error = RuntimeError("the function exited without a result")
        (folder / f"{rank}.failure").write_text(
            "".join(traceback.format_exception(error)).rstrip()
        )
        return 1
    private_files.write(folder / f"{rank}.result", result)
    return 0


if __name__ == "__main__":
    sys.exit(_rank(Path(sys.argv[1])))
