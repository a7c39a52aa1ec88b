"""Watches mpirun: finds out which rank has failed, and makes sure that the job ends."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import secrets
import shutil
import signal
import time
from collections.abc import Collection, Mapping, Sequence

from collective import python_command
from collective.elastic import generations
from collective.environment.base import RANKS_PER_HOST
from collective.hosts import Host, slots_of, slurm
from collective.launch import mpi, reachability, slurm_job
from collective.launch.job import Supervised
from collective.launch.options import OF_A_RANK, START_SECONDS, LaunchOptions
from collective.launch.options import words as typed
from collective.launch.output import print_message, report_failure
from collective.launch.relay import STILL_WAITS_SECONDS, Relay
from collective.launch.supervisor import ProcessSpec, Supervisor
from collective.net import interfaces
from collective.running_time import Lasting, Stops

NOT_STARTED = 124  # the exit code of timeout(1)
_CALL_BACK_SECONDS = 5
_AGAIN_SECONDS = 1.0  # until ranks that have not reacted get the signal again
# How long mpirun may live after the first failure. Open MPI ends the other ranks itself,
# at once, but its mpirun may stay; MPICH leaves the other ranks if one has just exited.
_STAY_SECONDS = 2.0
# How long it may live after it has lost a host and announced the end of the job.
_LOST_SECONDS = 10.0
# By then MPI has reported the end of a rank to all others.
_REPORT_SECONDS = 10.0
_ROOM = 1 << 20  # more bytes than mpirun needs in the folder for temporary files


class Waits:
    """Finds out that all remaining ranks wait for one that has ended.

    MPI should end such a wait, but Open MPI 5.0.11 once did not.
    """

    def __init__(self) -> None:
        self._lost, self._lost_at = 0, math.inf
        self._waits_at: dict[int, float] = {}  # when a rank last reported to wait

    def count(self, lost: int) -> None:
        """Note how many ranks have ended early; called many times a second."""
        if lost > self._lost:
            self._lost, self._lost_at = lost, time.monotonic()
            self._waits_at.clear()

    def in_vain(self, rank: int, left: Sequence[int]) -> bool:
        """Return whether no remaining rank works, now that this rank waits too long."""
        now = time.monotonic()
        if now - self._lost_at < _REPORT_SECONDS:
            return False
        self._waits_at[rank] = now
        recently = now - 2 * STILL_WAITS_SECONDS
        waits = (self._waits_at.get(each, 0.0) > recently for each in left)
        return bool(left) and all(waits)


class Mpirun(Supervised):
    """A job whose only process is mpirun, whose output reports how each rank fares.

    With ``min_np`` the job continues without ranks that fail, and has succeeded if so many
    ranks have. Otherwise the first failure ends it.

    Args:
        hosts: Hosts, each with its number of ranks as slots.
        variables: Added to the environment of the ranks, in addition to the options' own.

    """

    uses_mpi = True

    def __init__(
        self,
        options: LaunchOptions,
        hosts: Sequence[Host],
        variables: Mapping[str, str] | None = None,
    ):
        self.min_np, self.size = options.min_np, slots_of(hosts)
        self.options, self.hosts = options, hosts
        self.given = {**slurm_job.for_ranks(os.environ), **(variables or {})}
        self.word = secrets.token_hex(4)
        # Since when ranks have not answered while this process ran (Stops).
        self.asked: dict[int, float] = {}
        self.stops = Stops()
        self.relay = Relay(options.verbose, self.word)
        self.supervisor = Supervisor(
            [],
            self.size,
            options,
            self,
            name=lambda rank: "mpirun",
            output=self.relay,
            contains=False,  # the supervisor of each rank does so
        )
        self.host_of = [host.name for host in hosts for _ in range(host.slots or 0)]
        # Hosts that cannot open a connection to this one, each with the reason: mpirun
        # would wait for them for ever.
        self.cut_off: Mapping[str, str] = {}
        self.late_start = Lasting(options.start_timeout or START_SECONDS)
        # When mpirun announced the end of the job, because it has lost a host.
        self.loses_host = Lasting(_LOST_SECONDS)
        # When a rank failed for the first time without which the job must end.
        self.stays, self.rank_failed = Lasting(_STAY_SECONDS), False
        self.cancelled = self.lost_host = False
        self.released, self.release_at = False, 0.0
        self.have_gpus: Sequence[str] = ()  # names of hosts with GPUs
        self.silent: list[int] = []  # ranks whose hosts stand still
        self.waits = Waits()
        self.unreported = False  # MPI lets ranks wait for one that has ended
        self.still_hosts: set[str] = set()  # names of hosts that were given up

    @functools.cached_property
    def mpi(self) -> mpi.MPI:
        """Return the MPI whose mpirun starts the ranks.

        Raises:
            UsageError: If there is no mpirun, or it cannot start such a job.
        """
        return mpi.find(self.options.mpirun)

    @functools.cached_property
    def words(self) -> list[str]:
        """Return the command of mpirun; ``check`` adds the names of hosts.

        Raises:
            UsageError: As ``mpi`` does.
        """
        return _command(self.mpi, self.options, self.hosts, self.given, self.word)

    def commands(self) -> str:
        """Return the command of mpirun."""
        return mpi.shell_line(self.words)

    def start(self, has_threads: bool = False) -> None:
        """Check the hosts, unless that has been done, and start mpirun.

        Raises:
            CollectiveError: If a host does not answer, has other versions, or has the
                name of another.
        """
        if not self.supervisor.specs:
            self.check()
        print_message(self.commands())
        super().start(has_threads)

    def check(self) -> None:
        """Check the hosts, and write the command of mpirun; ``start`` does so, too."""
        answers = reachability.check(self.hosts, self.options, self.mpi.program)
        self.have_gpus = answers.have_gpus
        program = self.words.index(self.mpi.program) + 1
        self.words[program:program] = mpi.host_name_options(self.mpi, answers.names)
        self.cut_off = answers.cut_off
        if self.cut_off:
            seconds = min(self.late_start.seconds, _CALL_BACK_SECONDS)
            self.late_start.seconds = seconds
        words = list(self.words)
        for place, word in enumerate(words):
            if isinstance(word, mpi.HostfileText):
                # In memory, so that nothing stays if this process is killed.
                file = os.memfd_create("collective hosts", os.MFD_CLOEXEC)
                os.write(file, word.encode())
                words[place] = f"/proc/{os.getpid()}/fd/{file}"
        self.supervisor.specs = [
            ProcessSpec(
                0,
                words,
                slurm_job.for_mpirun(os.environ),
                takes_input=generations.OVERLAPS not in self.given,
                hidden=slurm_job.hidden(os.environ),
            )
        ]

    def on_exit(self, rank: int, code: int) -> None:
        """Note a failure of mpirun; its output says how the ranks ended."""
        if code and not self.supervisor.ending:
            self.supervisor.note_failure(rank, code)
            self.supervisor.end(signal.SIGTERM)

    def look(self) -> None:
        """React to what ranks report, and end mpirun if it would wait for ever."""
        job = self.supervisor
        self.waits.count(len(self.relay.lost_ranks))
        while self.relay.events:
            event = self.relay.events.popleft()
            if event.what == "waits":
                if self.waits.in_vain(event.rank, self.relay.unfinished):
                    self.lost_host = self.unreported = True
                    job.end(signal.SIGTERM)
                self._end_hanging()
            if event.what in ("waits", "answers"):
                # Its host runs. Open MPI may pass no signals on after the death of a rank.
                self.asked.pop(event.rank, None)
            elif self.min_np is None or event.early:
                self.rank_failed = True
        if self.late_start.since(bool(self.not_started)) and not job.ending:
            # mpirun alone waits for ever for a host that it cannot reach.
            job.exit_code = NOT_STARTED
            job.end(signal.SIGTERM)
        if self.loses_host.since(bool(self.relay.lost_hosts)):
            job.give_up()
        if self.stays.since(self.rank_failed):
            self.rank_failed = False
            job.end(signal.SIGTERM)
        now = self.stops.look()
        if self.asked and not job.ending:
            self._give_up_still_hosts(now)
        if self.released and now >= self.release_at and not self.training:
            self.release_at = now + _AGAIN_SECONDS
            self._to_ranks(signal.SIGUSR2)

    def _give_up_still_hosts(self, now: float) -> None:
        """Give up hosts that run nothing; mpirun does so only if the kernel is silent."""
        waited = {r: now - at - self.stops.since(at) for r, at in self.asked.items()}
        self.silent = [
            rank
            for rank in self.relay.unfinished
            if waited.get(rank, 0) > self.options.heartbeat
        ]
        if self.silent:
            self.lost_host = True
            self.supervisor.end(signal.SIGTERM)

    def restart(self) -> None:
        """Ask the ranks to end for the next generation; see ``Generation``."""
        if not (self.not_started or self.supervisor.ending):
            self._to_ranks(signal.SIGUSR1)

    def release(self) -> None:
        """Let the ranks, which are ready, continue when the generation before has ended."""
        self.released = True

    def cancel(self) -> None:
        """End all ranks because they are not needed any more, and report nothing."""
        if not self.supervisor.ending:
            self.cancelled = True
            self.supervisor.give_up()

    def _end_hanging(self) -> None:
        """End the ranks that a rank which waits too long may wait for (``rank.py``).

        No supervisor answers on a host that stands still as a whole; the host is given up.
        """
        if self.relay.ready and not self.released:
            # The generation cannot become ready, and the signal would release ranks.
            self.supervisor.give_up()
        elif not self.supervisor.ending:
            for rank in self.relay.unfinished:
                self.asked.setdefault(rank, time.monotonic())
            self._to_ranks(signal.SIGUSR2)

    def _to_ranks(self, number: signal.Signals) -> None:
        """Send a signal that mpirun passes on to the supervisor of each rank."""
        for pid in list(self.supervisor.processes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    @property
    def finishing(self) -> bool:
        """Return whether a rank has succeeded, or failed by itself and would fail again."""
        ends = list(self.relay.ends.values())
        return any(not end.failed for end in ends) or bool(self.relay.gave_up)

    @property
    def lost_ranks(self) -> Collection[int]:
        """Return the ranks that have ended early."""
        return self.relay.lost_ranks

    @property
    def ready(self) -> bool:
        """Return whether all ranks wait for the state of the generation before."""
        return len(self.relay.ready) == self.size

    @property
    def training(self) -> bool:
        """Return whether all remaining ranks may end for the next generation."""
        left = set(range(self.size)) - set(self.relay.ends) - self.relay.left
        return bool(left) and left <= self.relay.training

    @property
    def has_handed_over(self) -> bool:
        """Return whether no rank trains any more, and the next generation may begin."""
        handed_over = self.relay.handed_over
        return bool(handed_over) and handed_over >= set(self.relay.unfinished)

    @property
    def not_started(self) -> list[int]:
        """Return the ranks that have not started yet."""
        return [rank for rank in range(self.size) if rank not in self.relay.started]

    @property
    def interrupted(self) -> bool:
        """Return whether a signal to this process, or ``cancel``, has ended the job."""
        return self.cancelled or bool(self.supervisor.signals)

    def report(self) -> None:
        """Find out which rank failed, or which host was lost."""
        job = self.supervisor
        failed, unfinished = self.relay.failed, self.relay.unfinished
        codes = self.relay.codes
        if self.interrupted:
            if job.signals:
                print_message("interrupted")
        elif self.unreported:
            job.exit_code = 1
            print_message(
                f"rank {', '.join(map(str, sorted(self.relay.lost_ranks)))} of "
                f"{self.size} has ended, and MPI has not reported it: every other rank "
                "waits for it\n"
                "HINT: with a checkpoint directory, little is computed again"
            )
        elif self.lost_host:
            self._report_still_host()
        elif self.not_started and (self.cut_off or job.exit_code == NOT_STARTED):
            self._report_not_started()
        elif generations.EXIT_CODE in codes:
            job.exit_code = generations.EXIT_CODE
        elif self.min_np is not None and codes.count(0) >= self.min_np:
            job.exit_code = 0  # the job continued without the failed rank
        else:
            if self.min_np is not None:
                failed = self.relay.gave_up or failed
            if failed is not None:
                job.exit_code = failed.code
                errors = self.relay.errors_of_rank.get(failed.rank, ())
                rank = f"rank {failed.rank} of {self.size} on {failed.host}"
                report_failure(rank, failed.how, errors, self._network_hint())
            elif self.relay.lost_hosts or (unfinished and job.exit_code == 0):
                self._report_lost_host(unfinished)
            else:
                job.report_failure(self._no_room_hint())

    def _no_room_hint(self) -> str:
        """Return a HINT that names a full disk; mpirun then prints only a number."""
        folder = os.environ.get("TMPDIR", "/tmp")
        with contextlib.suppress(OSError):
            if not self.relay.started and shutil.disk_usage(folder).free < _ROOM:
                return (
                    f"{folder} is full: make room, or TMPDIR=DIR names another folder"
                )
        return ""

    def _network_hint(self) -> str:
        """Return a HINT if Open MPI has chosen a network that does not join the hosts."""
        address = self.relay.unreachable
        others = interfaces.others(address) if address else []
        if not others:
            return ""
        return (
            f"no connection to {address}: that network does not join the hosts; "
            f"--network-interfaces {others[0]} uses another"
        )

    def _report_not_started(self) -> None:
        self.supervisor.exit_code = NOT_STARTED
        hosts = dict.fromkeys(self.host_of[rank] for rank in self.not_started)
        reasons = "".join(f"\n  {name}: {why}" for name, why in self.cut_off.items())
        hint = "" if reasons else "; --start-timeout SECONDS allows a slow start"
        print_message(
            f"{len(self.not_started)} of {self.size} ranks did not start within "
            f"{self.late_start.seconds:g} s, on {', '.join(hosts)}{reasons}\n"
            "HINT: python -m collective.doctor with the same hosts; a firewall between "
            "them, or the wrong interface (--network-interfaces), keeps mpirun waiting"
            f"{hint}"
        )

    def _report_still_host(self) -> None:
        self.supervisor.exit_code = 1
        ranks = self.silent
        hosts = dict.fromkeys(self.relay.started[rank] for rank in ranks)
        self.still_hosts = {self.host_of[rank] for rank in ranks}
        print_message(
            f"{', '.join(hosts)} stands still: nothing of rank "
            f"{', '.join(map(str, ranks))} of {self.size} has run for "
            f"{self.options.heartbeat} s, while other ranks wait; it is given up, and "
            "what is left there ends when it runs again\n"
            "HINT: see whether the host is suspended, frozen or out of memory; "
            "--heartbeat SECONDS gives it more time"
        )

    def _report_lost_host(self, unfinished: Sequence[int]) -> None:
        """Report a lost host, and set the exit code, because Open MPI 5 exits with 0."""
        self.supervisor.exit_code, self.lost_host = 1, True
        hosts = self.relay.lost_hosts  # by their own names, or as the user typed them
        given, own = self.host_of, self.relay.started
        ranks = [r for r in unfinished if {own[r], given[r]} & {*hosts}] or unfinished
        names = hosts or [own[r] for r in ranks]
        print_message(
            f"the connection to {', '.join(dict.fromkeys(names))} was lost; what became "
            f"of rank {', '.join(map(str, ranks))} of {self.size} is not known\n"
            "HINT: see whether the host runs, and python -m collective.doctor with the "
            "same hosts; --mpi-args can give it more time (docs/how-to/launching.md)"
        )


def _command(
    found: mpi.MPI,
    options: LaunchOptions,
    hosts: Sequence[Host],
    variables: Mapping[str, str],
    word: str,
) -> list[str]:
    """Have mpirun start each rank under ``collective.launch.rank``, on its host."""
    program, *rest = options.command
    words = python_command.command("collective.launch.rank")
    words += typed(options, OF_A_RANK)
    # Open MPI puts itself first on the PATH.
    words += ["--word", word, "--", shutil.which(program) or program, *rest]
    given = {**options.rank_variables, **variables, RANKS_PER_HOST: slurm.tasks(hosts)}
    exported = [name for name in mpi.exported(os.environ) if name not in given]
    return mpi.compose(found, options, hosts, words, given, exported)
