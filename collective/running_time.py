"""Time-outs that count only the time in which this process ran.

A job that is suspended as a whole (``scontrol suspend``, ``docker pause``, a laptop that
sleeps) continues as if no time had passed. So what is polled often finds, by a long gap
between two polls, that it did not run meanwhile.
"""

from __future__ import annotations

import collections
import math
import time

# Many times as long as anything here pauses between two polls.
STOPPED_SECONDS = 2.0
_KEPT = 1000


class Stops:
    """When this process did not run. Times are those of ``time.monotonic``."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._stops: collections.deque[tuple[float, float]] = collections.deque(
            maxlen=_KEPT
        )

    def look(self) -> float:
        """Returns the time; to be called at least twice a second."""
        now = time.monotonic()
        if now - self._looked > STOPPED_SECONDS:
            self._stops.append((self._looked, now))
        self._looked = now
        return now

    def since(self, moment: float) -> float:
        """For how many seconds since a moment this process did not run."""
        return sum(max(0.0, end - max(begin, moment)) for begin, end in self._stops)


class Lasting:
    """A debounced condition: true once every poll for ``seconds`` saw it true."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began, self._stops = math.inf, Stops()

    def since(self, is_so: bool) -> bool:
        """Notes whether it is so now; returns whether it has been for long enough."""
        now = self._stops.look()
        self._began = min(self._began, now) if is_so else math.inf
        return now - self._began - self._stops.since(self._began) > self.seconds


class Deadline:
    """A time-out that counts only the time in which this process ran.

    Args:
        longest: Seconds that may lie between two calls. Of a longer pause so many count.
    """

    def __init__(self, seconds: float, longest: float = STOPPED_SECONDS) -> None:
        self._left, self._longest = seconds, longest
        self._looked = time.monotonic()

    def left(self) -> float:
        """Returns the seconds that are left; less than 0 when it has passed."""
        now = time.monotonic()
        self._left -= min(now - self._looked, self._longest)
        self._looked = now
        return self._left

    def passed(self) -> bool:
        """Returns whether no time is left."""
        return self.left() <= 0

    def pause(self) -> float:
        """Returns how many seconds a call may block, so that this one is asked in time."""
        return min(max(self.left(), 0.01), self._longest / 4)
