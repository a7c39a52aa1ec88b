"""Checks every host before mpirun starts, because these errors name the host.

On each host ``python -m collective.launch.reachability`` prints, as JSON, the versions
installed there, and whether the host can open a TCP connection back to the launcher's host,
as mpirun's daemons must. So a host for which mpirun would wait for ever, or fail without a
reason, is reported at once. Both ends prove a secret, which the host reads from its standard
input.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from collective.environment import gpus
from collective.errors import CollectiveError
from collective.hosts import Host, is_local
from collective.launch import mpi, remote_shell, versions
from collective.launch.options import ANSWER_SECONDS, LaunchOptions
from collective.launch.processes import run
from collective.net import interfaces, shared_secret
from collective.net.callers import Callers

_AT_ONCE = 32
_CONNECT_SECONDS = 3.0
_POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class Answers:
    """The reports of the hosts."""

    # Hosts that cannot open a connection to this one, each with the reason. This alone
    # does not end a job: mpirun may know a way that this check does not.
    cut_off: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Each host's own name, from ``mpi.own_name``, this host included.
    names: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    have_gpus: Sequence[str] = ()  # hosts with GPUs that the ranks may use


def check(hosts: Sequence[Host], options: LaunchOptions, mpirun: str) -> Answers:
    """Have each other host report its versions, and connect back to this one.

    Each includes this ``mpirun`` in its versions.

    Raises:
        CollectiveError: It names the hosts that do not answer and why, or the versions
            that differ.
    """
    others = [host for host in hosts if not is_local(host)]
    have_gpus = ["this host"] if gpus.granted() else []
    if not others:
        return Answers(have_gpus=have_gpus)
    key = shared_secret.generate()
    seconds = options.start_timeout or ANSWER_SECONDS
    with (
        listening(options.nics, key) as way_back,
        concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool,
    ):
        words = ["collective.launch.reachability", "--mpirun", mpirun, *way_back]
        commands = [options.shell.command(host, *words) for host in others]
        answers = list(
            pool.map(lambda command: run(command, seconds, f"{key}\n"), commands)
        )
    found, silent = {}, {}
    for host, command, answer in zip(others, commands, answers, strict=True):
        try:
            found[host.name] = json.loads(answer.out.strip().splitlines()[-1])
        except (ValueError, IndexError):
            code = "" if answer.code is None else f" (exit code {answer.code})"
            why = answer.error[-300:] or "no message"
            silent[f"{host.name}: {why}{code}"] = command
    if silent:
        raise CollectiveError(
            "cannot reach every host:\n  " + "\n  ".join(silent),
            hint=remote_shell.hint(next(iter(silent.values()))),
        )
    reported = {name: answer["versions"] for name, answer in found.items()}
    _compare({"this host": _local_versions(mpirun), **reported})
    names = {name: tuple(answer["name"]) for name, answer in found.items()}
    mine = next((host.name for host in hosts if is_local(host)), "")
    if mine or mpi.own_name() not in names.values():  # else by ssh, as user@
        names[mine or "this host"] = mpi.own_name()
    cut_off = {name: a["cut_off"] for name, a in found.items() if a["cut_off"]}
    have_gpus += [name for name, answer in found.items() if answer["gpus"]]
    return Answers(cut_off, names, have_gpus)


def _compare(reported: Mapping[str, Mapping[str, str]]) -> None:
    unequal = versions.differing(reported)
    if unequal:
        rows = "\n  ".join(f"{name}: {which}" for name, which in unequal.items())
        raise CollectiveError(
            f"the hosts have different versions:\n  {rows}",
            hint=f"install the same on every host, at the same path ({sys.prefix}); details: "
            "python -m collective.doctor with the same hosts",
        )


class _Listener(socketserver.ThreadingTCPServer):
    """Proves the secret to callers that know it, and bounds the number of others."""

    request_queue_size = 1024
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: str, secret: str):
        super().__init__((address, 0), socketserver.BaseRequestHandler)
        self._secret = secret
        self._callers = Callers()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:  # for example no free descriptor; it tries again later
            time.sleep(_POLL_SECONDS)
            raise

    def finish_request(self, request: Any, client_address: Any) -> None:
        with (
            contextlib.suppress(OSError),
            self._callers.waiting(request, client_address[0]),
        ):
            shared_secret.verify_caller(request, self._secret)


@contextlib.contextmanager
def listening(nics: Sequence[str], secret: str) -> Iterator[list[str]]:
    """Answer probes of other hosts, only at the addresses that those hosts get.

    Without ``nics`` these are the addresses of all interfaces but loopback.

    Yields:
        Addresses at which a probe finds this host, each with a colon and its port.
    """
    mine = interfaces.interfaces()
    addresses = [i.host for i in mine if i.name in nics] or [i.host for i in mine]
    with contextlib.ExitStack() as opened:
        found = []
        for address in addresses:
            server = opened.enter_context(_Listener(address, secret))
            opened.callback(server.shutdown)
            serve, poll = server.serve_forever, (_POLL_SECONDS,)
            threading.Thread(target=serve, args=poll, daemon=True).start()
            found.append(f"{address}:{server.server_address[1]}")
        yield found


def _local_versions(mpirun: str) -> dict[str, str]:
    """Return the versions on this host by name, mpirun's included, Python's without patch."""
    found = versions.installed()
    found["python"] = ".".join(found["python"].split(".")[:2])
    with contextlib.suppress(CollectiveError):
        found["mpirun"] = str(mpi.find(mpirun))
    return found


def why_cut_off(addresses: Sequence[str], secret: str) -> str:
    """Return why no process with the secret answers at the addresses, or ''.

    Each address has a colon and its port.
    """

    def connect(address: str) -> str:
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), _CONNECT_SECONDS) as link:
                shared_secret.verify_listener(link, secret)
                return ""
        except OSError as error:
            return f"{host}: {error.strerror or error}"

    if not addresses:
        return ""
    with concurrent.futures.ThreadPoolExecutor(len(addresses)) as pool:
        reasons = list(pool.map(connect, addresses))
    return "" if "" in reasons else f"no connection from it to {', '.join(reasons)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report of this host."""
    parser = argparse.ArgumentParser("python -m collective.launch.reachability")
    parser.add_argument("--mpirun", required=True)
    parser.add_argument("addresses", nargs="*", metavar="ADDRESS:PORT")
    options = parser.parse_args(arguments)
    found = {
        "name": mpi.own_name(),
        "versions": _local_versions(options.mpirun),
        "cut_off": why_cut_off(options.addresses, shared_secret.from_stdin()),
        "gpus": gpus.granted(),
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
