"""The remote shell: hands a command to the head, and passes its streams on.

It is a program of its own that imports nothing of the package: mpirun starts one for each node.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import sys

SOCKET = "COLLECTIVE_AGENT_SOCKET"  # an abstract Unix socket leaves no file
HEADER = struct.Struct("!IcI")  # stream, kind, length of the data that follow
RUN, STDIN, STDOUT, STDERR, EXIT, KILL, END, HELLO, HOSTS = (
    bytes([code]) for code in b"RIOEXKDHL"
)
LOST = 255  # ssh, too, returns this if the connection is lost
_PART = 65536
_TAKE_A_VALUE = ("-o", "-p", "-i", "-l")


def split(words: list[str]) -> tuple[str, str]:
    """Return host and command; options of ssh may precede and follow the host."""
    rest = list(words)
    at = 0
    while at < min(2, len(rest)):
        if rest[at].startswith("-"):
            del rest[at : at + (2 if rest[at] in _TAKE_A_VALUE else 1)]
        else:
            at += 1
    return (rest[0] if rest else "", " ".join(rest[1:]))


def main(words: list[str]) -> int:
    """Return the command's exit code; 255 if it was not started."""
    host, command = split(words)
    with socket.socket(socket.AF_UNIX) as link:
        try:
            link.connect("\0" + os.environ[SOCKET])
        except OSError as error:
            sys.stderr.write(f"no head of agents on this host: {error}\n")
            return LOST
        if host:
            _send(link, RUN, json.dumps([host, command]).encode())
        else:
            _send(link, HOSTS)
        return _relay(link, bool(host))


def _relay(link: socket.socket, takes_input: bool) -> int:
    received = b""
    watched: list[int] = [link.fileno(), *([0] if takes_input else [])]
    while True:
        for ready in select.select(watched, [], [])[0]:
            if ready == 0:
                part = os.read(0, _PART)
                _send(link, STDIN, part)
                if not part:
                    watched.remove(0)
                continue
            part = link.recv(_PART)
            if not part:
                return LOST
            received += part
            while len(received) >= HEADER.size:
                _, kind, size = HEADER.unpack_from(received)
                if len(received) < HEADER.size + size:
                    break
                data = received[HEADER.size : HEADER.size + size]
                received = received[HEADER.size + size :]
                if kind == EXIT:
                    return int(data)
                _write(2 if kind == STDERR else 1, data)


def _send(link: socket.socket, kind: bytes, data: bytes = b"") -> None:
    link.sendall(HEADER.pack(0, kind, len(data)) + data)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (BrokenPipeError, ConnectionError):
        sys.exit(LOST)
