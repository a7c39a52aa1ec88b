"""A secret that both ends of a TCP connection know: proved, and never sent.

Each end sends a random number, and proves the secret by its HMAC of both numbers
(HMAC-SHA256, RFC 2104). So an eavesdropper learns nothing, a proof is of no use twice, and
neither end talks to a stranger. Later data are not encrypted; they can be sealed with the key
that both ends then have.

``multiprocessing.connection`` has a challenge of the same kind. It is not used here because
it waits for ever for a silent peer, takes HMAC-MD5 before Python 3.12, and leaves the roles
of the two ends out of the proof, so that a proof can be sent back to its maker.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import sys

from collective.running_time import Deadline

_BYTES = 32
_SECONDS = 2.0  # for a proof, so that a stranger cannot delay honest callers


class WrongSecretError(OSError):
    """The other end does not know the secret."""

    def __init__(self) -> None:
        super().__init__("another program answers: it does not know the secret")


def generate() -> str:
    """Return a new secret.

    It reaches other programs by their standard input, because every user of the machine sees
    a command line.
    """
    return secrets.token_hex(_BYTES)


def from_stdin() -> str:
    """Return the secret, from the first line of standard input."""
    return sys.stdin.readline().strip()


def verify_caller(caller: socket.socket, secret: str) -> bytes:
    """Have the caller prove the secret, then prove it to the caller.

    Returns:
        A key of this connection, 32 bytes, the same at both ends.

    Raises:
        OSError: The other end did not prove it in time; the connection must be closed.
    """
    deadline = Deadline(_SECONDS)
    mine = secrets.token_bytes(_BYTES)
    caller.sendall(mine)
    ended = ConnectionError("its connection ended before it proved the secret")
    theirs, proof = (_receive(caller, deadline, ended) for _ in range(2))
    if not hmac.compare_digest(proof, _proof(secret, b"caller", mine, theirs)):
        raise WrongSecretError
    caller.sendall(_proof(secret, b"listener", mine, theirs))
    return _proof(secret, b"key", mine, theirs)


def verify_listener(
    link: socket.socket, secret: str, seconds: float | None = None
) -> bytes:
    """Prove the secret to the listener, then have the listener prove it.

    Args:
        seconds: Limit for the listener's answer; 2 by default.

    Returns:
        The key, as from ``verify_caller``.

    Raises:
        OSError: As for ``verify_caller``.
    """
    deadline = Deadline(_SECONDS if seconds is None else seconds)
    ended = WrongSecretError()  # the listener does not report this
    theirs, mine = _receive(link, deadline, ended), secrets.token_bytes(_BYTES)
    link.sendall(mine + _proof(secret, b"caller", theirs, mine))
    proof = _receive(link, deadline, ended)
    if not hmac.compare_digest(proof, _proof(secret, b"listener", theirs, mine)):
        raise WrongSecretError
    return _proof(secret, b"key", theirs, mine)


def _proof(secret: str, role: bytes, listener: bytes, caller: bytes) -> bytes:
    return hmac.digest(secret.encode(), role + listener + caller, "sha256")


def _receive(link: socket.socket, deadline: Deadline, ended: OSError) -> bytes:
    data = b""
    before = link.gettimeout()
    try:
        while len(data) < _BYTES:
            if deadline.passed():  # also if a byte arrives now and then
                raise TimeoutError("no proof of the secret in time")
            link.settimeout(deadline.pause())
            with contextlib.suppress(TimeoutError):
                part = link.recv(_BYTES - len(data))
                if not part:
                    raise ended
                data += part
    finally:
        link.settimeout(before)
    return data
