"""``collective.run``: calls a function on every rank of a job that it starts.

It is ``horovod.run``. ``python -m collective.launch`` starts the ranks, each as
``python -m collective.run_function FOLDER``: a rank reads the call from the folder and
writes its result there. With several hosts the folder is in the working directory,
which the hosts must share.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from collective import python_command
from collective.elastic import generations
from collective.environment import detect
from collective.errors import CollectiveError, ProcessExit, UsageError
from collective.net import private_files


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | Sequence[str] | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` on every rank of a new job.

    Args:
        func: Any function; it and its arguments are pickled by value.
        args, kwargs: Its arguments.
        num_proc: Number of ranks.
        min_num_proc, max_num_proc: As ``--min-np`` and ``--max-np`` of the launcher:
            ranks may be lost, and join.
        slots: Ranks on a host that the discovery script names without a number.
        reset_limit, cooldown_range, hosts, hostfile, host_discovery_script, ssh_port,
            ssh_identity_file, disable_cache, output_filename, verbose, use_gloo,
            use_mpi, mpi_args, network_interfaces: As the launcher's options.
        start_timeout: Seconds until all ranks must have joined.
        network_interface: The old name of ``network_interfaces``.
        executable: The Python of the ranks; this one by default.
        np, min_np, max_np: Old names of ``num_proc``, ``min_num_proc``,
            ``max_num_proc``.

    Returns:
        The results by rank, of the ranks that are in the job when it ends.

    Raises:
        CollectiveError: If a rank failed; the error contains its traceback.
        UsageError: For options that the launcher refuses.
    """
    ranks = num_proc if np is None else np
    if ranks < 1:
        raise UsageError(f"num_proc={ranks}: at least 1 rank is needed", hint="np=2")
    least = min_np if min_num_proc is None else min_num_proc
    most = max_np if max_num_proc is None else max_num_proc
    options = {
        "--min-np": least,
        "--max-np": most,
        "--slots-per-host": slots,
        "--reset-limit": reset_limit,
        "--blacklist-cooldown-range": cooldown_range,
        "--hosts": hosts,
        "--hostfile": hostfile,
        "--host-discovery-script": host_discovery_script,
        "--ssh-port": ssh_port,
        "--ssh-identity-file": ssh_identity_file,
        "--output-filename": output_filename,
        "--mpi-args": mpi_args,
        "--network-interfaces": network_interfaces or network_interface,
        "--disable-cache": bool(disable_cache),
        "--verbose": bool(verbose),
        "--gloo": bool(use_gloo),
        "--mpi": bool(use_mpi),
    }
    elsewhere = hosts or hostfile or host_discovery_script
    with tempfile.TemporaryDirectory(
        prefix="collective-run-", dir=os.getcwd() if elsewhere else None
    ) as name:
        folder = Path(name)
        call = cloudpickle.dumps((func, tuple(args), dict(kwargs or {})))
        private_files.write(folder / "call", call)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        if start_timeout is not None:
            environment["COLLECTIVE_START_TIMEOUT"] = str(start_timeout)
        command = python_command.command("collective.launch", "-np", str(ranks))
        command += launcher_words(options)
        worker = "collective.run_function"
        command += python_command.command(worker, name, python=executable or "")
        code = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL)
        elastic = least is not None or most is not None
        size = None if elastic else ranks
        return results(files_in(folder), code.returncode, size, "collective.run")


def launcher_words(options: Mapping[str, Any]) -> list[str]:
    """Return the options of the launcher as they are typed.

    Args:
        options: By name. The value is True for a switch; None, False or empty for an
            option that is not given; a sequence for a list with commas, or for the two
            numbers of the cooldown.
    """
    found: list[str] = []
    for name, value in options.items():
        if value is True:
            found.append(name)
        elif name == "--blacklist-cooldown-range" and value is not None:
            found += [name, *map(str, value)]
        elif value is not None and value is not False:
            text = value if isinstance(value, str | int) else ",".join(value)
            found += [f"{name}={text}"] if text != "" else []
    return found


def files_in(folder: Path) -> dict[str, bytes]:
    """Read the files that ranks wrote, by name, the earliest first.

    Raises:
        CollectiveError: If a file is a link, belongs to another user, or others may
            write it.
    """
    found = [*folder.glob("*.result"), *folder.glob("*.failure")]
    found.sort(key=lambda file: file.stat().st_mtime_ns)
    return {file.name: private_files.read(file) for file in found}


def results(
    files: Mapping[str, bytes], code: int, size: int | None, who: str, tail: str = ""
) -> list[Any]:
    """Return the results of the ranks, by rank.

    Args:
        files: The files that ranks wrote, by name, as ``files_in`` returns them.
        code: The exit code of the job.
        size: Number of ranks; None for an elastic job, which may end with any.
        who: The function that the user called.
        tail: The last lines that the ranks printed, if the user has not seen them.

    Raises:
        CollectiveError: If a rank failed, with its traceback; or if the job failed.
    """
    failures = by_rank(files, ".failure")
    if failures and (code or size is not None):
        # The first rank that failed: others may have failed because of it.
        rank, name = next(iter(failures.items()))
        raise CollectiveError(
            f"{who}: rank {rank} failed\n{files[name].decode()}",
            hint="the last line above says why",
        )
    found = by_rank(files, ".result")
    expected = sorted(found) if size is None else range(size)
    missing = [str(rank) for rank in expected if rank not in found]
    if code or missing or not found:
        lacks = f", without the results of rank {', '.join(missing)}" if missing else ""
        raise CollectiveError(
            f"{who}: the job ended with exit code {code}{lacks}\n{tail}".rstrip(),
            hint="the output of the ranks, above, says why",
        )
    return [cloudpickle.loads(files[found[rank]]) for rank in expected]


def by_rank(names: Iterable[str], suffix: str) -> dict[int, str]:
    """Return the names of the files that ranks of the newest generation wrote, by rank.

    The newest generation that wrote any file counts: a generation may lose a host after
    some of its ranks have returned.

    Args:
        names: Each is the generation, the rank, and ``.result`` or ``.failure``.
        suffix: ``.result`` or ``.failure``.
    """
    files = [name for name in names if name.endswith(suffix)]
    numbers = [tuple(map(int, Path(name).stem.split("-"))) for name in files]
    last = max((generation for generation, _ in numbers), default=0)
    pairs = zip(numbers, files, strict=True)
    return {rank: name for (number, rank), name in pairs if number == last}


def _rank(folder: Path) -> int:
    """Run one rank; return its exit code."""
    rank = detect().rank
    name = f"{generations.number()}-{rank}"
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
    except ProcessExit as leaves:  # an elastic job, which continues without this rank
        return leaves.code if isinstance(leaves.code, int) else 1
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            error = RuntimeError("the function exited without a result")
        text = "".join(traceback.format_exception(error)).rstrip()
        private_files.write(folder / f"{name}.failure", text.encode())
        return 1
    private_files.write(folder / f"{name}.result", result)
    return 0


if __name__ == "__main__":
    sys.exit(_rank(Path(sys.argv[1])))
