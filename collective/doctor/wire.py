"""Bandwidth and latency between two hosts: plain TCP, one connection.

``python -m collective.doctor.wire NAME`` on the host of that name listens there and
prints its port; it ends with its standard input. ``... wire NAME PORT`` on another host
measures. Both get a secret by the first line of standard input, and prove it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import select
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence

from collective.net.callers import Callers
from collective.net.interfaces import interfaces, name_of
from collective.net.shared_secret import from_stdin, verify_caller, verify_listener

PINGS = 200
SECONDS = 0.5
_CONNECT_SECONDS = 5.0
_AT_MOST_SECONDS = 600.0
_CHUNK = 1 << 18
_PING, _STREAM, _END = b"P", b"S", b"E"


def serve(name: str, secret: str) -> None:
    """Answers callers until standard input ends.

    Args:
        name: Of this host, as the callers know it; it listens at no other address.
        secret: What a caller must know.
    """
    with contextlib.ExitStack() as opened:
        listeners = [opened.enter_context(one) for one in _listen(name)]
        print(json.dumps({"port": listeners[0].getsockname()[1]}), flush=True)
        deadline, callers = time.monotonic() + _AT_MOST_SECONDS, Callers()
        while time.monotonic() < deadline:
            ready = select.select([*listeners, sys.stdin], [], [], 1.0)[0]
            if sys.stdin in ready and not os.read(sys.stdin.fileno(), 1):
                return
            for listener in (one for one in listeners if one in ready):
                with contextlib.suppress(OSError):  # the caller reports why
                    caller, (address, *_) = listener.accept()
                    args = (caller, address, secret, callers)
                    threading.Thread(target=_serve, args=args, daemon=True).start()


def _serve(caller: socket.socket, address: str, secret: str, callers: Callers) -> None:
    """Answers a caller that proves the secret; a silent one keeps no other waiting."""
    with caller, contextlib.suppress(OSError):
        caller.settimeout(_CONNECT_SECONDS)
        with callers.waiting(caller, address):
            verify_caller(caller, secret)
        _answer(caller)


def _listen(name: str) -> list[socket.socket]:
    """Listeners at one port of the addresses that the name has on this host.

    If the name has none here (it means loopback, or a router has the address), at every
    address but loopback.
    """
    try:
        asked = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
        named = dict.fromkeys(str(found[4][0]) for found in asked)
    except OSError:
        named = {}
    known = [a for a in named if a == name or not ipaddress.ip_address(a).is_loopback]
    for addresses in (known, [i.host for i in interfaces()]):
        listeners: list[socket.socket] = []
        for address in addresses:
            port = listeners[0].getsockname()[1] if listeners else 0
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with contextlib.suppress(OSError):
                listeners.append(socket.create_server((address, port), family=family))
        if listeners:
            return listeners
    raise OSError(f"{name} has no address on this host")


def _answer(caller: socket.socket) -> None:
    caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        what = caller.recv(1)
        if what == _PING:
            caller.sendall(_PING)
        elif what == _STREAM:
            left = int.from_bytes(_exactly(caller, 8), "big")
            buffer = bytearray(_CHUNK)
            while left:
                left -= caller.recv_into(buffer, min(left, _CHUNK)) or _gone()
            caller.sendall(_END)
        else:
            return


def measure(name: str, port: int, secret: str) -> dict[str, float | str]:
    """Measures to a host where ``serve`` runs.

    Returns:
        ``latency`` one way, in seconds: half of the median round trip of a byte;
        ``bandwidth`` in bytes/s; ``interface`` and ``address`` here, ``peer`` there.

    Raises:
        OSError: If it cannot be reached, or the connection breaks.
    """
    with socket.create_connection((name, port), _CONNECT_SECONDS) as link:
        verify_listener(link, secret)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(PINGS):
            start = time.perf_counter()
            link.sendall(_PING)
            _exactly(link, 1)
            trips.append(time.perf_counter() - start)
        # Grows until a transfer takes long enough to be measured on a fast network.
        size, speed, chunk = _CHUNK, 0.0, bytes(_CHUNK)
        while True:
            start = time.perf_counter()
            link.sendall(_STREAM + size.to_bytes(8, "big"))
            for _ in range(size // _CHUNK):
                link.sendall(chunk)
            _exactly(link, 1)
            took = time.perf_counter() - start
            speed = size / took
            if took > SECONDS / 2 or size >= 1 << 28:
                break
            size *= 4
        mine = link.getsockname()[0].removeprefix("::ffff:")
        peer = link.getpeername()[0].removeprefix("::ffff:")
    return {
        "latency": statistics.median(trips) / 2,
        "bandwidth": speed,
        "interface": name_of(mine),
        "address": mine,
        "peer": peer,
    }


def _exactly(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += link.recv(count - len(data)) or bytes(_gone())
    return data


def _gone() -> int:
    raise ConnectionError("the other end closed the connection")


def main(arguments: Sequence[str]) -> int:
    """Runs either end; returns the exit code."""
    secret = from_stdin()
    try:
        if len(arguments) == 1:
            serve(arguments[0], secret)
        else:
            print(json.dumps(measure(arguments[0], int(arguments[1]), secret)))
    except OSError as error:
        print(error.strerror or error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
