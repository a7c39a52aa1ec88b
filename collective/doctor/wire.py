"""Bandwidth and latency between two hosts: plain TCP, one connection.

``python -m collective.doctor.wire`` on one host listens and tells its port; it ends
when its standard input does. ``... wire NAME PORT`` on another measures.
"""

from __future__ import annotations

import json
import os
import select
import socket
import statistics
import sys
import time
from collections.abc import Sequence

from collective.interfaces import name_of

PINGS = 200
SECONDS = 0.5
_CONNECT_SECONDS = 5.0
_AT_MOST_SECONDS = 600.0
_CHUNK = 1 << 18
_PING, _STREAM, _END = b"P", b"S", b"E"


def serve() -> None:
    """Answers one caller after another until standard input ends."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.create_server(
        ("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6
    ) as listener:
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        deadline = time.monotonic() + _AT_MOST_SECONDS
        while time.monotonic() < deadline:
            ready = select.select([listener, sys.stdin], [], [], 1.0)[0]
            if sys.stdin in ready and not os.read(sys.stdin.fileno(), 1):
                return
            if listener in ready:
                caller, _ = listener.accept()
                with caller:
                    caller.settimeout(_CONNECT_SECONDS)
                    try:
                        _answer(caller)
                    except OSError:
                        continue  # the caller tells why


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


def measure(name: str, port: int) -> dict[str, float | str]:
    """Measures to a host where ``serve`` runs.

    Returns:
        ``latency`` one way, in seconds: half of the median round trip of a byte;
        ``bandwidth`` in bytes/s; ``interface`` and ``address`` here, ``peer`` there.

    Raises:
        OSError: If it cannot be reached, or the connection breaks.
    """
    with socket.create_connection((name, port), _CONNECT_SECONDS) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(PINGS):
            start = time.perf_counter()
            link.sendall(_PING)
            _exactly(link, 1)
            trips.append(time.perf_counter() - start)
        # Long enough to be worth it on a fast wire, short enough on a slow one.
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
    raise ConnectionError("the other end hung up")


def main(arguments: Sequence[str]) -> int:
    """Runs either end; returns the exit code."""
    if not arguments:
        serve()
        return 0
    try:
        print(json.dumps(measure(arguments[0], int(arguments[1]))))
    except OSError as error:
        print(error.strerror or error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
