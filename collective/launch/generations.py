"""A job whose hosts change: begun anew, round after round, on those there are.

On one host ranks come and go within a round (``collective.launch.elastic``). Where they
shall be on other hosts than they are, the ranks of this round are asked to end, and the
next one is started (``collective.elastic.generations``).
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from collective import hosts
from collective.elastic import generations
from collective.errors import CollectiveError, UsageError
from collective.hosts import Host, Rank
from collective.launch import mpi, multi_host, reachable, single_host
from collective.launch.discovery import PATIENCE_SECONDS
from collective.launch.elastic import LONGEST_PAUSE_SECONDS, PAUSE_SECONDS, ElasticJob
from collective.launch.mpirun import Mpirun
from collective.launch.output import Style, tell
from collective.launch.run_command import ask

LOOK_SECONDS = 1.0
# So long a host that does not answer is left alone.
REFUSED_SECONDS = 60.0


class Rounds:
    """The rounds of a job.

    Args:
        there: Tells which hosts there are now, each with its slots.
        given: The command line, with ``min_np`` and ``max_np``.
        style: How output is shown.
        variables: Added to the ranks' environment.
    """

    def __init__(
        self,
        there: Callable[[], Sequence[Host]],
        given: argparse.Namespace,
        style: Style,
        variables: Mapping[str, str],
    ):
        self.there = there
        self.given = given
        self.style = style
        self.variables = {**variables, generations.JOB: os.urandom(16).hex()}
        self.only_here = _why_only_here(given)
        self.ranks: Sequence[Rank] = []
        self.hosts: set[Host] = set()  # all that have had ranks
        self.job: ElasticJob | Mpirun | None = None
        self.left_alone: dict[str, float] = {}  # hosts that do not answer: until when
        self.lost = 0
        self.not_before, self.pause = 0.0, PAUSE_SECONDS

    def run(self, ranks: Sequence[Rank] = ()) -> int:
        """Runs the job; returns its exit code.

        Args:
            ranks: Those of the first round; on whatever hosts there are by default.

        Raises:
            CollectiveError: As ``here.run`` and ``across.run``, in the first round.
        """
        least = self.given.num_proc or self.given.min_np
        try:
            return self._rounds(ranks or self._enough(least))
        finally:
            self._clean()

    def _rounds(self, ranks: Sequence[Rank]) -> int:
        for number in itertools.count():
            self.ranks, self.lost = ranks, 0
            try:
                code = self._round(number)
            except CollectiveError as error:
                if not number:
                    raise
                tell(str(error))  # a host may have gone since it was asked
                time.sleep(LOOK_SECONDS)
                code = generations.EXIT_CODE
            if isinstance(self.job, Mpirun) and self.job.lost_host:
                tell("the job is begun anew on the others, from its last checkpoint")
                self.ranks = ()  # which hosts answer is asked anew
                code = generations.EXIT_CODE
            if code != generations.EXIT_CODE:
                return code
            for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(each, _end)  # no more those of the round
            ranks = self._enough(self.given.min_np)
        raise AssertionError("there is always one more number")

    def _enough(self, least: int) -> list[Rank]:
        """Where a round is to be, as soon as there are hosts for so many ranks."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if len(wanted := self._wanted()) >= least:
                return wanted
            time.sleep(LOOK_SECONDS)
        raise UsageError(
            f"there were not slots for {least} ranks within {PATIENCE_SECONDS:.0f} s",
            hint="a smaller --min-np; or see above which hosts do not answer",
        )

    def _clean(self) -> None:
        """Has hosts forget what they have kept for rounds without them."""
        generations.forget(job := self.variables[generations.JOB])
        for host in self.hosts - {rank.host for rank in self.ranks}:
            ask(
                reachable.on(host, self.given, "collective.elastic.generations"),
                5,
                job + "\n",
            )

    def _round(self, number: int) -> int:
        if number:
            where = ", ".join(f"{h}:{n}" for h, n in _counts(self.ranks).items())
            tell(f"round {number}: {len(self.ranks)} ranks, on {where}")
        self.hosts |= {rank.host for rank in self.ranks}
        variables = {**self.variables, generations.NUMBER: str(number)}
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=(ended,), daemon=True)
        words = self.ranks, self.given, self.style, variables

        def begun(job: ElasticJob | Mpirun) -> None:
            self.job = job
            watch.start()

        try:
            if self.given.use_mpi or not all(
                single_host.is_here(r.host) for r in self.ranks
            ):
                return multi_host.run(*words, begun)
            return single_host.run(*words, self._slots_here, begun)
        finally:
            ended.set()

    def _watch(self, ended: threading.Event) -> None:
        due = False
        while not ended.wait(LOOK_SECONDS):
            due = due or self._due()
            if due and self.job is not None:
                self.job.renew()

    def _due(self) -> bool:
        """Whether the ranks should be elsewhere than they are."""
        wanted = self._wanted()
        if len(wanted) < self.given.min_np:
            return False
        if isinstance(self.job, ElasticJob):  # that of this host grows by itself
            return any(not single_host.is_here(rank.host) for rank in wanted)
        assert self.job is not None
        ends = self.job.relay.ended
        if any(not end.failed for end in ends.values()) or self.job.relay.gave_up:
            return False  # it is over; or it would fail again
        if len(self.job.relay.gone) > self.lost:
            self.lost = len(self.job.relay.gone)
            self.not_before = time.monotonic() + self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE_SECONDS)
        elsewhere = _counts(wanted) != self._running()
        return elsewhere and time.monotonic() >= self.not_before

    def _running(self) -> dict[str, int]:
        """How many ranks each host has, of those that are not gone."""
        gone = self.job.relay.gone if isinstance(self.job, Mpirun) else set()
        return _counts([rank for rank in self.ranks if rank.rank not in gone])

    def _wanted(self) -> list[Rank]:
        """Where the ranks should be: where they are, first."""
        logins = list(_counts(self.ranks))
        usable = [host for host in self.there() if self._usable(host)]
        usable.sort(key=lambda h: logins.index(h.login) if h.login in logins else 1e9)
        slots = sum(host.slots or 0 for host in usable)
        return hosts.place(usable, min(slots, self.given.max_np)) if slots else []

    def _usable(self, host: Host) -> bool:
        if host.login in self._running() or single_host.is_here(host):
            return True
        now = time.monotonic()
        if now < self.left_alone.get(host.login, 0):
            return False
        why = self.only_here
        if not why:
            try:
                mpirun = mpi.find(self.given.mpirun).program
                why = "".join(reachable.check([host], self.given, mpirun).values())
                if not why:
                    return True
            except CollectiveError as error:
                why = str(error)
        self.left_alone[host.login] = now + (1e9 if self.only_here else REFUSED_SECONDS)
        tell(f"{host.name} is left out: {why}")
        return False

    def _slots_here(self) -> int:
        return sum(
            host.slots or 0 for host in self.there() if single_host.is_here(host)
        )


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _counts(ranks: Sequence[Rank]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for rank in ranks:
        counts[rank.host.login] = counts.get(rank.host.login, 0) + 1
    return counts


def _why_only_here(given: argparse.Namespace) -> str:
    """Why no host but this one can be used; empty where they can."""
    if given.use_gloo:
        return "--gloo starts ranks on this host only"
    try:
        mpi.compose(mpi.find(given.mpirun), mpi.Wanted([], [], survive=True))
    except UsageError as error:
        return str(error)
    return ""
