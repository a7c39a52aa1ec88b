"""A switch between hosts that loses, delays and drops frames, as bad networks do.

This program replaces the kernel's bridge, because not every kernel has the means for this
(netem). Each host has a TAP device; a thread passes frames on.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

TUN = Path("/dev/net/tun")
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME_BYTES = 1 << 16
_IDLE_SECONDS = 0.05


def why_not() -> str:
    """Return why such a switch is impossible here; empty if it is possible."""
    return "" if os.access(TUN, os.R_OK | os.W_OK) else f"there is no {TUN}"


@dataclass(frozen=True)
class Network:
    """The faults of the network.

    Attributes:
        loss: Fraction of the frames that are lost.
        delay: Seconds that each frame takes.
        longest: Bytes of the longest frame that passes (an MTU hole drops the others).
        silent: Hosts, numbered from 1, that send no frames; they still receive.
        deaf: Hosts that receive no frames.
    """

    loss: float = 0.0
    delay: float = 0.0
    longest: int = _FRAME_BYTES
    silent: frozenset[int] = field(default_factory=frozenset)
    deaf: frozenset[int] = field(default_factory=frozenset)


class Switch:
    """Passes each frame on to all other hosts."""

    def __init__(self) -> None:
        self._network, self._devices = Network(), list[int]()
        self._late: list[tuple[float, int, int, bytes]] = []  # heap: when, number, from
        self._frames = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def add(self, namespace: str) -> None:
        """Connect the next host, whose device is ``eth0``; before ``start``."""
        device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        name = f"lab{os.getpid()}-{len(self._devices)}"
        request = struct.pack("16sH22s", name.encode(), _IFF_TAP | _IFF_NO_PI, b"")
        fcntl.ioctl(device, _TUNSETIFF, request)
        self._devices.append(device)
        for words in (
            ["ip", "link", "set", name, "netns", namespace],
            ["ip", "-n", namespace, "link", "set", name, "name", "eth0"],
        ):
            subprocess.run(words, check=True, capture_output=True, text=True)

    def start(self) -> None:
        """Pass frames on from now on."""
        self._thread.start()

    def close(self) -> None:
        """Remove the devices."""
        self._closed.set()
        if self._thread.ident:
            self._thread.join()
        for device in self._devices:
            os.close(device)

    @contextlib.contextmanager
    def at(self, **changed: object) -> Iterator[None]:
        """Make the network worse for a while, by attributes of ``Network``."""
        before = self._network
        self._network = replace(before, **changed)
        try:
            yield
        finally:
            self._network = before

    def _run(self) -> None:
        while not self._closed.is_set():
            pause = _IDLE_SECONDS
            if self._late:
                pause = min(max(self._late[0][0] - time.monotonic(), 0), pause)
            for device in select.select(self._devices, [], [], pause)[0]:
                self._take(device)
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, origin, frame = heapq.heappop(self._late)
                self._send(origin, frame)

    def _take(self, device: int) -> None:
        """Take all frames of a host."""
        network, origin = self._network, self._devices.index(device) + 1
        with contextlib.suppress(BlockingIOError):
            while True:
                frame = os.read(device, _FRAME_BYTES)
                if origin in network.silent or len(frame) > network.longest:
                    continue
                if random.random() < network.loss:
                    continue
                if not network.delay:
                    self._send(origin, frame)
                    continue
                self._frames += 1
                when = time.monotonic() + network.delay
                heapq.heappush(self._late, (when, self._frames, origin, frame))

    def _send(self, origin: int, frame: bytes) -> None:
        for host, device in enumerate(self._devices, 1):
            if host != origin and host not in self._network.deaf:
                # If the queue is full, the frame is lost.
                with contextlib.suppress(OSError):
                    os.write(device, frame)
