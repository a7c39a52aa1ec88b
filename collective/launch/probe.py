"""What the launcher has each host run before mpirun: ``python -m collective.launch.probe``.

Prints, as JSON, the versions that are installed there, and whether the host can open a
TCP connection back to the launcher's, as mpirun's daemons will have to. So that what
mpirun would wait for in vain, or fail on without a reason, is told at once.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import secrets
import socket
import sys
import threading
from collections.abc import Iterator, Sequence

from collective import interfaces
from collective.errors import CollectiveError
from collective.launch import mpi, versions

_CONNECT_SECONDS = 3.0


@contextlib.contextmanager
def listening(nics: Sequence[str]) -> Iterator[list[str]]:
    """Answers probes of other hosts.

    Args:
        nics: Interfaces that carry the traffic; empty for all.

    Yields:
        The arguments by which a probe finds us.
    """
    token = secrets.token_hex(8)
    mine = interfaces.interfaces()
    addresses = [i.host for i in mine if i.name in nics] or [i.host for i in mine]
    with socket.create_server(("", 0), backlog=1024) as listener:

        def serve() -> None:
            while True:
                try:
                    caller, _ = listener.accept()
                except OSError:
                    return  # closed
                with caller, contextlib.suppress(OSError):
                    caller.sendall(token.encode())

        threading.Thread(target=serve, daemon=True).start()
        try:
            port = str(listener.getsockname()[1])
            yield ["--port", port, "--token", token, *addresses]
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # ends accept()


def found_here(mpirun: str) -> dict[str, str]:
    """Versions by name, that of an mpirun among them; Python's without the patch."""
    found = versions.installed()
    found["python"] = ".".join(found["python"].split(".")[:2])
    with contextlib.suppress(CollectiveError):
        found["mpirun"] = str(mpi.find(mpirun))
    return found


def why_cut_off(addresses: Sequence[str], port: int, token: str) -> str:
    """Why none of the launcher's addresses can be connected to; empty if one can."""

    def connect(address: str) -> str:
        try:
            with socket.create_connection((address, port), _CONNECT_SECONDS) as link:
                told = link.recv(len(token), socket.MSG_WAITALL).decode()
                return "" if told == token else "somebody else answers"
        except OSError as error:
            return error.strerror or str(error)

    if not addresses:
        return ""
    with concurrent.futures.ThreadPoolExecutor(len(addresses)) as pool:
        reasons = list(pool.map(connect, addresses))
    if "" in reasons:
        return ""
    told = (f"{a}: {why}" for a, why in zip(addresses, reasons, strict=True))
    return f"no connection from it to {', '.join(told)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what is found."""
    parser = argparse.ArgumentParser("python -m collective.launch.probe")
    parser.add_argument("--mpirun", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token", required=True)
    parser.add_argument("addresses", nargs="*")
    options = parser.parse_args(arguments)
    answer = {
        "versions": found_here(options.mpirun),
        "cut_off": why_cut_off(options.addresses, options.port, options.token),
    }
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
