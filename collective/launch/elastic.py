"""An elastic job on one host: ranks may die, leave and join (``--min-np``, ``--max-np``).

The other ranks continue when a rank dies or leaves. If the job may grow, new ranks replace
it, up to the number of slots; each joins by itself when it is ready (``collective.session``).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Sequence

from collective.elastic import generations, membership_file
from collective.elastic.membership_file import MembershipFile
from collective.environment.seconds import START_SECONDS, START_TIMEOUT
from collective.errors import UsageError
from collective.launch import processes
from collective.launch.job import Supervised
from collective.launch.options import LaunchOptions
from collective.launch.output import print_message
from collective.launch.supervisor import ProcessSpec, Supervisor
from collective.running_time import Lasting


class ElasticRanks(Supervised):
    """The ranks of one job on this host, some of which may fail or join later.

    The job has succeeded if ``min_np`` ranks of its last membership did.

    Args:
        options: The command line, with ``min_np``.
        membership: Where ranks note that they have joined or left.
        spec_of: Makes the process of a rank from its number, its free slot, and whether
            it joins the running job.
        wanted: Returns how many ranks there should be now; None: no rank joins later.
    """

    uses_mpi = lost_host = finishing = False
    # A rank that dies is replaced within the generation, and there is no other host.
    lost_ranks: Collection[int] = ()
    still_hosts: Collection[str] = ()

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        options: LaunchOptions,
        membership: MembershipFile,
        spec_of: Callable[[int, int, bool], ProcessSpec],
        wanted: Callable[[], int] | None,
    ):
        self.membership = membership
        self.supervisor = Supervisor(
            specs, len(specs), options, self, membership=membership
        )
        self.min_np = options.min_np or 1
        self.max_np = options.max_np or 0
        self.spec_of, self.wanted = spec_of, wanted
        self.succeeded = 0
        self.incomplete = False  # something failed after the work was done
        self.next_rank = len(specs)
        self.slots = {spec.rank: spec.rank for spec in specs}  # by rank
        self.joining: set[int] = set()
        self.dismissed: set[int] = set()
        rank_timeout = options.rank_timeout_seconds
        start_timeout = options.seconds(START_TIMEOUT, START_SECONDS)
        # A little earlier than the waiting ranks would give up.
        self.absent = Lasting(min(rank_timeout, 0.9 * start_timeout))
        self.in_vain = Lasting(rank_timeout)
        self.cooldown = options.cooldown
        self.not_before, self.pause = 0.0, self.cooldown[0]
        self.reset_limit, self.resets = options.reset_limit, 0
        self.restart_requested = self.restarts = self.over_limit = False

    @property
    def training(self) -> bool:
        """Return whether the ranks may end for the next generation."""
        states = map(self.membership.read, set(self.slots) - self.joining)
        return membership_file.TRAINS in states

    @property
    def has_handed_over(self) -> bool:
        """Return whether no rank trains any more, and the next generation may begin."""
        states = [self.membership.read(rank) for rank in self.slots]
        return bool(states) and set(states) == {membership_file.HANDED_OVER}

    def restart(self) -> None:
        """Ask the ranks to end for the next generation; from any thread."""
        self.restart_requested = True

    def report(self) -> None:
        """Decide whether the job has succeeded, and report which rank failed."""
        job = self.supervisor
        if self.over_limit:
            job.exit_code = 1
        elif job.ending:
            job.failed = None  # a signal to the launcher ended the job
        elif self.restarts:
            job.failed, job.exit_code = None, generations.EXIT_CODE
        elif self.succeeded >= self.min_np and not self.incomplete:
            # The job continued without the failed rank.
            job.failed, job.exit_code = None, 0
        job.report_failure()

    def look(self) -> None:
        """Start, dismiss and end ranks that are due."""
        self._note_joined()
        self._adjust()
        self._end_hanging()

    def _note_joined(self) -> None:
        for rank in list(self.joining):
            if self.membership.has_joined(rank):
                self.joining.remove(rank)
                self.pause = self.cooldown[0]
                self._count_reset()

    def on_exit(self, rank: int, code: int) -> None:
        """Continue without the rank, and replace it if the job may grow."""
        self._note_joined()
        del self.slots[rank]
        self.restarts |= code == generations.EXIT_CODE
        if (
            self.supervisor.ending
            or self.restarts
            or rank in self.joining & self.dismissed
        ):
            self.joining.discard(rank)
            return
        state = self.membership.read(rank)
        left = state == membership_file.LEFT
        self.incomplete |= bool(code) and state == membership_file.DONE
        self.membership.note_exit(rank)
        if code:
            consequence = f"; {_ranks(len(self.slots))} left"
            self.supervisor.note_failure(rank, code, consequence)
        elif not left:
            self.succeeded += 1
        if rank in self.joining:
            self.joining.remove(rank)
            self.pause = min(2 * self.pause, self.cooldown[1])
            if code == UsageError.exit_code:
                self._start_no_more()
        elif not left and code >= 0:
            self.wanted = None  # the job is over; or a new rank would fail, too
        self.not_before = time.monotonic() + self.pause
        if (code or left) and self.slots:
            self._count_reset()

    def _start_no_more(self) -> None:
        """Start no other rank, because one was refused, and another would be, too."""
        self.wanted = None
        print_message("no other rank is started; see above why this one could not join")

    def _count_reset(self) -> None:
        """Count a change of the ranks that train together; end the job after too many."""
        self.resets += 1
        limit = self.reset_limit
        if limit is None or self.resets <= limit or self.supervisor.ending:
            return
        print_message(
            f"the ranks of the job have changed {self.resets} times; ending it\n"
            f"HINT: --reset-limit {limit} allows no more; start the job again "
            "from its last checkpoint"
        )
        self.over_limit = True
        self.supervisor.end(signal.SIGTERM)

    def _adjust(self) -> None:
        """Start missing ranks, and ask surplus ones to leave."""
        if self.supervisor.ending:
            return
        if self.restart_requested:
            self._ask_to_restart()
        if not set(self.slots) - self.joining:
            for rank in self.joining - self.dismissed:
                self._dismiss(rank)  # the job that it could join is over
            return
        if self.wanted is None:
            return
        wanted = max(self.min_np, min(self.wanted(), self.max_np))
        for rank in sorted(set(self.slots) - self.dismissed)[wanted:]:
            print_message(
                f"rank {rank} is asked to leave: the job has slots for {_ranks(wanted)}"
            )
            self._dismiss(rank)
        while len(self.slots) < wanted and time.monotonic() >= self.not_before:
            taken = self.slots.values()
            self._start_late(next(n for n in range(wanted) if n not in taken))

    def _end_hanging(self) -> None:
        """End ranks that hang, if no other rank can report it.

        Ranks in the job report it themselves (``native/membership/job.h``).
        """
        if self.supervisor.ending:
            return
        present = set(self.slots) - self.joining
        states = {rank: self.membership.read(rank) for rank in present}
        absent = [rank for rank, state in states.items() if not state]
        awaited = membership_file.JOINING in states.values()
        if self.absent.since(bool(absent) and awaited):
            for rank in absent:
                print_message(
                    f"rank {rank} has not called collective.init() within "
                    f"{self.absent.seconds:g} s, and other ranks wait for it: killed it\n"
                    "HINT: COLLECTIVE_START_TIMEOUT=seconds gives it more time"
                )
                self.supervisor.signal_all(signal.SIGKILL, rank)
        too_few = len(present) + self.succeeded < self.min_np and self.wanted is None
        done = self.succeeded > 0 and all(
            map(processes.is_stopped, self.supervisor.processes)
        )
        if self.in_vain.since(bool(present) and (too_few or done)):
            print_message(
                f"{_ranks(len(present))} did not end within {self.in_vain.seconds:g} s "
                "after the others: killed"
            )
            self.supervisor.signal_all(signal.SIGKILL)

    def _ask_to_restart(self) -> None:
        self.wanted = None
        for rank in self.joining - self.dismissed:
            self._dismiss(rank)
        for rank in set(self.slots) - self.joining:
            self.membership.ask_to_restart(rank)

    def _start_late(self, slot: int) -> None:
        spec = self.spec_of(self.next_rank, slot, True)
        print_message(f"rank {spec.rank} is started to join the job")
        self.slots[spec.rank] = slot
        self.joining.add(spec.rank)
        self.next_rank += 1
        self.supervisor.start_process(spec, has_threads=True)
        self.supervisor.outputs[spec.rank].start()

    def _dismiss(self, rank: int) -> None:
        """Ask a rank to leave; kill one that has not joined yet."""
        self.dismissed.add(rank)
        number = signal.SIGKILL if rank in self.joining else signal.SIGTERM
        self.supervisor.signal_all(number, rank)


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"
