"""What the launcher runs on each host before mpirun: ``python -m collective.launch.probe``.

Prints, as JSON, the versions installed there, and whether the host can open a TCP
connection back to the launcher's, as mpirun's daemons will have to. So a host for which
mpirun would wait for ever, or fail without a reason, is reported at once. Both ends prove a
secret, which the probe gets by its standard input.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import errno
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from collective.errors import CollectiveError
from collective.launch import mpi, versions
from collective.net import interfaces, shared_secret

_CONNECT_SECONDS = 3.0
# Connections that wait for their proof at the same time; more wait in the backlog.
_AT_ONCE = 256
# Errors of accept() after which the listener works on (accept(2)).
_PASSING = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM),
    *(errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.EINTR),
}
_RETRY_SECONDS = 0.05


@contextlib.contextmanager
def listening(nics: Sequence[str], secret: str) -> Iterator[list[str]]:
    """Answers probes of other hosts, at the addresses that they get and no others.

    Args:
        nics: Interfaces that carry the traffic; empty for all but loopback.
        secret: What a probe must know to be answered.

    Yields:
        Where a probe finds this host: each address, a colon, and its port.
    """
    mine = interfaces.interfaces()
    addresses = [i.host for i in mine if i.name in nics] or [i.host for i in mine]
    with contextlib.ExitStack() as opened:
        found = []
        for address in addresses:
            listener = opened.enter_context(
                socket.create_server((address, 0), backlog=1024)
            )
            opened.callback(_stop, listener)
            threading.Thread(
                target=_serve, args=(listener, secret), daemon=True
            ).start()
            found.append(f"{address}:{listener.getsockname()[1]}")
        yield found


def _serve(listener: socket.socket, secret: str) -> None:
    free = threading.BoundedSemaphore(_AT_ONCE)

    def greet(caller: socket.socket) -> None:
        with caller, contextlib.suppress(OSError):
            shared_secret.verify_caller(caller, secret)
        free.release()

    while True:
        free.acquire()
        try:
            caller, _ = listener.accept()
        except OSError as error:
            if error.errno not in _PASSING:
                return  # closed
            free.release()
            time.sleep(_RETRY_SECONDS)
            continue
        threading.Thread(target=greet, args=(caller,), daemon=True).start()


def _stop(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # ends accept()


def local_versions(mpirun: str) -> dict[str, str]:
    """Versions on this host by name, with that of mpirun; Python's without the patch."""
    found = versions.installed()
    found["python"] = ".".join(found["python"].split(".")[:2])
    with contextlib.suppress(CollectiveError):
        found["mpirun"] = str(mpi.find(mpirun))
    return found


def why_cut_off(addresses: Sequence[str], secret: str) -> str:
    """Why none of the launcher's addresses can be connected to; empty if one can.

    Args:
        addresses: Each with a colon and its port.
        secret: What proves that the launcher answers.
    """

    def connect(address: str) -> str:
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), _CONNECT_SECONDS) as link:
                shared_secret.verify_listener(link, secret)
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
    each = (f"{host}: {why}" for host, why in zip(hosts, reasons, strict=True))
    return f"no connection from it to {', '.join(each)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what is found."""
    parser = argparse.ArgumentParser("python -m collective.launch.probe")
    parser.add_argument("--mpirun", required=True)
    parser.add_argument("addresses", nargs="*", metavar="ADDRESS:PORT")
    options = parser.parse_args(arguments)
    found = {
        "versions": local_versions(options.mpirun),
        "cut_off": why_cut_off(options.addresses, shared_secret.from_stdin()),
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
