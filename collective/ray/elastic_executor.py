"""The elastic form of ``RayExecutor`` (``min_workers``): each call is a job of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from collective.errors import UsageError
from collective.launch.agents import function
from collective.ray.elastic import ElasticJob, Limits
from collective.ray.holders import Holders

_WHO = "RayExecutor"


@dataclasses.dataclass
class Settings:
    """The settings that ``RayExecutor.create_settings`` returns."""

    timeout_s: int = 30
    placement_group_timeout_s: int = 100
    nics: Sequence[str] | None = None


class ElasticCalls:
    """The actors, kept between calls; each call starts new ranks.

    Args:
        limits: The numbers of ranks.
        each: Resources of a rank, as Ray names them.
        unbounded: Whether a job grows beyond ``limits`` while the cluster has room.
        settings: The settings of the executor.
        elastic_seconds: Limit of the wait for enough actors after a loss.
        options: Further options of the launcher.
    """

    def __init__(
        self,
        limits: Limits,
        each: Mapping[str, float],
        unbounded: bool,
        settings: Settings,
        elastic_seconds: int,
        options: Sequence[str],
    ):
        self.limits, self.each, self.unbounded = limits, each, unbounded
        self.settings, self.options = settings, options
        self.elastic_seconds = elastic_seconds
        self.holders: Holders | None = None
        self.made: tuple[Any, ...] = ()  # class and arguments of the executable
        self.variables: dict[str, str] = {}

    def start(
        self,
        executable_cls: type | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        variables: Mapping[str, str],
    ) -> None:
        """Ask Ray for the actors; return when the first ones are placed.

        Raises:
            UsageError: It has been started; or Ray does not have the resources in time.
        """
        if self.holders is not None:
            raise UsageError(f"{_WHO}: started already", hint="shutdown() first")
        if self.unbounded:
            most = max(self.limits.start, _room(self.each))
            self.limits = dataclasses.replace(self.limits, most=most)
        self.made, self.variables = (executable_cls, args, kwargs), dict(variables)
        self.holders = Holders(self.each, self.limits.most, _WHO)
        seconds = self.settings.placement_group_timeout_s
        try:
            self.holders.wait_for(self.limits.start, seconds)
        except BaseException:
            self.shutdown()
            raise

    def call(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Call ``fn(executable)`` on every rank of a job; return the results, by rank.

        Raises:
            CollectiveError: A rank failed, or ``reset_limit`` allows no more changes.
            UsageError: It has not been started.
        """
        if self.holders is None:
            raise UsageError(f"{_WHO}: not started", hint="executor.start() first")
        job = ElasticJob(
            self.holders,
            self.limits,
            function.pickled(_with_executable, (fn, *self.made), None),
            self.settings.timeout_s,
            self.options,
            self.variables,
            self.elastic_seconds,
        )
        return job.run()

    def shutdown(self) -> None:
        """Give the resources back."""
        holders, self.holders = self.holders, None
        if holders is not None:
            holders.close()


def _with_executable(
    fn: Callable[[Any], Any],
    executable_cls: type | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    return fn(executable_cls(*args, **kwargs) if executable_cls else None)


def _room(each: Mapping[str, float]) -> int:
    """Return how many ranks the cluster has resources for, used or not."""
    import ray

    found = ray.cluster_resources()
    return int(min(found.get(name, 0) / count for name, count in each.items() if count))
