"""Restarts a job when its hosts change, generation after generation, on the present hosts.

Without ``max_np`` it restarts the job only if a host has fallen silent, and leaves that host
out: mpirun has ended all ranks then.

On one host ranks join and leave within a generation (``collective.launch.elastic``). If they
should run on other hosts, the next generation is prepared there (``overlap``), and the
ranks of this one are asked to end; or it is started when they have ended
(``collective.elastic.generations``).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import Sequence

from collective import hosts
from collective.elastic import generations
from collective.errors import CollectiveError, UsageError
from collective.hosts import Host, slots_of
from collective.launch import mpi, processes, reachability, single_host
from collective.launch.discovery import SCRIPT_SECONDS, Discovery, FixedHosts
from collective.launch.elastic import ElasticRanks
from collective.launch.job import Generation
from collective.launch.mpirun import Mpirun
from collective.launch.options import ANSWER_SECONDS, LaunchOptions
from collective.launch.output import print_message
from collective.launch.overlap import Overlap
from collective.running_time import Deadline

POLL_SECONDS = 1.0
# Seconds after which a host that did not answer is asked again.
RETRY_SECONDS = 60.0
_FORGET_SECONDS = 5


class RestartingLauncher:
    """Runs the generations of a job.

    Args:
        options: The command line, with ``min_np``.
        present: The present hosts, each with its slots; by default, those that
            ``--host-discovery-script`` prints.
        placed: Hosts of the first ranks, from ``hosts.place``; by default those that are
            present when the job starts.
    """

    def __init__(
        self,
        options: LaunchOptions,
        present: Discovery | FixedHosts | None = None,
        placed: Sequence[Host] = (),
    ):
        assert options.min_np is not None
        self.present, self.first = present or _discovery(options), placed
        self.options = options
        self.min_np = options.min_np
        self.grows = options.max_np is not None
        self.max_np = options.max_np or options.num_proc or slots_of(placed)
        self.name = os.urandom(16).hex()
        self.placed: Sequence[Host] = []  # this generation's hosts, from hosts.place
        self.logins: dict[str, Host] = {}  # all hosts that have had ranks
        self.job: Generation | None = None
        self.retry_at: dict[str, float] = {}  # by host, for those that did not answer
        self.lost = self.number = self.code = 0
        self.not_before, self.pause = 0.0, options.cooldown[0]
        self.overlap = Overlap()
        self.may_overlap = not options.no_overlap

    def commands(self) -> str:
        """Return the commands that the first generation would start."""
        with self.present:
            self.placed = self._first_hosts()
            return self._make(0).commands()

    def start(self, has_threads: bool = False) -> None:
        """Begin to discover hosts; ``watch`` starts generation after generation.

        Raises:
            UsageError: If the script that discovers hosts fails.
        """
        self.present.__enter__()

    def watch(self) -> None:
        """Run generations until the job is over.

        Raises:
            CollectiveError: If the first generation cannot be started.
        """
        self.code = self._generations(self._first_hosts())

    def end(self) -> int:
        """End a generation that was prepared, forget kept state, and return the exit code."""
        try:
            self.overlap.end()
            self._remove_kept_state()
        finally:
            self.present.__exit__()
        return self.code

    @functools.cached_property
    def only_local(self) -> str:
        """Return why only this host can be used; empty if others can, too."""
        return _why_only_local(self.options)

    def _first_hosts(self) -> Sequence[Host]:
        return self.first or self._wait_for_hosts(self.options.num_proc or self.min_np)

    def _generations(self, placed: Sequence[Host]) -> int:
        lost_host = False  # in the last generation
        for number in itertools.count():
            self.placed, self.lost = placed, 0
            try:
                code = self._generation(number)
                lost_host = self.job is not None and self.job.lost_host
            except CollectiveError as error:
                if not number:
                    raise
                print_message(str(error))  # a host may have left since it answered
                time.sleep(POLL_SECONDS)
                code = generations.EXIT_CODE
            if self.overlap.has_begun:
                pass  # the end of ranks that have handed over does not count
            elif lost_host:
                print_message(
                    "restarting the job on the remaining hosts, from its last checkpoint"
                )
                self.placed = ()  # so that every host is asked again
                self.overlap.end()  # it needs that host, too
                self._leave_out_still_hosts()
            elif not self.grows or code != generations.EXIT_CODE:
                return code
            limit = self.options.reset_limit
            if limit is not None and number >= limit:
                print_message(
                    f"the job has been restarted {number} times; ending it\n"
                    f"HINT: --reset-limit {limit} allows no more"
                )
                return 1
            for each in processes.ending_signals():
                signal.signal(each, _exit)  # until the next generation handles them
            if self.overlap.ready:
                placed = self.overlap.placed
            else:
                placed = self._wait_for_hosts(self.min_np)
        raise AssertionError("itertools.count() does not end")

    def _leave_out_still_hosts(self) -> None:
        """Leave out hosts that stand still; they may answer, but do not work."""
        still = self.job.still_hosts if self.job is not None else ()
        for host in self.logins.values():
            if host.name in still:
                self.retry_at[host.login] = time.monotonic() + RETRY_SECONDS

    def _wait_for_hosts(self, least: int) -> list[Host]:
        """Return the hosts of the next generation as soon as they have ``least`` slots."""
        seconds = self.options.elastic_timeout
        deadline = Deadline(seconds, longest=ANSWER_SECONDS)
        known = -1
        while not deadline.passed():
            wanted = self._wanted()
            slots = slots_of(wanted)
            if slots >= least:
                return wanted
            if slots != known:
                print_message(f"{slots} slots; waiting for {least}")
                known = slots
            time.sleep(POLL_SECONDS)
        raise UsageError(
            f"no slots for {least} ranks within {seconds} s",
            hint="a smaller --min-np or a longer --elastic-timeout; the messages above "
            "name hosts that do not answer",
        )

    def _remove_kept_state(self) -> None:
        """Remove the state that hosts have kept for a generation that ran elsewhere."""
        generations.remove_state(self.name)
        here = {host.login for host in self.placed}
        for login, host in self.logins.items():
            if login not in here:
                module = "collective.elastic.generations"
                command = self.options.shell.command(host, module)
                processes.run(command, _FORGET_SECONDS, f"{self.name}\n")

    def _generation(self, number: int) -> int:
        size = slots_of(self.placed)
        if number:
            where = ", ".join(f"{host.login}:{host.slots}" for host in self.placed)
            print_message(f"generation {number}: {size} ranks, on {where}")
        self.logins.update({host.login: host for host in self.placed})
        prepared = self.overlap.take()
        job: Generation = prepared or self._make(number)
        self.job, self.number = job, number
        self.overlap = overlap = Overlap()
        job.supervisor.meanwhile = lambda: overlap.look(job)
        if prepared is None:  # else its processes run already
            job.start()
        ended = threading.Event()
        try:
            if self.grows:
                threading.Thread(target=self._watch, args=(ended,), daemon=True).start()
            job.watch()
        finally:
            code = job.end()
            ended.set()
        return code

    def _make(self, number: int) -> Generation:
        """Make the job of a generation, not yet started."""
        options, variables = self.options, self._variables(number)
        if self._needs_mpi(self.placed):
            return Mpirun(options, self.placed, variables)
        options = dataclasses.replace(options, appends=number > 0)
        size = slots_of(self.placed)
        job = single_host.ranks(options, size, variables, self._local_slots)
        assert isinstance(job, ElasticRanks)
        return job

    def _variables(self, number: int) -> dict[str, str]:
        return {
            generations.JOB_VARIABLE: self.name,
            generations.NUMBER_VARIABLE: str(number),
        }

    def _needs_mpi(self, placed: Sequence[Host]) -> bool:
        # A job that mpirun once started stays with it: the program may use MPI itself.
        used = self.options.use_mpi or (self.job is not None and self.job.uses_mpi)
        return used or not all(map(hosts.is_local, placed))

    def _watch(self, ended: threading.Event) -> None:
        assert self.job is not None
        job, overlap, due = self.job, self.overlap, False
        while not ended.wait(POLL_SECONDS):
            due = due or self._is_due(overlap)
            if due:
                job.restart()
            if overlap.late:  # the present ranks do not end, or the next are not ready
                self.may_overlap = False
                print_message(
                    f"generation {self.number + 1} has not begun to train within "
                    f"{self.options.elastic_timeout} s: it is ended\n"
                    "HINT: --elastic-timeout SECONDS gives it more time"
                )
                overlap.cancel()

    def _is_due(self, overlap: Overlap) -> bool:
        """Return whether the ranks must end now for the next generation."""
        wanted = self._wanted()
        if overlap.failed():
            print_message(
                f"generation {self.number + 1} has failed while it was prepared; the "
                f"job continues as it is, and it is tried again in {self.pause:g} s"
            )
            self._wait_longer()
        if overlap.job is not None:
            if _covers(wanted, overlap.placed):
                return overlap.ready
            overlap.cancel()
        if not self._restart_is_due(wanted):
            return False
        if not self._overlaps(wanted):
            return True
        return overlap.job is None and not self._prepare(overlap, wanted)

    def _overlaps(self, wanted: Sequence[Host]) -> bool:
        """Return whether the next generation is prepared while this one trains.

        It is not if ranks must leave a host, since they do so at once.
        """
        limit = self.options.reset_limit
        stay = self._running().items()
        return (
            self.may_overlap
            and self._needs_mpi(wanted)
            and (limit is None or self.number < limit)
            and all(_slots_by_login(wanted).get(login, 0) >= n for login, n in stay)
        )

    def _prepare(self, overlap: Overlap, wanted: Sequence[Host]) -> bool:
        """Have the next generation prepared; return False if it must wait for this one."""
        number = self.number + 1
        variables = {**self._variables(number), generations.OVERLAPS: "1"}
        try:
            job = Mpirun(self.options, wanted, variables)
            job.check()
        except CollectiveError as error:
            print_message(str(error))
            self._wait_longer()
            return True
        if job.have_gpus:
            self.may_overlap = False
            print_message(
                f"{', '.join(job.have_gpus)}: the memory of GPUs does not suffice for two "
                "generations; the next one starts when the ranks have ended"
            )
            return False
        where = ", ".join(f"{host.login}:{host.slots}" for host in wanted)
        print_message(
            f"generation {number} is prepared, on {where}; the job trains meanwhile"
        )
        overlap.prepare(job, wanted, self.options.elastic_timeout)
        return True

    def _wait_longer(self) -> None:
        self.not_before = time.monotonic() + self.pause
        self.pause = min(2 * self.pause, self.options.cooldown[1])

    def _restart_is_due(self, wanted: Sequence[Host]) -> bool:
        """Return whether the ranks should run on other hosts."""
        assert self.job is not None
        if slots_of(wanted) < self.min_np or not self.job.training:
            return False
        if self.job.finishing:
            return False
        lost = len(self.job.lost_ranks)
        if lost > self.lost:
            self.lost = lost
            self._wait_longer()
        if self.job.uses_mpi:
            moves = _slots_by_login(wanted) != self._running()
        else:  # ranks on this host join and leave by themselves
            moves = not all(map(hosts.is_local, wanted))
        return moves and time.monotonic() >= self.not_before

    def _running(self) -> dict[str, int]:
        """Return the number of ranks by host, without those that were lost."""
        lost = self.job.lost_ranks if self.job is not None else ()
        ranks = [host.login for host in self.placed for _ in range(host.slots or 0)]
        return collections.Counter(
            login for rank, login in enumerate(ranks) if rank not in lost
        )

    def _wanted(self) -> list[Host]:
        """Return the hosts for the ranks; hosts that have ranks now come first."""
        logins = [host.login for host in self.placed]
        present = self.present.hosts
        for login in self.retry_at.keys() - {host.login for host in present}:
            del self.retry_at[login]  # a host that returns may be another machine
        usable = [host for host in present if self._is_usable(host)]
        usable.sort(key=lambda h: logins.index(h.login) if h.login in logins else 1e9)
        slots = min(slots_of(usable), self.max_np)
        return hosts.place(usable, slots) if slots else []

    def _is_usable(self, host: Host) -> bool:
        if host.login in self._running() or hosts.is_local(host):
            return True
        now = time.monotonic()
        if now < self.retry_at.get(host.login, 0):
            return False
        reason = self.only_local or self._why_unreachable(host)
        if reason:
            pause = 1e9 if self.only_local else RETRY_SECONDS
            self.retry_at[host.login] = now + pause
            print_message(f"{host.name} is left out: {reason}")
        return not reason

    def _why_unreachable(self, host: Host) -> str:
        try:
            mpirun = mpi.find(self.options.mpirun).program
            answers = reachability.check([host], self.options, mpirun)
            return "".join(answers.cut_off.values())
        except CollectiveError as error:
            return str(error)

    def _local_slots(self) -> int:
        return slots_of(host for host in self.present.hosts if hosts.is_local(host))


def _discovery(options: LaunchOptions) -> Discovery:
    seconds = min(options.start_timeout or SCRIPT_SECONDS, SCRIPT_SECONDS)
    return Discovery(options.host_discovery_script, options.slots_per_host, seconds)


def _slots_by_login(placed: Sequence[Host]) -> dict[str, int]:
    return {host.login: host.slots or 0 for host in placed}


def _covers(wanted: Sequence[Host], placed: Sequence[Host]) -> bool:
    """Return whether every placed slot is among the wanted ones."""
    found = _slots_by_login(wanted)
    return all(found.get(host.login, 0) >= (host.slots or 0) for host in placed)


def _exit(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _why_only_local(options: LaunchOptions) -> str:
    """Return why only this host can be used; empty if others can, too."""
    if options.use_gloo:
        return "--gloo starts ranks on this host only"
    try:
        mpi.find(options.mpirun).require_elastic()
    except UsageError as error:
        return str(error)
    return ""
