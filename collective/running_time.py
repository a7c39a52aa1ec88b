"""Time-outs that count only the time in which this process ran.

A job that is suspended as a whole (``scontrol suspend``, ``docker pause``, a laptop
that sleeps) continues as if no time had passed. So a function that polls often finds,
by a long gap between two polls, that this process did not run in between.
"""

from __future__ import annotations

import collections
import math
import time

# Many times as long as any pause between two polls here.
STOPPED_SECONDS = 2.0
_KEPT = 1000


class Stops:
    """The times in which this process did not run, by ``time.monotonic``."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._stops: collections.deque[tuple[float, float]] = collections.deque(
            maxlen=_KEPT
        )

    def look(self) -> float:
        """Return the time; call this at least twice a second."""
        now = time.monotonic()
        if now - self._looked > STOPPED_SECONDS:
            self._stops.append((self._looked, now))
        self._looked = now
        return now

    def since(self, moment: float) -> float:
        """Return for how many seconds since a moment this process did not run."""
        return sum(max(0.0, end - max(begin, moment)) for begin, end in self._stops)


class Lasting:
    """A debounced condition: true once every poll for ``seconds`` saw it true."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began, self._stops = math.inf, Stops()

    def since(self, is_so: bool) -> bool:
        """Record the condition; return whether it has held for long enough."""
        now = self._stops.look()
        self._began = min(self._began, now) if is_so else math.inf
        return now - self._began - self._stops.since(self._began) > self.seconds


class Deadline:
    """A time-out that counts only the time in which this process ran.

    Args:
        longest: Seconds that may lie between two calls. A longer pause counts as this
            long.
    """

    def __init__(self, seconds: float, longest: float = STOPPED_SECONDS) -> None:
        self._left, self._longest = seconds, longest
        self._looked = time.monotonic()

    def left(self) -> float:
        """Return the seconds that are left; less than 0 after the deadline."""
        now = time.monotonic()
        self._left -= min(now - self._looked, self._longest)
        self._looked = now
        return self._left

    def passed(self) -> bool:
        """Return whether no time is left."""
        return self.left() <= 0

    def pause(self) -> float:
        """Return how many seconds a call may block before the next poll."""
        return min(max(self.left(), 0.01), self._longest / 4)
