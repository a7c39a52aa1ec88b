"""``collectiverun -np 4 python train.py``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

try:
    from collective import environment, hosts, python_command
    from collective.elastic import generations
    from collective.errors import CollectiveError, UsageError
    from collective.launch import (
        command_line,
        plain_keras,
        processes,
        single_host,
        versions,
    )
    from collective.launch.discovery import SCRIPT_SECONDS, Discovery
    from collective.launch.elastic import ElasticRanks
    from collective.launch.options import EXAMPLE, LaunchOptions
    from collective.launch.output import print_message, settled
    from collective.streams import open_streams
except KeyboardInterrupt:  # Ctrl-C right after the start prints no traceback
    raise SystemExit(130) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 if every rank returned 0; 2 for bad arguments; 130 if it was interrupted;
        else the exit code of the first rank that failed, or 128 + the signal that ended
        it.
    """
    open_streams()
    try:
        options = command_line.parse(arguments)
        if options.check_build:
            print(versions.check_build())
            return 0
        for warning in environment.unknown.warnings(os.environ):
            print_message(f"warning: {warning}")
        typed = sys.argv[1:] if arguments is None else arguments
        return settled(_launch(options, typed))
    except CollectiveError as error:
        print_message(str(error))
        return error.exit_code
    except KeyboardInterrupt:  # the ranks have not been started yet
        print_message("interrupted")
        return 130


def _launch(options: LaunchOptions, arguments: Sequence[str]) -> int:
    """Start the job; import the modules for several hosts only if it needs them."""
    for name in generations.VARIABLES:
        os.environ.pop(name, None)  # set by the job that runs this launcher
    if options.agent:
        from collective.launch.agents import command

        return command.run(options, arguments)
    environment.lone.check_launcher(os.environ)
    script = options.host_discovery_script
    if script:
        from collective.launch.restarting import RestartingLauncher

        seconds = min(options.start_timeout or SCRIPT_SECONDS, SCRIPT_SECONDS)
        with Discovery(script, options.slots_per_host, seconds) as discovery:
            return RestartingLauncher(options, lambda: discovery.hosts).run()
    found = _hosts(options)
    placed = hosts.place(found, options.num_proc)
    size = hosts.slots_of(placed)
    _check_elastic(options, size)
    start = command_line.start_of(size)
    if text := plain_keras.warning(options.command, size, start):
        print_message(text)
    others = [host.name for host in placed if not hosts.is_local(host)]
    here = not others and not options.use_mpi
    if options.backend:
        _check_backend(options, size, "collectiverun" if here else "mpirun")
    if here:
        _note_unused(options)
        return _run_here(single_host.job(options, size), options)
    if options.use_gloo:
        raise UsageError(
            f"--gloo starts ranks on this host only, not on {', '.join(others)}",
            hint="leave --gloo out: mpirun reaches other hosts",
        )
    if options.min_np is not None:
        from collective.launch.restarting import RestartingLauncher

        return RestartingLauncher(options, lambda: found).run(placed)
    from collective.launch.mpirun import Mpirun

    mpirun = Mpirun(options, placed)
    if options.dry_run:
        print(mpirun.commands())
        return 0
    return mpirun.run()


def _run_here(
    job: single_host.EndTogether | ElasticRanks, options: LaunchOptions
) -> int:
    supervisor, size = job.supervisor, job.supervisor.size
    if options.dry_run:
        print(supervisor.commands())
        return 0
    code = supervisor.run()
    if code or any(map(job.membership.has_joined, range(size))):
        return code
    start = command_line.start_of(size)
    if text := plain_keras.none_joined(options.command, size, start):
        print_message(text)
    return code


def _check_backend(options: LaunchOptions, size: int, launcher: str) -> None:
    """Refuse a backend that ranks on this host could not use, before they are started.

    Like the doctor, it asks a program of its own, because this package must not import a
    backend.
    """
    words = [
        "--check",
        options.backend or "auto",
        "--launcher",
        launcher,
        "--size",
        str(size),
    ]
    if script := next((w for w in options.command if w.endswith(".py")), ""):
        words += ["--unedited", script]
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


if __name__ == "__main__":
    sys.exit(main())
