"""Chooses the kind of job that the command line asks for, and checks what that kind needs."""

from __future__ import annotations

import os

from collective import environment, hosts, python_command
from collective.errors import UsageError
from collective.launch import plain_keras, processes
from collective.launch.discovery import FixedHosts
from collective.launch.job import Job, JobOfRanks
from collective.launch.options import EXAMPLE, LaunchOptions
from collective.launch.output import print_message
from collective.launch.single_host import OnThisHost


class DryRun:
    """The job of ``--dry-run``: it only prints what another job would start."""

    def __init__(self, job: JobOfRanks):
        self._job = job

    def start(self, has_threads: bool = False) -> None:
        """Print the commands of the job."""
        print(self._job.commands())

    def watch(self) -> None:
        """Return at once, because no process was started."""

    def end(self) -> int:
        """Return the exit code of success."""
        return 0


def choose(options: LaunchOptions) -> Job:
    """Return the job, not yet started.

    Raises:
        UsageError: If no kind of job can do what the options ask for.
    """
    if options.agent:
        from collective.launch.agents.command import Agent

        return Agent(options)  # the launcher that it runs obeys --dry-run
    chosen = _job_of_ranks(options)
    # With --keras, the ranks run the script up to its first step.
    return DryRun(chosen) if options.dry_run and not options.keras else chosen


def _job_of_ranks(options: LaunchOptions) -> JobOfRanks:
    """Return the job; import the modules for other hosts only if it needs them."""
    environment.lone.check_launcher(os.environ)
    if options.host_discovery_script:
        from collective.launch.restarting import RestartingLauncher

        return RestartingLauncher(options)
    found = _hosts(options)
    placed = hosts.place(found, options.num_proc)
    size = hosts.slots_of(placed)
    _check_elastic(options, size)
    start = plain_keras.start_of(size)
    if text := plain_keras.warning(options.command, size, start):
        print_message(text)
    others = [host.name for host in placed if not hosts.is_local(host)]
    here = not others and not options.use_mpi
    if options.backend:
        _check_backend(options, size, "collectiverun" if here else "mpirun")
    if here:
        _note_unused(options)
        return OnThisHost(options, size)
    if options.use_gloo:
        raise UsageError(
            f"--gloo starts ranks on this host only, not on {', '.join(others)}",
            hint="leave --gloo out: mpirun reaches other hosts",
        )
    if options.min_np is not None:
        from collective.launch.restarting import RestartingLauncher

        return RestartingLauncher(options, FixedHosts(found), placed)
    from collective.launch.mpirun import Mpirun

    return Mpirun(options, placed)


def _check_backend(options: LaunchOptions, size: int, launcher: str) -> None:
    """Refuse a backend that ranks on this host could not use, before they are started.

    Like the doctor, it asks a program of its own, because this package must not import a
    backend.
    """
    words = ["--check", options.backend or "auto"]
    words += ["--launcher", launcher, "--size", str(size)]
    script = next((w for w in options.command if w.endswith(".py")), "script.py")
    words += ["--unedited", script]  # --backend is given with --keras only
    answer = processes.run(python_command.command("collective.backends", *words), 60)
    if answer.code == UsageError.exit_code:
        message, _, hint = answer.out.strip().partition("\nHINT: ")
        raise UsageError(message, hint=hint)


def _note_unused(options: LaunchOptions) -> None:
    """Print which options do nothing because no mpirun is used."""
    values = {
        "--mpi-args": options.mpi_args,
        "--tcp": options.tcp,
        "--mpirun": options.mpirun,
    }
    given = [name for name, value in values.items() if value]
    if options.binding_args:
        print_message(
            "--binding-args: on one host it only keeps ranks from being bound"
        )
    if given:
        print_message(
            f"{', '.join(given)}: without effect on one host, where no mpirun is used\n"
            "HINT: --mpi starts the ranks by mpirun"
        )


def _check_elastic(options: LaunchOptions, size: int) -> None:
    min_np, max_np = options.min_np, options.max_np
    if min_np is not None and min_np > size:
        raise UsageError(
            f"--min-np {min_np}, but only {size} ranks are started",
            hint=f"--min-np {size} or less",
        )
    if max_np is not None and max_np != size:
        why = "the job could never have more" if max_np > size else "that is more"
        raise UsageError(
            f"--max-np {max_np}, and {size} ranks are started: {why}",
            hint=f"--max-np {size} replaces lost ranks; with --host-discovery-script "
            "a job can grow",
        )


def _hosts(options: LaunchOptions) -> list[hosts.Host]:
    """Return the hosts of the command line, else of the batch system, else localhost."""
    if options.hosts:
        return hosts.parse_list(options.hosts)
    if options.hostfile:
        return hosts.read(options.hostfile)
    if environment.detect().size == 1:
        allocated = hosts.find_allocation(os.environ)
        if allocated:
            listed = hosts.write(allocated.hosts, "list")
            print_message(f"in the {allocated.system} allocation: {listed}")
            return list(allocated.hosts)
    if options.num_proc is None:
        raise UsageError(
            "how many ranks? Neither -np nor a list of hosts is given",
            hint=EXAMPLE,
        )
    return [hosts.Host("localhost", options.num_proc)]
