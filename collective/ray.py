"""``collective.ray.run``: calls a function on every rank of a job that Ray places.

An actor holds the resources of each rank. The first actor of each node runs that node's agent
(``collective.launch.agents``), which starts the ranks there.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from collective.errors import CollectiveError, UsageError
from collective.launch.agents import function


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_workers: int = 1,
    resources_per_worker: Mapping[str, float] | None = None,
    start_timeout: int = 120,
) -> list[Any]:
    """Calls ``fn(*args, **kwargs)`` on every rank; ``ray.init`` has been called.

    Args:
        fn: Any function; it and its arguments are pickled by value.
        args: Its arguments.
        kwargs: Its keyword arguments.
        num_workers: Number of ranks.
        resources_per_worker: As Ray names them: ``{"CPU": 2, "GPU": 1}``; one CPU by default.
        start_timeout: Seconds until the resources are free, and until all nodes have met.

    Returns:
        The results, by rank.

    Raises:
        CollectiveError: A rank failed, with its traceback; or an actor or its node was
            lost: then the other nodes have ended.
        UsageError: Ray has not so many resources free in time.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    each = dict(resources_per_worker or {"CPU": 1})
    if num_workers < 1:
        raise UsageError(f"num_workers={num_workers}: at least 1", hint="num_workers=2")
    group = placement_group([each] * num_workers, strategy="PACK")
    try:
        if not group.wait(start_timeout):
            raise UsageError(
                f"Ray has not {num_workers} times {each} free within {start_timeout} s",
                hint="ray status shows what there is; fewer workers, or start_timeout=600",
            )
        call = function.pickled(fn, args, kwargs)
        return _run(group, each, call, num_workers, start_timeout)
    except ray.exceptions.RayActorError as error:
        raise CollectiveError(
            f"collective.ray.run: an actor or its node was lost: {error}",
            hint="call it again, with collective.fit(..., checkpoint=...) to resume",
        ) from None
    finally:
        remove_placement_group(group)


def _run(
    group: Any, each: dict[str, float], call: bytes, size: int, seconds: int
) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    class Worker:
        """Holds the resources of one rank; the first of a node runs the node's agent."""

        def found(self) -> tuple[str, str, list[str]]:
            node = ray.get_runtime_context().get_node_id()
            head = f"{ray.util.get_node_ip_address()}:{function.free_port()}"
            return node, head, [str(gpu) for gpu in ray.get_gpu_ids()]

        def run(
            self, job: function.Job, node: int, gpus: list[str]
        ) -> function.NodeResult:
            return function.run_node(job, node, gpus)

    actor: Any = ray.remote(Worker)
    where = PlacementGroupSchedulingStrategy
    resources = dict(each)
    options = {
        "num_cpus": resources.pop("CPU", 0),
        "num_gpus": resources.pop("GPU", 0),
        "resources": resources,
    }
    workers = [
        actor.options(scheduling_strategy=where(group, bundle), **options).remote()
        for bundle in range(size)
    ]
    found = ray.get([worker.found.remote() for worker in workers])
    nodes = list(dict.fromkeys(node for node, *_ in found))
    of_node = [
        [i for i, (name, *_) in enumerate(found) if name == node] for node in nodes
    ]
    job = function.Job(
        name=secrets.token_hex(16),
        secret=secrets.token_hex(32),
        head=found[0][1],
        slots=[len(mine) for mine in of_node],
        call=call,
        seconds=seconds,
    )
    calls = [
        workers[mine[0]].run.remote(
            job, node, [gpu for i in mine for gpu in found[i][2]]
        )
        for node, mine in enumerate(of_node)
    ]
    return function.results(ray.get(calls), size, "collective.ray.run")
