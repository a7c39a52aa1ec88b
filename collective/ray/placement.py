"""Places one actor for each rank in Ray's cluster, and starts the job on their nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collective.errors import UsageError
from collective.launch.agents import function
from collective.ray.worker import Found, Worker

_ANY_BUNDLE = -1


@dataclass(frozen=True)
class Request:
    """The resources that the ranks of a job need."""

    size: int
    each: Mapping[str, float]  # resources of a rank, as Ray names them
    seconds: int  # until they are free
    per_node: int = 0  # ranks on each node; 0: Ray decides
    use_current_group: bool = False  # use the placement group of the caller

    def bundles(self) -> tuple[list[dict[str, float]], str]:
        """Return the bundles and the strategy of a placement group."""
        if not self.per_node:
            return [dict(self.each)] * self.size, "PACK"
        of_node = {name: count * self.per_node for name, count in self.each.items()}
        return [of_node] * (self.size // self.per_node), "STRICT_SPREAD"

    def bundle_of(self, index: int) -> int:
        """Return the bundle that holds an actor, in a placement group of our own."""
        return index // self.per_node if self.per_node else index


class Workers:
    """Actors for the ranks of one job, in the order of nodes, as the ranks are."""

    def __init__(self, request: Request):
        """Place the actors.

        Raises:
            UsageError: Ray does not have so many free resources in time.
        """
        import ray
        from ray.util.placement_group import get_current_placement_group

        self.actors: list[Any] = []
        current = get_current_placement_group() if request.use_current_group else None
        self.own_group = None if current else _placement_group(request)
        group = current or self.own_group
        own = [request.bundle_of(index) for index in range(request.size)]
        bundles = [_ANY_BUNDLE] * request.size if current else own
        try:
            self.actors = _actors(request.each, group, bundles)
            places = [actor.found.remote() for actor in self.actors]
            found: list[Found] = ray.get(places, timeout=request.seconds)
        except BaseException as error:
            self.close()
            if isinstance(error, ray.exceptions.GetTimeoutError):
                raise _missing(request, "the current placement group") from None
            raise
        nodes = list(dict.fromkeys(place.node for place in found))
        # For each node, its actors and the GPUs that they hold.
        self.nodes = [
            [
                a
                for a, place in zip(self.actors, found, strict=True)
                if place.node == node
            ]
            for node in nodes
        ]
        self.gpus = [
            [gpu for place in found if place.node == node for gpu in place.gpus]
            for node in nodes
        ]
        self.head = found[0].head

    def job(self, call: bytes, seconds: int, **more: Any) -> function.FunctionJob:
        """Return the job that makes a pickled call on every rank, with ``more`` fields."""
        slots = [len(actors) for actors in self.nodes]
        return function.FunctionJob(call, seconds, head=self.head, slots=slots, **more)

    def start(
        self, job: function.FunctionJob, variables: Mapping[str, str]
    ) -> list[Any]:
        """Start the agents; return references to the result of each node."""
        return [
            actors[0]
            .run.options(concurrency_group="agent")
            .remote(job, node, gpus, dict(variables))
            for node, (actors, gpus) in enumerate(
                zip(self.nodes, self.gpus, strict=True)
            )
        ]

    def close(self) -> None:
        """End the actors, with all processes that they have started."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for actor in self.actors:
            ray.kill(actor)
        if self.own_group is not None:
            remove_placement_group(self.own_group)
            self.own_group = None


def _placement_group(request: Request) -> Any:
    from ray.util.placement_group import placement_group, remove_placement_group

    bundles, strategy = request.bundles()
    group = placement_group(bundles, strategy=strategy)
    if not group.wait(request.seconds):
        remove_placement_group(group)
        raise _missing(request, "Ray")
    return group


def _missing(request: Request, who: str) -> UsageError:
    bundles, _ = request.bundles()
    return UsageError(
        f"{who} did not have {len(bundles)} times {bundles[0]} free within "
        f"{request.seconds} s",
        hint="ray status shows the resources; fewer workers, or start_timeout=600",
    )


def _actors(each: Mapping[str, float], group: Any, bundles: Sequence[int]) -> list[Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return [
        actor(each, PlacementGroupSchedulingStrategy(group, bundle))
        for bundle in bundles
    ]


def actor(each: Mapping[str, float], strategy: Any) -> Any:
    """Ask Ray for an actor with these resources, placed by one of Ray's strategies."""
    import ray

    # The agent runs while the actor passes calls to its rank.
    worker: Any = ray.remote(concurrency_groups={"agent": 1})(Worker)
    resources = dict(each)
    return worker.options(
        scheduling_strategy=strategy,
        num_cpus=resources.pop("CPU", 0),
        num_gpus=resources.pop("GPU", 0),
        resources=resources,
    ).remote()
