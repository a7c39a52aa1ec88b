"""The agent of a node: runs the commands that the head sends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket

from collective.launch.agents import guard
from collective.launch.agents.link import Link, keep_alive
from collective.launch.agents.settings import NO_HEAD, Settings, print_agent
from collective.launch.agents.shell import (
    END,
    EXIT,
    HELLO,
    KILL,
    RUN,
    STDERR,
    STDIN,
    STDOUT,
)
from collective.launch.processes import ending_signals
from collective.net import shared_secret
from collective.running_time import Deadline

_PART = 65536
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.3
_TRIES = 3
_ANSWER_SECONDS = 10.0


async def run(settings: Settings) -> int:
    """Serve the head until it ends the job; return the job's exit code."""
    link, why = await _connect(settings)
    if link is None:
        print_agent(why)
        return NO_HEAD if why.startswith("no head") else 2
    agent = _Agent(link)
    ended = asyncio.ensure_future(agent.serve())
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()

    def stop(number: int) -> None:
        if not stopped.done():
            stopped.set_result(number)

    for number in ending_signals():
        loop.add_signal_handler(number, stop, number)
    await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
    if ended.done():
        code, message = ended.result()
    else:
        code = 128 + stopped.result()
        name = signal.Signals(stopped.result()).name
        message = f"got {name}; ending what it started here"
    if message:
        print_agent(message)
    if not ended.done():
        link.close()  # commands that end now have not failed: this node is lost
    await asyncio.to_thread(guard.end_all)
    link.close()
    return code


async def _connect(settings: Settings) -> tuple[Link | None, str]:
    """Return the connection to the head, or None and the reason."""
    host, port = settings.head
    try:
        opened, key = await _proved(settings)
    except _NotProvedError as error:
        return None, (
            f"the head at {host}:{port} does not accept this node's secret ({error})\n"
            "HINT: COLLECTIVE_SECRET_FILE or COLLECTIVE_SECRET is the same on every node"
        )
    except OSError as error:
        return None, (
            f"no head at {host}:{port} within {settings.seconds} s: {error}\n"
            "HINT: node 0 runs the same command; --head is its name or address; "
            "--start-timeout SECONDS waits longer"
        )
    opened.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=opened)
    link = Link(reader, writer, key)
    hello = [settings.version, socket.gethostname(), settings.slots, settings.node]
    await link.send(0, HELLO, json.dumps(hello).encode())
    answer = await link.first(_ANSWER_SECONDS)
    if answer is None or answer.kind != HELLO:
        why = answer.data.decode(errors="replace") if answer else "no answer"
        return None, f"the head at {host}:{port} sent this node away: {why}"
    return link, ""


class _NotProvedError(Exception):
    """The head has closed the connection, or the other end is not the head."""


async def _proved(settings: Settings) -> tuple[socket.socket, bytes]:
    """Return a connection to the head, which has proved the secret, and its key.

    It tries again if the head starts late, or has dropped this connection together with
    connections of strangers.

    Raises:
        _NotProvedError: The head does not know the secret.
        OSError: The head is not reached in time.
    """
    deadline = Deadline(settings.seconds, longest=2 * _CONNECT_SECONDS)
    refused = 0
    while True:
        try:
            opened = await asyncio.to_thread(
                socket.create_connection, settings.head, _CONNECT_SECONDS
            )
            try:
                keep_alive(opened, settings.heartbeat)
                key = await asyncio.to_thread(
                    shared_secret.verify_listener,
                    opened,
                    settings.secret,
                    _CONNECT_SECONDS,
                )
                return opened, key
            except BaseException:
                opened.close()
                raise
        except shared_secret.WrongSecretError as error:
            refused += 1
            if refused == _TRIES:
                raise _NotProvedError(str(error)) from None
        except OSError:
            if deadline.passed():
                raise
        await asyncio.sleep(_RETRY_SECONDS)


class _Agent:
    """The commands that this node runs for the head."""

    def __init__(self, link: Link):
        self.link = link
        self.running: dict[int, asyncio.subprocess.Process] = {}  # by stream
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> tuple[int, str]:
        """Serve the head; return the exit code and a message."""
        async for frame in self.link.frames():
            if frame.kind == END:
                return int(frame.data), ""
            if frame.kind == RUN:
                await self._start(frame.stream, frame.data.decode())
            elif process := self.running.get(frame.stream):
                self._pass_on(process, frame.kind, frame.data)
        return 1, "lost the head; ending what it started here"

    async def _start(self, stream: int, command: str) -> None:
        # Before its input arrives, because the command may not wait for any.
        process = self.running[stream] = await asyncio.create_subprocess_exec(
            "sh",
            "-c",
            command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        task = asyncio.create_task(self._relay(stream, process))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _pass_on(
        self, process: asyncio.subprocess.Process, kind: bytes, data: bytes
    ) -> None:
        if kind == STDIN and process.stdin is not None:
            if data:
                process.stdin.write(data)
            else:
                process.stdin.close()
        elif kind == KILL:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)

    async def _relay(self, stream: int, process: asyncio.subprocess.Process) -> None:
        async def pump(kind: bytes, pipe: asyncio.StreamReader | None) -> None:
            while pipe is not None and (data := await pipe.read(_PART)):
                await self.link.send(stream, kind, data)

        await asyncio.gather(pump(STDOUT, process.stdout), pump(STDERR, process.stderr))
        code = await process.wait()
        del self.running[stream]
        await self.link.send(stream, EXIT, b"%d" % (code if code >= 0 else 128 - code))
