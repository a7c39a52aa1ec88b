"""``collective.ray.run``: calls a function on every rank of a job that Ray places."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from collective.errors import CollectiveError, UsageError
from collective.launch.agents import function
from collective.ray.elastic import Limits, run_elastic
from collective.ray.placement import Request, Workers


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_workers: int = 1,
    resources_per_worker: Mapping[str, float] | None = None,
    start_timeout: int = 120,
    min_workers: int | None = None,
    max_workers: int | None = None,
    reset_limit: int | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on every rank; ``ray.init`` must have been called.

    Args:
        fn: Any function; it and its arguments are pickled by value.
        args: Its arguments.
        kwargs: Its keyword arguments.
        num_workers: Number of ranks; for an elastic job, at the start.
        resources_per_worker: Ray's names and amounts, by default one CPU:
            ``{"CPU": 2, "GPU": 1}``.
        start_timeout: Seconds until the resources are free, and until all nodes have
            connected.
        min_workers: Makes the job elastic: it continues while so many ranks are left, and
            Ray is asked for another actor for each that is lost.
        max_workers: The job grows to so many ranks while Ray has room; ``num_workers`` by
            default.
        reset_limit: Number of changes of the ranks after which an elastic job ends.

    Returns:
        The results, by rank, of the ranks at the end of the job.

    Raises:
        CollectiveError: A rank failed; the error has its traceback. Or an actor or its node
            was lost, and the job is not elastic: then the other nodes have ended.
        UsageError: Ray does not have so many free resources in time.
    """
    import ray

    if num_workers < 1:
        raise UsageError(f"num_workers={num_workers}: at least 1", hint="num_workers=2")
    each = dict(resources_per_worker or {"CPU": 1})
    call = function.pickled(fn, args, kwargs)
    if min_workers is not None:
        most = num_workers if max_workers is None else max_workers
        limits = Limits(min_workers, num_workers, most, reset_limit)
        return run_elastic(limits, each, call, start_timeout, "collective.ray.run")
    if max_workers is not None or reset_limit is not None:
        raise UsageError(
            "max_workers and reset_limit are for elastic jobs",
            hint="min_workers=1",
        )
    workers = Workers(Request(num_workers, each, start_timeout))
    try:
        job = workers.job(call, start_timeout)
        with lost_actors_named("collective.ray.run"):
            nodes = ray.get(workers.start(job, {}))
        return function.results(nodes, num_workers, "collective.ray.run")
    finally:
        workers.close()


@contextlib.contextmanager
def lost_actors_named(who: str) -> Iterator[None]:
    """Raise the loss of an actor or of its node as a ``CollectiveError``."""
    import ray

    try:
        yield
    except ray.exceptions.RayActorError as error:
        raise CollectiveError(
            f"{who}: an actor or its node was lost: {error}",
            hint="min_workers=1 continues without it; or call it again, with "
            "collective.fit(..., checkpoint=...) to resume",
        ) from None
