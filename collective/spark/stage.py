"""A barrier stage of Spark whose tasks are the nodes of one job."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from collective.errors import CollectiveError, UsageError
from collective.launch.agents import function
from collective.running_time import Deadline

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Request:
    """The job, as every task needs to know it."""

    tasks: int
    job: function.FunctionJob  # without head and slots, which the tasks find out
    variables: Mapping[str, str] = field(default_factory=dict)


class TaskLostError(CollectiveError):
    """A task or its executor was lost: Spark has ended the stage with all its tasks."""


def spark_context() -> Any:
    """Return the active SparkContext, or raise a UsageError if there is none."""
    hint = "spark = SparkSession.builder.getOrCreate() first"
    try:
        from pyspark import SparkContext
    except ImportError:
        raise UsageError(
            "collective.spark needs PySpark", hint="pip install pyspark"
        ) from None
    context = SparkContext._active_spark_context
    if context is None:
        raise UsageError("collective.spark: there is no SparkContext", hint=hint)
    return context


def run(context: Any, request: Request) -> list[function.NodeResult]:
    """Run the job in a barrier stage; return the result of each node.

    Raises:
        CollectiveError: A task has failed; then all tasks have ended.
        TaskLostError: A task or its executor was lost; then all tasks have ended.
        UsageError: Spark does not have so many free tasks in time.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark import InheritableThread

    group = f"collective-{request.job.name}"
    outcome: Future[list[function.NodeResult]] = Future()

    def collect() -> None:
        # In a thread of its own, so that the user's jobs have another job group.
        context.setJobGroup(group, "collective.spark", interruptOnCancel=True)
        tasks = context.parallelize(range(request.tasks), request.tasks)
        try:
            stage = tasks.barrier().mapPartitions(_task_of(request))
            outcome.set_result(stage.collect())
        except Exception as error:
            outcome.set_exception(error)

    thread = InheritableThread(target=collect, daemon=True)
    thread.start()
    try:
        _wait(context, thread, group, request)
        return outcome.result()
    except Py4JJavaError as error:
        text = error.java_exception.getMessage()
        # An exception of Python would be raised again by another try.
        kind = CollectiveError if "PythonException" in text else TaskLostError
        raise kind(
            f"collective.spark: a task or its executor was lost, or has failed: {text}",
            hint="call it again, with collective.fit(..., checkpoint=...) to resume",
        ) from None
    finally:
        if thread.is_alive():
            context.cancelJobGroup(group)
            thread.join()


def _wait(context: Any, thread: Any, group: str, request: Request) -> None:
    """Wait for all tasks of the stage to start, then for the stage to end."""
    deadline = Deadline(request.job.seconds)
    started = False
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
        started = started or _running(context, group) >= request.tasks
        if not started and deadline.passed() and thread.is_alive():
            raise UsageError(
                f"Spark did not have {request.tasks} tasks free at once within "
                f"{request.job.seconds} s",
                hint="as num_proc at most the cores of all executors, divided by "
                "spark.task.cpus; or start_timeout=1200",
            )


def _running(context: Any, group: str) -> int:
    """Return how many tasks of the group's jobs run."""
    tracker = context.statusTracker()
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
    stages = [
        tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds
    ]
    return sum(stage.numActiveTasks for stage in stages if stage)


def _task_of(request: Request) -> Callable[[Any], Iterator[function.NodeResult]]:
    """Return the function of the stage's tasks, which Spark pickles."""

    def task(_: Any) -> Iterator[function.NodeResult]:
        from pyspark import BarrierTaskContext

        yield from run_task(BarrierTaskContext.get(), request)

    return task


def run_task(context: Any, request: Request) -> Iterator[function.NodeResult]:
    """Run one task: the first of its node runs the agent, the others wait for it.

    Args:
        context: Spark's ``BarrierTaskContext``.
    """
    hosts = [info.address.rpartition(":")[0] for info in context.getTaskInfos()]
    found = context.resources()
    gpus = list(found["gpu"].addresses) if "gpu" in found else []
    said = context.allGather(json.dumps([function.free_port(), gpus]))
    ports, gpus_of = zip(*map(json.loads, said), strict=True)
    nodes = list(dict.fromkeys(hosts))
    mine = hosts[context.partitionId()]
    here = [index for index, host in enumerate(hosts) if host == mine]
    code = 0
    if here[0] == context.partitionId():
        slots = [hosts.count(host) for host in nodes]
        head = f"{hosts[0]}:{ports[0]}"
        job = dataclasses.replace(request.job, head=head, slots=slots)
        gpus = [gpu for index in here for gpu in gpus_of[index]]
        result = function.run_node(job, nodes.index(mine), gpus, request.variables)
        code = result.code
        yield result
    _report(context.allGather(str(code)), hosts)


def _report(codes: Sequence[str], hosts: Sequence[str]) -> None:
    """Write a failure to the log of every task; they have all ended."""
    failed = [f"{host}: {c}" for host, c in zip(hosts, codes, strict=True) if c != "0"]
    if failed:
        text = f"collective.spark: the job failed; exit codes: {', '.join(failed)}"
        print(text, file=sys.stderr, flush=True)
