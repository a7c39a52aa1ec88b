"""``collective.spark.run``: calls a function on every rank of a job in Spark's tasks."""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from collective.errors import UsageError
from collective.launch.agents import function
from collective.run_function import launcher_words
from collective.spark import stage

_START_SECONDS = 600
_ALL_LINES = 1_000_000


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = {},
    num_proc: int | None = None,
    start_timeout: int | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Sequence[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on every rank, each in a task of Spark.

    Args:
        fn: Any function; it and its arguments are pickled by value.
        args: Its arguments.
        kwargs: Its keyword arguments.
        num_proc: Number of ranks; ``spark.default.parallelism`` by default.
        start_timeout: Seconds until Spark has so many free tasks, and until all nodes
            have connected; HOROVOD_SPARK_START_TIMEOUT, else 600, by default.
        use_mpi: Ignored: agents start the ranks.
        use_gloo: Ignored.
        extra_mpi_args: Further options of mpirun.
        env: Environment variables of the ranks, in addition to the tasks' own.
        stdout: Stream that gets the output of the ranks when the job has ended; the logs of
            Spark's executors have it, too.
        stderr: Ignored: ``stdout`` gets both.
        verbose: From 2 on the launcher prints the commands that it starts.
        nics: Network interfaces between nodes.
        prefix_output_with_timestamp: Whether each line begins with the time.
        executable: The Python of the ranks; by default the tasks' own.

    Returns:
        The results, by rank.

    Raises:
        CollectiveError: A rank failed, with its traceback; or a task or its executor was
            lost, and the others have ended.
        UsageError: There is no SparkContext; or Spark does not have so many free tasks in
            time.
    """
    options = _options(verbose, nics, prefix_output_with_timestamp)
    options += launcher_words({"--mpi-args": extra_mpi_args})
    request = _request(fn, args, kwargs, num_proc, start_timeout, env)
    request = _with(request, options=options, python=executable or "")
    nodes = _nodes(request, stdout)
    return function.results(nodes, request.tasks, "collective.spark.run")


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = {},
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: int | None = None,
    elastic_timeout: int | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Sequence[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call a function as ``run`` does; the job continues without ranks that are lost.

    Spark's tasks run together or not at all: a rank may be lost, but the loss of a task or
    an executor ends all tasks. Then the job begins again, from its checkpoint if there is
    one, at most ``spark.task.maxFailures`` times in all (4).

    Args:
        fn: See ``run``; usually with ``elastic.run`` of Horovod's interface.
        args: See ``run``.
        kwargs: See ``run``.
        num_proc: Number of ranks at the start, and of tasks.
        min_num_proc: Fewest ranks to continue with; ``num_proc`` by default.
        max_num_proc: Lost ranks are replaced up to so many; ``num_proc`` by default. It
            must not exceed the number of tasks.
        start_timeout: See ``run``.
        elastic_timeout: Seconds to wait for ``min_num_proc`` slots.
        reset_limit: Number of changes of the ranks after which the job ends.
        env: See ``run``.
        stdout: See ``run``.
        stderr: See ``run``.
        verbose: See ``run``.
        nics: See ``run``.
        prefix_output_with_timestamp: See ``run``.
        min_np: The old name of ``min_num_proc``.
        max_np: The old name of ``max_num_proc``.

    Returns:
        The results, by rank, of the ranks at the end of the job.

    Raises:
        CollectiveError: See ``run``.
        UsageError: See ``run``.
    """
    request = _request(fn, args, kwargs, num_proc, start_timeout, env)
    least = min_num_proc if min_np is None else min_np
    most = max_num_proc if max_np is None else max_np
    most = request.tasks if most is None else most
    if most > request.tasks:
        raise UsageError(
            f"max_num_proc={most}: {request.tasks} tasks have resources for as many ranks",
            hint=f"num_proc={most}, and fewer as min_num_proc",
        )
    found = {
        "--num-proc": request.tasks,
        "--min-np": request.tasks if least is None else least,
        "--max-np": most,
        "--elastic-timeout": elastic_timeout,
        "--reset-limit": reset_limit,
    }
    options = _options(verbose, nics, prefix_output_with_timestamp)
    options += launcher_words(found)
    nodes = _nodes_after_losses(_with(request, options=options), stdout)
    return function.results(nodes, None, "collective.spark.run_elastic")


def _options(
    verbose: int, nics: Sequence[str] | str | None, timestamps: bool
) -> list[str]:
    """Return the options of the launcher."""
    return launcher_words(
        {
            "--verbose": verbose > 1,
            "--prefix-output-with-timestamp": timestamps,
            "--network-interfaces": nics
            if isinstance(nics, str)
            else sorted(nics or ()),
        }
    )


def _request(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    num_proc: int | None,
    start_timeout: int | None,
    env: Mapping[str, str] | None,
) -> stage.Request:
    context = stage.spark_context()
    tasks = context.defaultParallelism if num_proc is None else num_proc
    if tasks < 1:
        raise UsageError(f"num_proc={tasks}: at least 1", hint="num_proc=2")
    seconds = start_timeout
    if seconds is None:
        seconds = int(os.environ.get("HOROVOD_SPARK_START_TIMEOUT", _START_SECONDS))
    job = function.FunctionJob(function.pickled(fn, args, kwargs), seconds)
    return stage.Request(tasks, job, dict(env or {}))


def _with(request: stage.Request, **changes: Any) -> stage.Request:
    """Return the request with changes to its job."""
    job = dataclasses.replace(request.job, **changes)
    return dataclasses.replace(request, job=job)


def _nodes_after_losses(
    request: stage.Request, stdout: TextIO | None
) -> list[function.NodeResult]:
    """Run the job as ``_nodes`` does, and again after the loss of a task or an executor."""
    conf = stage.spark_context().getConf()
    for left in reversed(range(int(conf.get("spark.task.maxFailures", "4")))):
        try:
            return _nodes(request, stdout)
        except stage.TaskLostError as error:
            if not left:
                raise
            what, *_ = error.message.splitlines()
            print(f"{what}\nThe job begins again.", file=sys.stderr, flush=True)
        request = _with(request, name=secrets.token_hex(16))
    raise AssertionError("unreachable")


def _nodes(request: stage.Request, stdout: TextIO | None) -> list[function.NodeResult]:
    """Run the job; its output goes to the stream, if there is one."""
    if stdout is not None:
        request = _with(request, kept_lines=_ALL_LINES)
    found = stage.run(stage.spark_context(), request)
    if stdout is not None:
        stdout.write("".join(node.tail for node in found))
    return found
