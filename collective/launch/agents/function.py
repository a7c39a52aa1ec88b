"""Calls a function on every rank of a cluster that has started a process on each node.

Ray and Spark use it: each of these processes runs the agent of its node, and the cluster
carries the results of that node's ranks back in its own way.
"""

from __future__ import annotations

import collections
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from collective import run_function
from collective.launch import processes
from collective.launch.agents import folders
from collective.launch.agents.settings import FOLDER, SECRET
from collective.net import private_files

KEPT_LINES = 40


@dataclass(frozen=True)
class FunctionJob:
    """The job, as every node needs to know it; the cluster sends it as an object."""

    call: bytes  # function and arguments, pickled by value
    seconds: int  # until all nodes must have connected
    head: str = ""  # HOST:PORT of node 0
    slots: Sequence[int] = ()  # of each node; an elastic job keeps them in its folder
    # A name that nobody can guess; the folder on each node has it, too.
    name: str = field(default_factory=lambda: secrets.token_hex(16))
    secret: str = field(default_factory=lambda: secrets.token_hex(32))
    options: Sequence[str] = ()  # further options of the launcher
    python: str = ""  # for the ranks; by default the agent's own
    kept_lines: int = KEPT_LINES  # last lines of the output that the result keeps
    elastic: bool = False  # nodes join and leave: the head waits for none


@dataclass(frozen=True)
class NodeResult:
    """The exit code of the job on a node, the files of its ranks, and its last lines."""

    code: int
    files: Mapping[str, bytes] = field(default_factory=dict)
    tail: str = ""


def pickled(func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> bytes:
    """Pickle a function and its arguments, for ``FunctionJob.call``."""
    return cloudpickle.dumps((func, tuple(args), dict(kwargs or {})))


def free_port() -> int:
    """Return a port that was free a moment ago on all addresses of this host."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def run_node(
    job: FunctionJob,
    node: int,
    gpus: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> NodeResult:
    """Run the agent of one node to the end of the job.

    Args:
        gpus: GPUs that its ranks see; empty for all.
        variables: Environment variables for the ranks.
    """
    folder = folders.of(job.name)
    with folders.used(folder):
        with contextlib.suppress(FileExistsError):
            private_files.write(folder / "call", job.call)
        if job.elastic:
            folders.write_slots(folder, {})
        code, tail = _agent(job, node, folder, gpus, variables or {})
        return NodeResult(code, run_function.files_in(folder), tail)


def _agent(
    job: FunctionJob,
    node: int,
    folder: Path,
    gpus: Sequence[str],
    variables: Mapping[str, str],
) -> tuple[int, str]:
    words = [sys.executable, "-m", "collective.launch", "--agent", "--head", job.head]
    nodes, ranks = (node + 1, 1) if job.elastic else (len(job.slots), job.slots[node])
    words += ["--nodes", str(nodes), "--node", str(node)]
    words += ["--slots-per-host", str(ranks)]
    words += ["--start-timeout", str(job.seconds), *job.options]
    python = job.python or sys.executable
    words += [python, "-m", "collective.run_function", str(folder)]
    path = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    )
    env = {
        **os.environ,
        **variables,
        "PATH": path,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        SECRET: job.secret,
        FOLDER: str(folder),
    }
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    process = processes.start(
        words,
        on_parent_death=signal.SIGTERM,  # so kill -9 of the actor or the task ends it, too
        has_threads=True,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    kept: collections.deque[str] = collections.deque(maxlen=job.kept_lines)
    try:
        for raw in process.stdout:
            line = raw.decode(errors="replace")
            print(line, end="", flush=True)  # the cluster shows it, or keeps it
            kept.append(line)
        return process.wait(), "".join(kept)
    finally:
        process.terminate()


def results(found: Sequence[NodeResult], size: int | None, who: str) -> list[Any]:
    """Return the results of the ranks, by rank; see ``run_function.results``."""
    files = {name: data for node in found for name, data in node.files.items()}
    code = max(node.code for node in found)
    tail = next((node.tail for node in found if node.tail), "")
    return run_function.results(files, code, size, who, tail)
