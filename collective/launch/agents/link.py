"""A connection that carries frames; between head and node each frame is sealed.

A frame carries commands, so a proof of the secret at the start is not enough: each frame is
authenticated, with its number and its direction, by a key that only this connection has.
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

_COUNTER = struct.Struct("!4sQ")  # direction and number of a frame: 12 bytes
MOST = 1 << 24  # most bytes of a frame


class Seal:
    """Authenticates the frames of one direction, in their order, by HMAC-SHA256."""

    size = 32  # bytes that the seal adds to a frame

    def __init__(self, key: bytes, direction: bytes):
        self._key, self._direction, self._count = key, direction, 0

    def close(self, head: bytes, data: bytes) -> bytes:
        """Return the data of the next frame in the form that is sent."""
        return data + self._tag(head, data)

    def open(self, head: bytes, sealed: bytes) -> bytes:
        """Return the data of the next frame that was received.

        Raises:
            OSError: The frame was changed or repeated, or one before it is missing.
        """
        data, tag = sealed[: -self.size], sealed[-self.size :]
        if not hmac.compare_digest(tag, self._tag(head, data)):
            raise OSError("a message that is not genuine")
        return data

    def _tag(self, head: bytes, data: bytes) -> bytes:
        self._count += 1
        counter = _COUNTER.pack(self._direction, self._count)
        return hmac.digest(self._key, counter + head + data, "sha256")


@dataclass(frozen=True)
class Frame:
    """One message on a connection: its stream, its kind, and its data."""

    stream: int
    kind: bytes
    data: bytes


class Link:
    """One end of a connection.

    Args:
        key: Key of the connection; None if the other end is a process of this user.
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
        ours, theirs = (b"head", b"node") if is_head else (b"node", b"head")
        self._out = Seal(key, ours) if key else None
        self._in = Seal(key, theirs) if key else None

    async def send(self, stream: int, kind: bytes, data: bytes = b"") -> None:
        """Send a frame, and wait while too much is on its way."""
        self.put(stream, kind, data)
        with contextlib.suppress(OSError):
            await self.writer.drain()

    def put(self, stream: int, kind: bytes, data: bytes = b"") -> None:
        """Send a frame at once; do nothing if the connection is lost."""
        if not self.writer.is_closing():
            head = HEADER.pack(stream, kind, len(data))
            sent = self._out.close(head, data) if self._out else data
            self.writer.write(head + sent)

    async def frames(self) -> AsyncIterator[Frame]:
        """Yield the received frames until the connection ends or a frame is not genuine."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                head = await self.reader.readexactly(HEADER.size)
                stream, kind, size = HEADER.unpack(head)
                if size > MOST:
                    return
                more = self._in.size if self._in else 0
                data = await self.reader.readexactly(size + more)
                yield Frame(
                    stream, kind, self._in.open(head, data) if self._in else data
                )

    async def first(self, seconds: float) -> Frame | None:
        """Return the next frame; None if none arrives in time."""
        with contextlib.suppress(asyncio.TimeoutError, StopAsyncIteration):
            return await asyncio.wait_for(self.frames().__anext__(), seconds)
        return None

    def close(self) -> None:
        """End the connection."""
        self.writer.close()


def keep_alive(link: socket.socket, seconds: int) -> None:
    """Have the kernel end a connection whose other end is silent for so long."""
    probes = max(1, min(5, seconds // 2))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, seconds - probes),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, probes),
        (socket.TCP_USER_TIMEOUT, 1000 * seconds),
    ):
        link.setsockopt(socket.IPPROTO_TCP, option, value)
