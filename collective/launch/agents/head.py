"""Node 0: waits for the other nodes, runs the launcher, and passes its commands to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from collective.launch.agents import folders, guard
from collective.launch.agents.link import Frame, Link, keep_alive
from collective.launch.agents.settings import NO_HEAD, Settings, print_agent
from collective.launch.agents.shell import (
    END,
    EXIT,
    HELLO,
    HOSTS,
    KILL,
    RUN,
    SOCKET,
    STDERR,
    STDOUT,
)
from collective.launch.processes import ending_signals
from collective.net import shared_secret
from collective.net.callers import AT_MOST, Callers
from collective.running_time import Deadline

SSH = Path(__file__).with_name("ssh")
_PYTHON = "COLLECTIVE_AGENT_PYTHON"  # Python that runs the remote shell
_HELLO_SECONDS = 10.0
_RETRY_SECONDS = 0.3
_ATTEMPT_SECONDS = 10.0  # limit for the look-up of a name
# If its remote shell ends with any exit code but 0, at any time, Open MPI 5 concludes that a
# daemon did not start, and ends the job. It finds out by itself that a daemon is lost; these
# are its limits for a daemon that ends, and for one whose node is lost.
_START_SECONDS, _REPORT_SECONDS = 10.0, 3.0
_DAEMONS = ("prted", "orted")
_LEAVE_SECONDS = 15.0


@dataclass(frozen=True)
class _Node:
    name: str
    address: str  # as the head sees it
    slots: int
    number: int
    link: Link


@dataclass(frozen=True)
class _Command:
    """A command that a node runs for a remote shell."""

    shell: Link
    address: str
    is_daemon: bool
    since: float

    def code(self, code: int, start_seconds: float = _START_SECONDS) -> int:
        """Return the exit code of the shell, given the exit code of the command."""
        starts = time.monotonic() - self.since < start_seconds
        return code if starts or not self.is_daemon else 0


async def run(settings: Settings, launcher: Callable[[str], Sequence[str]]) -> int:
    """Run the job; return the exit code of the launcher, or 124 without the nodes.

    Args:
        launcher: Makes its command from ``Head.listed``, when the nodes have connected.
    """
    head = Head(settings)
    try:
        listener = await head.listen()
    except OSError as error:
        host, port = settings.head
        print_agent(
            f"cannot listen at {host}:{port}: {error}\n"
            "HINT: --head is a name or address of node 0, and a free port there"
        )
        return 2
    accepting = asyncio.ensure_future(head.accept(listener))
    shells = await asyncio.start_unix_server(head.serve_shell, head.socket)
    code = NO_HEAD
    try:
        if await head.wait_for_nodes():
            code = await head.launch(launcher(head.listed()))
    finally:
        accepting.cancel()
        await head.end(code)
        await asyncio.to_thread(guard.end_all)
        listener.close()
        shells.close()
    return code


class Head:
    """The nodes that have connected, and the commands that run on them."""

    def __init__(self, settings: Settings):
        self.settings = settings
        # In the abstract namespace, so that no file stays if this process is killed.
        self.socket = f"\0collective-agents-{secrets.token_hex(16)}"
        self.nodes: dict[str, _Node] = {}  # by address
        self.commands: dict[int, _Command] = {}  # by stream
        self.changed = asyncio.Event()
        self.ended = False
        self.address = ""
        self.tasks: set[asyncio.Task[None]] = set()
        at_most = AT_MOST + settings.nodes
        self.callers = Callers(at_most)
        # Each caller has a thread of its own, so that a silent one does not delay others.
        self.verifiers = ThreadPoolExecutor(at_most)
        # By address, the callers that did not prove the secret.
        self.sent_away: Counter[str] = Counter()

    async def listen(self) -> socket.socket:
        """Listen at the head's address alone. A name may not be known at once."""
        deadline = Deadline(self.settings.seconds, longest=_ATTEMPT_SECONDS)
        host, port = self.settings.head
        while True:
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                family, *_, address = found[0]
                listener = socket.create_server(
                    address[:2], family=family, backlog=1024
                )
                break
            except socket.gaierror:
                if deadline.passed():
                    raise
                await asyncio.sleep(_RETRY_SECONDS)
        self.address = listener.getsockname()[0]
        listener.setblocking(False)
        return listener

    async def accept(self, listener: socket.socket) -> None:
        """Admit nodes for as long as the job runs, because a node may connect late."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                opened, peer = await loop.sock_accept(listener)
            except OSError:  # for example no free descriptor; it tries again later
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            task = asyncio.create_task(self._serve_node(opened, peer[0]))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def wait_for_nodes(self) -> bool:
        """Return whether all nodes have connected in time."""
        deadline = Deadline(self.settings.seconds)
        wanted = self.settings.nodes
        while len(self.nodes) + 1 < wanted:
            self.changed.clear()
            try:
                await asyncio.wait_for(self.changed.wait(), deadline.pause())
            except asyncio.TimeoutError:
                if not deadline.passed():
                    continue
                here = {0, *(node.number for node in self.nodes.values())}
                missing = ", ".join(str(n) for n in range(wanted) if n not in here)
                print_agent(
                    f"{len(self.nodes) + 1} of {wanted} nodes within "
                    f"{self.settings.seconds} s; missing: node {missing}\n"
                    "HINT: each runs the same command with the same secret; "
                    "--start-timeout SECONDS waits longer"
                )
                return False
        return True

    async def launch(self, command: Sequence[str]) -> int:
        """Run the launcher to its end, and pass signals on to it."""
        variables = {SOCKET: self.socket[1:], _PYTHON: sys.executable}
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        loop = asyncio.get_running_loop()
        for number in ending_signals():
            loop.add_signal_handler(number, _signal, process, number)
        code = await process.wait()
        return code if code >= 0 else 128 - code

    async def end(self, code: int) -> None:
        """End the job on every node; return when they have left."""
        self.ended = True
        self.callers.drop_all()
        for address, count in self.sent_away.items():
            if count > 1:
                print_agent(f"{address} was sent away {count} times in all")
        for node in list(self.nodes.values()):
            node.link.put(
                0, END, b"%d" % code
            )  # so that a node that reads nothing delays no other
        deadline = Deadline(_LEAVE_SECONDS)
        while self.nodes and not deadline.passed():
            await asyncio.sleep(0.05)

    # The nodes.

    async def _serve_node(self, opened: socket.socket, address: str) -> None:
        try:
            with self.callers.waiting(opened, address):
                keep_alive(opened, self.settings.heartbeat)
                opened.setblocking(True)
                verify, secret = shared_secret.verify_caller, self.settings.secret
                loop = asyncio.get_running_loop()
                key = await loop.run_in_executor(self.verifiers, verify, opened, secret)
            opened.setblocking(False)
            streams = await asyncio.open_connection(sock=opened)
        except OSError as error:
            self.sent_away[address] += 1
            if self.sent_away[address] == 1:
                print_agent(f"{address} was sent away: {error}")
            return opened.close()
        link = Link(*streams, key, is_head=True)
        node = await self._admit(link, address)
        if node is None:
            return link.close()
        link.put(0, HELLO)
        self.nodes[address] = node
        self.changed.set()
        # One that says what no agent says is lost, as one that says nothing.
        with contextlib.suppress(ValueError):
            async for frame in link.frames():
                await self._from_node(frame)
        del self.nodes[address]
        link.close()
        if not self.ended:
            print_agent(
                f"lost the agent of node {node.number}, {node.name} ({address})"
            )
            await self._end_commands(address)

    async def _admit(self, link: Link, address: str) -> _Node | None:
        """Return the node that says hello; None if it cannot take part."""
        frame = await link.first(_HELLO_SECONDS)
        if frame is None or frame.kind != HELLO:
            return None
        try:  # another version may send more fields
            version, name, slots, number, *_ = json.loads(frame.data)
        except (TypeError, ValueError, RecursionError):
            return None
        mine, others = self.settings, self.nodes.values()
        if version != mine.version:
            why = f"it has collective {version}, the head has {mine.version}"
        elif not (isinstance(name, str) and type(slots) is type(number) is int):
            return None
        elif address in (*self.nodes, self.address):
            why = f"there is an agent of {address} already"
        elif number == 0 or number in [node.number for node in others]:
            why = f"there is a node {number} already"
        else:
            return _Node(name, address, slots, number, link)
        print_agent(f"node {number}, {name} ({address}), was sent away: {why}")
        await link.send(0, END, why.encode())
        return None

    async def _from_node(self, frame: Frame) -> None:
        command = self.commands.get(frame.stream)
        if command is None:
            return
        data = frame.data
        if frame.kind == EXIT:
            data = b"%d" % command.code(int(data))
        await command.shell.send(0, frame.kind, data)

    async def _end_commands(self, address: str) -> None:
        for command in list(self.commands.values()):
            if command.address == address:
                code = command.code(255, _REPORT_SECONDS)
                await command.shell.send(0, EXIT, b"%d" % code)

    # The remote shells, on this host.

    async def serve_shell(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one remote shell: when it ends, its command ends."""
        shell, stream = Link(reader, writer), secrets.randbits(32)
        address = ""
        if _user(writer) == os.geteuid():
            async for frame in shell.frames():
                if frame.kind == HOSTS:
                    await shell.send(0, STDOUT, self.listed().encode())
                    await shell.send(0, EXIT, b"0")
                elif frame.kind == RUN:
                    address = await self._run(stream, shell, *json.loads(frame.data))
                elif node := self.nodes.get(address):
                    await node.link.send(stream, frame.kind, frame.data)
        self.commands.pop(stream, None)
        if node := self.nodes.get(address):
            await node.link.send(stream, KILL)
        shell.close()

    async def _run(self, stream: int, shell: Link, host: str, command: str) -> str:
        """Have a node run a command; return its address."""
        name = host.rpartition("@")[2]
        address = next((n.address for n in self.nodes.values() if n.name == name), name)
        if address not in self.nodes:
            with contextlib.suppress(OSError):
                address = socket.gethostbyname(name)
        node = self.nodes.get(address)
        if node is None:
            await shell.send(0, STDERR, f"no agent of {name}\n".encode())
            await shell.send(0, EXIT, b"255")
            return ""
        is_daemon = any(daemon in command for daemon in _DAEMONS)
        self.commands[stream] = _Command(shell, address, is_daemon, time.monotonic())
        await node.link.send(stream, RUN, command.encode())
        return address

    def listed(self) -> str:
        """Return ``host:slots`` of each node in the order of node numbers, as ranks have it.

        If Ray holds the slots, it says how many each node has now.
        """
        found = {0: (self.address, self.settings.slots)}
        for node in sorted(self.nodes.values(), key=lambda node: node.number):
            found[node.number] = (node.address, node.slots)
        held = folders.read_slots(self.settings.folder)
        lines = []
        for number, (host, own) in found.items():
            name = f"[{host}]" if ":" in host else host
            count = own if held is None else held.get(number, 0)
            lines += [f"{name}:{count}\n"] if count else []
        return "".join(lines)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if process.returncode is None:
        process.send_signal(number)


def _user(writer: asyncio.StreamWriter) -> int:
    """Return the user at the other end of a Unix socket."""
    opened = writer.get_extra_info("socket")
    form = struct.Struct("3i")
    found = opened.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size)
    return form.unpack(found)[1]
