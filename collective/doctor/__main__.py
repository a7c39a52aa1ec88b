"""Examines this machine and, given hosts, all of them and their way to this one.

python -m collective.doctor
python -m collective.doctor --backend mpi --json
python -m collective.doctor --hostfile hosts

Latency and bandwidth between hosts:
collectiverun -H a,b python -m collective.bench --sizes 4,16M
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from collective import hosts
from collective.command_parser import Parser
from collective.doctor import findings, machine, multi_host, report
from collective.errors import CollectiveError, printable
from collective.launch import reachability, remote_shell
from collective.net import shared_secret


def parser() -> argparse.ArgumentParser:
    """Return the parser; its options about hosts are the launcher's."""
    p = Parser("python -m collective.doctor", description=__doc__)
    add = p.add_argument
    add("--json", action="store_true", help="for programs")
    add("--backend", action="append", default=[], metavar="NAME",
        help="exit code 1 unless it can be used here; may be repeated")  # fmt: skip
    where = p.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="LIST", help="node1:2,node2:2")
    where.add_argument("-hostfile", "--hostfile", metavar="FILE", help="any dialect")
    remote_shell.add_options(p)
    add("--network-interfaces", dest="nics", default="", metavar="LIST",
        help="those at which the hosts must reach this one")  # fmt: skip
    add("--start-timeout", type=int, metavar="SECONDS",
        help="for ssh to connect to a host (8)")  # fmt: skip
    add("--facts", nargs="*", help=argparse.SUPPRESS)  # addresses, with their ports
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 if everything asked for works; 1 if not; 2 for bad arguments.
    """
    options = parser().parse_args(arguments)
    if options.facts is not None:  # a doctor on another host has started this one
        secret = shared_secret.from_stdin()
        cut_off = reachability.why_cut_off(options.facts, secret)
        print(json.dumps({"cut_off": cut_off, **machine.examine_machine()}))
        return 0
    try:
        listed = hosts.parse_list(options.hosts) if options.hosts else []
        if options.hostfile:
            listed = hosts.read(options.hostfile)
        found: dict[str, Any] = {"machine": machine.examine_machine()}
        wrong = [*findings.of_machine(found["machine"], options.backend)]
        if listed:
            shell = remote_shell.from_options(options)
            nics = [name for name in options.nics.split(",") if name]
            found["hosts"], silent = multi_host.examine_hosts(listed, shell, nics)
            wrong += [*silent, *multi_host.differences(found["hosts"])]
    except CollectiveError as error:
        print(f"collective.doctor: {error}", file=sys.stderr)
        return error.exit_code
    failed = any(finding.fatal for finding in wrong)
    if options.json:
        found["findings"] = [vars(finding) for finding in wrong]
        found["works"] = not failed
        print(json.dumps(found, indent=1))
    else:
        parts = [report.machine_text(found["machine"])]
        parts.append(report.backends_text(found["machine"]["backends"]))
        if "hosts" in found:
            parts.append(report.hosts_text(found["hosts"]))
        print(printable("\n\n".join([*parts, report.findings_text(wrong)])))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
