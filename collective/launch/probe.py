"""What the launcher has each host run before mpirun: ``python -m collective.launch.probe``.

Prints, as JSON, the versions that are installed there, and whether the host can open a
TCP connection back to the launcher's, as mpirun's daemons will have to. So that what
mpirun would wait for in vain, or fail on without a reason, is told at once. Both ends
prove a secret, which the probe is given by its standard input.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import socket
import sys
import threading
from collections.abc import Iterator, Sequence

from collective.errors import CollectiveError
from collective.launch import mpi, versions
from collective.net import interfaces
from collective.net.shared_secret import answer, ask, given

_CONNECT_SECONDS = 3.0


@contextlib.contextmanager
def listening(nics: Sequence[str], secret: str) -> Iterator[list[str]]:
    """Answers probes of other hosts, on the addresses that they are told, no others.

    Args:
        nics: Interfaces that carry the traffic; empty for all but loopback.
        secret: What a probe must know to be answered.

    Yields:
        Where a probe finds us: each address, a colon, and its port.
    """
    mine = interfaces.interfaces()
    addresses = [i.host for i in mine if i.name in nics] or [i.host for i in mine]

    def greet(caller: socket.socket) -> None:
        with caller, contextlib.suppress(OSError):
            ask(caller, secret)

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                caller, _ = listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=greet, args=(caller,), daemon=True).start()

    with contextlib.ExitStack() as opened:
        found = []
        for address in addresses:
            listener = opened.enter_context(
                socket.create_server((address, 0), backlog=1024)
            )
            opened.callback(_stop, listener)
            threading.Thread(target=serve, args=(listener,), daemon=True).start()
            found.append(f"{address}:{listener.getsockname()[1]}")
        yield found


def _stop(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # ends accept()


def found_here(mpirun: str) -> dict[str, str]:
    """Versions by name, that of an mpirun among them; Python's without the patch."""
    found = versions.installed()
    found["python"] = ".".join(found["python"].split(".")[:2])
    with contextlib.suppress(CollectiveError):
        found["mpirun"] = str(mpi.find(mpirun))
    return found


def why_cut_off(addresses: Sequence[str], secret: str) -> str:
    """Why none of the launcher's addresses can be connected to; empty if one can.

    Args:
        addresses: Each with a colon and its port.
        secret: What proves that it is the launcher who answers.
    """

    def connect(address: str) -> str:
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), _CONNECT_SECONDS) as link:
                answer(link, secret)
                return ""
        except OSError as error:
            return error.strerror or str(error)

    if not addresses:
        return ""
    with concurrent.futures.ThreadPoolExecutor(len(addresses)) as pool:
        reasons = list(pool.map(connect, addresses))
    if "" in reasons:
        return ""
    hosts = [address.rpartition(":")[0] for address in addresses]
    told = (f"{host}: {why}" for host, why in zip(hosts, reasons, strict=True))
    return f"no connection from it to {', '.join(told)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what is found."""
    parser = argparse.ArgumentParser("python -m collective.launch.probe")
    parser.add_argument("--mpirun", required=True)
    parser.add_argument("addresses", nargs="*", metavar="ADDRESS:PORT")
    options = parser.parse_args(arguments)
    answer = {
        "versions": found_here(options.mpirun),
        "cut_off": why_cut_off(options.addresses, given()),
    }
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
