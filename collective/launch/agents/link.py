"""A connection that carries frames: between head and node each is sealed.

A frame carries commands, so that a proof at the start is not enough: each has the HMAC of its
content, its number and its direction, by a key of this connection alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass

from collective.launch.agents.shell import HEADER

_SEAL = 32  # bytes
_COUNTER = struct.Struct("!cQ")  # direction and number of a frame
MOST = 1 << 24  # bytes of a frame


class Seals:
    """Seals the frames of one direction, in their order."""

    def __init__(self, key: bytes, direction: bytes):
        self._key, self._direction, self._count = key, direction, 0

    def next(self, frame: bytes) -> bytes:
        """The seal of the next frame."""
        counter = _COUNTER.pack(self._direction, self._count)
        self._count += 1
        return hmac.digest(self._key, counter + frame, "sha256")


@dataclass(frozen=True)
class Frame:
    """What one end sends the other: of which stream, of which kind, and its data."""

    stream: int
    kind: bytes
    data: bytes


class Link:
    """One end of a connection.

    Args:
        reader: What comes.
        writer: What goes.
        key: Of the connection; None where the other end is a process of this user.
        is_head: Which end this is.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        key: bytes | None = None,
        is_head: bool = False,
    ):
        self.reader, self.writer = reader, writer
        ours, theirs = (b"h", b"n") if is_head else (b"n", b"h")
        self._sent = Seals(key, ours) if key else None
        self._received = Seals(key, theirs) if key else None

    async def send(self, stream: int, kind: bytes, data: bytes = b"") -> None:
        """Sends a frame; does nothing where the connection is lost."""
        if self.writer.is_closing():
            return
        frame = HEADER.pack(stream, kind, len(data)) + data
        seal = self._sent.next(frame) if self._sent else b""
        self.writer.write(frame + seal)
        with contextlib.suppress(OSError):
            await self.writer.drain()

    async def frames(self) -> AsyncIterator[Frame]:
        """The frames that come, until the connection ends or a frame is not genuine."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                head = await self.reader.readexactly(HEADER.size)
                stream, kind, size = HEADER.unpack(head)
                if size > MOST:
                    return
                data = await self.reader.readexactly(size)
                if self._received:
                    seal = await self.reader.readexactly(_SEAL)
                    if not hmac.compare_digest(seal, self._received.next(head + data)):
                        return
                yield Frame(stream, kind, data)

    async def first(self, seconds: float) -> Frame | None:
        """The next frame; None if none comes in time."""
        with contextlib.suppress(asyncio.TimeoutError, StopAsyncIteration):
            return await asyncio.wait_for(self.frames().__anext__(), seconds)
        return None

    def close(self) -> None:
        """Ends the connection."""
        self.writer.close()


def keep_alive(link: socket.socket, seconds: int) -> None:
    """Has the kernel end a connection whose other end is silent for so long."""
    probes = max(1, min(5, seconds // 2))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, seconds - probes),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, probes),
        (socket.TCP_USER_TIMEOUT, 1000 * seconds),
    ):
        link.setsockopt(socket.IPPROTO_TCP, option, value)
