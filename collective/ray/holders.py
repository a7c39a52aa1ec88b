"""The actors of an elastic job: each holds the resources of one rank."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from collective.errors import UsageError
from collective.ray.placement import actor as ask
from collective.ray.worker import Found
from collective.running_time import Deadline

_POLL_SECONDS = 1.0


class Holders:
    """Actors that hold the resources of one rank each; a lost one is replaced."""

    def __init__(self, each: Mapping[str, float], count: int, who: str):
        self.each, self.who, self.lost = each, who, 0
        self.asked: dict[Any, Any] = {}  # by the call that ends once it is placed
        # By the call that ends when the actor is lost.
        self.held: dict[Any, tuple[Any, Found]] = {}
        for _ in range(count):
            self._ask()

    def _ask(self) -> None:
        actor = ask(self.each, "DEFAULT")
        self.asked[actor.found.remote()] = actor

    @property
    def calls(self) -> list[Any]:
        """Return a call for each actor, which ends when Ray has placed or lost the actor."""
        return [*self.asked, *self.held]

    def ended(self, call: Any) -> bool:
        """Handle the end of one of ``calls``; return whether an actor was lost."""
        import ray

        actor = self.asked.pop(call, None)
        try:
            found = ray.get(call)
        except lost_errors():
            _, found = self.held.pop(call, (None, None))
            self.lost += 1
            where = f" on {found.address}" if found else ""
            report(f"{self.who}: an actor{where} was lost; Ray is asked for another")
            self._ask()
            return True
        self.held[actor.hold.remote()] = (actor, found)
        if self.lost:
            self.lost -= 1
            report(f"{self.who}: Ray has placed another on {found.address}")
        return False

    def by_node(self) -> dict[str, list[Found]]:
        """Return the places of the actors, by Ray's name of the node."""
        nodes: dict[str, list[Found]] = {}
        for _, found in self.held.values():
            nodes.setdefault(found.node, []).append(found)
        return nodes

    def wait_for(self, count: int, seconds: float) -> None:
        """Return when so many are placed, or raise a UsageError after the time."""
        import ray

        deadline = Deadline(seconds)
        while len(self.held) < count:
            for call in ray.wait(self.calls, timeout=_POLL_SECONDS)[0]:
                if self.ended(call):
                    time.sleep(_POLL_SECONDS)
            if deadline.passed() and len(self.held) < count:
                raise UsageError(
                    f"Ray did not have {count} times {dict(self.each)} free within {seconds} s",
                    hint="ray status shows the resources; fewer workers, or start_timeout=600",
                )

    def close(self) -> None:
        """Give the resources back."""
        import ray

        for actor in [
            *self.asked.values(),
            *(actor for actor, _ in self.held.values()),
        ]:
            ray.kill(actor)


def lost_errors() -> tuple[type[Exception], ...]:
    """Return the errors that Ray raises after the loss of an actor or its node."""
    from ray import exceptions

    return (
        exceptions.RayActorError,
        exceptions.ActorUnschedulableError,
        exceptions.NodeDiedError,
        exceptions.LocalRayletDiedError,
    )


def report(text: str) -> None:
    """Print a message on the driver."""
    print(text, file=sys.stderr, flush=True)
