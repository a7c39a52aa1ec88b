"""Ranks as threads of one process, whose collectives fail as those of dying ranks do.

A rank may die before or after any collective. Of the others, some then have its result and
some have an error: which, is drawn. That is worse than what a network does.
"""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from collective.backends.capabilities import Elastic
from collective.errors import LeaveJob

SECONDS = 60.0  # after these, a rank that waits has been forgotten


class Lost(Exception):
    """Another rank has died."""


class Killed(BaseException):
    """This rank dies."""


class World:
    """The collectives of all ranks.

    Args:
        deaths: By rank: the number of the collective at which it dies, from 1, and
            whether before or after it.
        misses: Draws whether a rank misses the result of a collective in which one dies.
    """

    def __init__(
        self,
        size: int,
        deaths: Mapping[int, tuple[int, str]],
        misses: Callable[[], bool],
    ):
        self.members = list(range(size))
        self._deaths, self._misses = deaths, misses
        self._alive = set(self.members)
        self._changed = threading.Condition()
        self._generation, self._broken = 0, False
        self._posted: dict[tuple[int, int], dict[int, Any]] = {}
        self._waiting: dict[int, set[int]] = {}
        self.joining: list[int] = []  # ranks that wait to be admitted
        self.has_been_asked = False  # to admit one
        self._next = dict.fromkeys(self.members, 0)
        self.made = dict.fromkeys(range(size + 1), 0)

    def end(self, rank: int, breaks: bool = True) -> None:
        with self._changed:
            self._alive.discard(rank)
            self._broken |= breaks
            self._changed.notify_all()

    def is_alive(self, rank: int) -> bool:
        return rank in self._alive

    def exchange(self, rank: int, kind: str, value: Any) -> dict[int, Any]:
        """Return what each member gives; all must give the same kind."""
        self.made[rank] += 1
        self._die(rank, "before")
        with self._changed:
            place = self._generation, self._next[rank]
            self._next[rank] += 1
            posted = self._posted.setdefault(place, {})
            posted[rank] = kind, value
            self._changed.notify_all()
            self._wait(lambda: self._broken or len(posted) >= len(self.members))
            if self._broken and (len(posted) < len(self.members) or self._misses()):
                raise Lost
            assert {k for k, _ in posted.values()} == {kind}, f"other calls: {posted}"
        self._die(rank, "after")
        return {member: given for member, (_, given) in posted.items()}

    def _die(self, rank: int, when: str) -> None:
        if self._deaths.get(rank) == (self.made[rank], when):
            self.end(rank)
            raise Killed

    def _wait(self, condition: Callable[[], bool]) -> None:
        assert self._changed.wait_for(condition, SECONDS), "a rank waits for ever"

    def enter(self, rank: int) -> list[int]:
        """Wait to be admitted; a rank that comes too late dies."""
        with self._changed:
            self.joining.append(rank)
            self.has_been_asked = True
            self._next[rank] = 0
            self._wait(lambda: rank in self.members or not self._alive)
            if rank not in self.members:
                raise Killed
            return list(self._former)

    def regroup(self, rank: int) -> list[int]:
        with self._changed:
            generation, self._broken = self._generation, True
            waiting = self._waiting.setdefault(generation, set())
            waiting.add(rank)
            self._changed.notify_all()
            self._wait(lambda: self._generation > generation or waiting >= self._alive)
            if self._generation == generation:
                before, new = self.members, self.joining
                old = [member for member in before if member in self._alive]
                self.members, self.joining = [*old, *new], []
                self._alive |= {*new}
                self._former = [*map(before.index, old), *[-1] * len(new)]
                self._generation, self._broken = generation + 1, False
                self._next = dict.fromkeys(self.members, 0)
                self._changed.notify_all()
            return list(self._former)


class Rank(Elastic):
    """The backend of one rank."""

    name, elastic, synchronous = "fake", True, True
    availability = _all_reduce = None

    def __init__(self, world: World, number: int, joins: bool = False):
        self.world, self.number, self.joins = world, number, joins
        self.rank, self.size = number, len(world.members)
        self.replicas = self._max_replicas = self.size
        self.options = SimpleNamespace(min_np=1, max_np=self.size + 1)

    def _regroup(self) -> list[int]:
        return self._placed(self.world.regroup(self.number))

    def enter(self) -> list[int]:
        return self._placed(self.world.enter(self.number))

    def _placed(self, former: list[int]) -> list[int]:
        self.size = self.replicas = len(self.world.members)
        self.rank = self.world.members.index(self.number)
        return former

    def close(self) -> None:
        self.world.end(self.number)

    def lost(self, error: BaseException) -> bool:
        return isinstance(error, Lost)

    def leave(self) -> None:
        self.world.end(self.number)

    def broadcast_array(self, array: np.ndarray, root: int = 0) -> np.ndarray:
        given = self.world.exchange(self.number, "broadcast", np.array(array))
        return np.array(given[self.world.members[root]])

    def sum(self, array: np.ndarray) -> np.ndarray:
        return sum(self.world.exchange(self.number, "sum", array).values())

    def abort(self, exit_code: int) -> None:
        if self.world.is_alive(self.number):
            raise AssertionError("the job was aborted")
        raise Killed

    def ended_by_another(self, error: BaseException) -> None:
        return None


def run(
    program: Callable[[Rank], Callable[[], Any]],
    size: int,
    deaths: Mapping[int, tuple[int, str]],
    seed: int = 0,
    joins: bool = False,
) -> tuple[dict[int, Any], World]:
    """Run a program on every rank; return what it returns on those that are left.

    Args:
        program: Takes the backend of a rank, in the main thread; returns what it runs.
        joins: Whether one more rank joins, as soon as the others admit it.
    """
    draw = random.Random(seed)
    world = World(size, deaths, lambda: draw.random() < 0.5)
    results: dict[int, Any] = {}
    errors: list[str] = []

    def body(number: int, action: Callable[[], Any]) -> None:
        try:
            results[number] = action()
            world.end(number, breaks=False)
        except (Killed, LeaveJob):
            pass
        except BaseException:
            errors.append(traceback.format_exc())
            world.end(number)

    ranks = [Rank(world, number) for number in range(size)]
    ranks += [Rank(world, size, joins=True)] if joins else []
    actions = [program(rank) for rank in ranks]
    threads = [
        threading.Thread(target=body, args=each, daemon=True)
        for each in enumerate(actions)
    ]
    for thread in reversed(threads):  # one that joins waits before the others begin
        thread.start()
        while joins and not world.has_been_asked:
            time.sleep(0.001)
    for thread in threads:
        thread.join(2 * SECONDS)
    assert not errors, "\n".join(errors)
    return results, world


def different(results: Mapping[Any, Any]) -> list[Any]:
    """Return the different results of ranks."""
    found: list[Any] = []
    for result in results.values():
        found += [] if result in found else [result]
    return found
