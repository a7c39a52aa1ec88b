"""``python -m collective.launch -np 4 python train.py``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from collective import environment, hosts
from collective.elastic import generations
from collective.errors import CollectiveError, UsageError
from collective.launch import options, single_host, tuning
from collective.launch.discovery import Discovery
from collective.launch.output import Style, tell
from collective.streams import open_streams


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
        0 if every rank returned 0; 2 for bad arguments; 130 where it was interrupted;
        else what the first rank that failed returned, or 128 + the signal that ended
        it.
    """
    open_streams()
    try:
        given = options.parse(arguments)
        if given.check_build:
            from collective.launch import check_build

            print(check_build.text())
            return 0
        return _launch(given)
    except CollectiveError as error:
        tell(str(error))
        return error.exit_code
    except KeyboardInterrupt:  # before the ranks were started
        tell("interrupted")
        return 130


def _launch(given: argparse.Namespace) -> int:
    for name in (generations.JOB, generations.NUMBER):
        os.environ.pop(name, None)  # of a job within which this one is started
    directory = Path(given.output_filename) if given.output_filename else None
    style = Style(not given.no_prefix, given.prefix_output_with_timestamp, directory)
    variables = {**tuning.variables(given), "PYTHONUNBUFFERED": "1"}
    if given.host_discovery_script:
        from collective.launch.generations import Rounds

        discovery = Discovery(given.host_discovery_script, given.slots_per_host)
        discovery.wait_for(given.num_proc or given.min_np)
        with discovery:
            return Rounds(lambda: discovery.hosts, given, style, variables).run()
    found = _hosts(given)
    ranks = hosts.place(found, given.num_proc)
    if given.min_np is not None and given.min_np > len(ranks):
        raise UsageError(
            f"--min-np {given.min_np}, but only {len(ranks)} ranks are started",
            hint=f"--min-np {len(ranks)} or less",
        )
    if given.max_np is not None and given.max_np != (size := len(ranks)):
        more = given.max_np > size
        raise UsageError(
            f"--max-np {given.max_np}, and {size} ranks are started: "
            + ("no more are ever asked for" if more else "more than that"),
            hint=f"--max-np {size}: lost ranks are replaced; with "
            "--host-discovery-script more can come",
        )
    local = all(single_host.is_here(host) for host in {rank.host for rank in ranks})
    if local and not given.use_mpi:
        return single_host.run(ranks, given, style, variables)
    if given.use_gloo:
        names = ", ".join(dict.fromkeys(rank.host.name for rank in ranks))
        raise UsageError(
            f"--gloo starts ranks on this host only, not on {names}",
            hint="leave --gloo out: mpirun reaches other hosts",
        )
    if given.max_np is not None:
        from collective.launch.generations import Rounds

        return Rounds(lambda: found, given, style, variables).run(ranks)
    from collective.launch import multi_host

    return multi_host.run(ranks, given, style, variables)


def _hosts(given: argparse.Namespace) -> list[hosts.Host]:
    """Where to start: as told, or the Slurm allocation we are in, or this host."""
    if given.hosts:
        return hosts.parse_list(given.hosts)
    if given.hostfile:
        return hosts.read(given.hostfile)
    if environment.launcher() is None:
        allocated = hosts.allocation(os.environ)
        if allocated:
            tell(f"in a Slurm allocation: {hosts.write(allocated, 'list')}")
            return allocated
    if given.num_proc is None:
        raise UsageError(
            "how many ranks? There is no -np and no list of hosts",
            hint=options.EXAMPLE,
        )
    return [hosts.Host("localhost", given.num_proc)]


if __name__ == "__main__":
    sys.exit(main())
