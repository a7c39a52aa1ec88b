"""Agents without a network: their settings, and the messages that they accept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from collective import hosts
from collective.environment import Environment, detect
from collective.errors import UsageError
from collective.launch import command_line, processes
from collective.launch.agents import command, guard, head, node, settings
from collective.launch.agents.link import Frame, Link, Seal
from collective.launch.agents.shell import END, HEADER, HELLO, RUN, split
from collective.net import shared_secret
from collective.net.callers import Callers

SECRET = "0123456789abcdef"
ALONE = Environment()


def read(*words, found=ALONE, addresses=(), **variables):
    options = command_line.parse(["--agent", *words, "true"])
    given = {settings.SECRET: SECRET, **variables}
    return settings.read(options, found, addresses, given, "1")


def test_which_node_this_is():
    mine = read("--nodes", "3", "--node", "1", "--head", "a:7070", "--slots", "2")
    assert (mine.head, mine.nodes, mine.node, mine.slots) == (("a", 7070), 3, 1, 2)
    pod = read("--nodes", "2", "--head", "[::1]:7", JOB_COMPLETION_INDEX="1")
    assert (pod.head, pod.node) == (("::1", 7), 1)
    srun = Environment("srun", 1, 2, 0, 1)
    mine = read(found=srun, addresses=["n1:20001", "n2:20001"])
    assert (mine.head, mine.nodes, mine.node, mine.slots) == (("n1", 20001), 2, 1, 1)


@pytest.mark.parametrize(
    "words, found, message",
    [
        ([], ALONE, "--nodes N, --node I, --head HOST:PORT is missing"),
        (["--nodes", "2", "--node", "2", "--head", "a:1"], ALONE, "node 2 of 2"),
        (["--nodes", "2", "--node", "0", "--head", "a"], ALONE, "not HOST:PORT"),
        ([], Environment("srun", 0, 4, 0, 2), "srun started 2 agents on this host"),
    ],
)
def test_what_is_missing_is_named(words, found, message):
    with pytest.raises(UsageError, match=message) as caught:
        read(*words, found=found)
    assert "collectiverun --agent" in caught.value.hint


def test_the_secret(tmp_path):
    place = ["--nodes", "1", "--node", "0", "--head", "a:1"]
    file = tmp_path / "secret"
    file.write_text("x" * 20 + "\n")
    assert read(*place, COLLECTIVE_SECRET_FILE=str(file)).secret == "x" * 20
    for variables, message in (
        ({"COLLECTIVE_SECRET": ""}, "no secret"),
        ({"COLLECTIVE_SECRET": "short"}, "a secret of 5 characters"),
        ({"COLLECTIVE_SECRET_FILE": "/no/such"}, "cannot be read"),
    ):
        with pytest.raises(UsageError, match=message):
            read(*place, **variables)
    given = {settings.SECRET: SECRET}
    options = command_line.parse(["--agent", *place, "true"])
    settings.read(options, ALONE, [], given, "1")
    assert not given  # so ranks do not see it


@pytest.mark.parametrize(
    "words, message",
    [
        (["--agent", "-H", "a:1"], "--agent replaces -H"),
        (["--head", "a:1", "-np", "2"], "are for --agent"),
        (["--agent", "--nodes", "0"], "--nodes 0: at least 1"),
    ],
)
def test_options_that_contradict_each_other(words, message):
    with pytest.raises(UsageError, match=message):
        command_line.parse([*words, "true"])


@pytest.mark.parametrize("elastic", [False, True])
def test_the_launcher_on_node_0_knows_of_no_agents(elastic):
    typed = [
        "--agent",
        "-np",
        "3",
        "--nodes",
        "2",
        "--head=a:1",
        "--node",
        "0",
        "--verbose",
    ]
    typed += ["--max-np", "4", "--"] if elastic else ["--"]
    words = command.launcher_options(typed, "a:1\n[::1]:2\n", elastic)
    options = command_line.parse([*words, "program", "--head", "2"])
    assert list(options.command) == ["program", "--head", "2"]
    assert options.verbose and options.num_proc == 3 and not options.agent
    assert options.shell.program == str(head.SSH)
    if elastic:
        assert options.host_discovery_script == str(head.SSH)
    else:
        assert [host.name for host in hosts.parse_list(options.hosts)] == ["a", "::1"]


def test_commands_see_nothing_of_the_agents_launcher():
    given = {"PATH": "/bin", "SLURM_PROCID": "1", "PMIX_RANK": "1", "TF_CONFIG": "{}"}
    left = settings.clean(given, {"SLURM_JOB_ID": "7"})
    assert left == {"PATH": "/bin", "SLURM_JOB_ID": "7"}
    assert detect(left) == ALONE


@pytest.mark.parametrize(
    "words, wanted",
    [
        (["n1", "echo", "a b"], ("n1", "echo a b")),
        (["-x", "-o", "A=b", "-p", "22", "me@n1", "-l", "me", "ls"], ("me@n1", "ls")),
        (["n1", "ls", "-l", "-o"], ("n1", "ls -l -o")),
        ([], ("", "")),
    ],
)
def test_the_remote_shell_reads_what_ssh_does(words, wanted):
    assert split(words) == wanted


def test_both_ends_have_the_same_key_and_no_other_connection_has(monkeypatch):
    # The other end must first start, and import the modules for its proof.
    monkeypatch.setattr(shared_secret, "_SECONDS", 120.0)
    keys = []
    for _ in range(2):
        ends = socket.socketpair()
        call = subprocess.Popen(
            [sys.executable, "-c",
             "import socket, sys; from collective.net import shared_secret as s; "
             f"l = socket.socket(fileno={ends[1].fileno()}); "
             f"print(s.verify_listener(l, '{SECRET}').hex())"],
            pass_fds=[ends[1].fileno()], stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        mine = shared_secret.verify_caller(ends[0], SECRET)
        assert call.communicate(timeout=120)[0].strip() == mine.hex()
        keys.append(mine)
        for end in ends:
            end.close()
    assert keys[0] != keys[1]


def mine(node, port):
    place = ["--nodes", "2", "--node", str(node), "--head", f"127.0.0.2:{port}"]
    return read(*place, "--start-timeout", "60")


async def heard():
    """Return a head of two nodes, its port, its listener, and the task that admits nodes."""
    with socket.create_server(("127.0.0.2", 0)) as free:
        port = free.getsockname()[1]
    started = head.Head(mine(0, port))
    listener = await started.listen()
    return started, port, listener, asyncio.ensure_future(started.accept(listener))


async def closed(started, listener, accepting):
    accepting.cancel()
    await asyncio.gather(*started.tasks)
    listener.close()


HELLO_OF_NODE_1 = [mine(1, 1).version, "n", 1, 1, False]


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (["9, protocol 3", "n", 1, 1, False, "more"], (END, b"it has collective 9")),
        (["9, protocol 3"], None),
        (7, None),
        ([*HELLO_OF_NODE_1[:2], "many", 1, False], None),
        pytest.param("[" * 5_000_000, None, id="nested"),
        ([*HELLO_OF_NODE_1], (HELLO, b"")),
    ],
)
def test_a_node_of_another_version_is_answered_or_dropped(said, answer):
    """So is one that repeats a message, even a genuine node's."""

    async def run():
        started, port, listener, accepting = await heard()
        settings_of_1 = mine(1, port)
        opened, key = await node._proved(settings_of_1)
        opened.setblocking(False)
        link = Link(*await asyncio.open_connection(sock=opened), key)
        data = (said if isinstance(said, str) else json.dumps(said)).encode()
        head_of_frame = HEADER.pack(0, HELLO, len(data))
        sealed = Seal(key, b"node").close(head_of_frame, data)
        link.writer.write(2 * (head_of_frame + sealed))
        frames = [frame async for frame in link.frames()]  # until the head drops it
        link.close()
        await closed(started, listener, accepting)
        return [(frame.kind, frame.data) for frame in frames]

    got = asyncio.run(run())
    assert len(got) == (answer is not None)
    for kind, text in got:
        assert answer[0] == kind and text.startswith(answer[1])


def test_a_node_that_reads_nothing_does_not_delay_the_end(monkeypatch):
    monkeypatch.setattr(head, "_LEAVE_SECONDS", 0.1)

    async def run():
        started, port, listener, accepting = await heard()
        link, why = await node._connect(mine(1, port))
        assert link is not None and await started.wait_for_nodes(), why
        link.writer.transport.pause_reading()
        (only,) = started.nodes.values()
        for _ in range(16):
            only.link.put(1, RUN, bytes(1 << 20))
        await asyncio.wait_for(started.end(0), 60)
        still = bool(started.nodes)
        only.link.writer.transport.abort()
        link.close()
        await closed(started, listener, accepting)
        return still

    assert asyncio.run(run())


def test_silent_strangers_keep_no_node_out_and_the_end_waits_for_none(capfd):
    """Each node has another address: 127.0.0.1 calls 127.0.0.2."""

    async def run(strangers):
        started, port, listener, accepting = await heard()
        for _ in range(200):
            strangers.append(socket.create_connection(("127.0.0.2", port), 60))
        for talker in strangers[-4:]:
            talker.sendall(b"GET / HTTP/1.1\r\n\r\n" * 9)  # a long text without a proof
        link, why = await node._connect(mine(1, port))
        assert link is not None and await started.wait_for_nodes(), why
        ending = asyncio.ensure_future(started.end(7))
        frame = await link.first(60)
        assert frame is not None and (frame.kind, frame.data) == (END, b"7")
        link.close()
        await ending
        await closed(started, listener, accepting)

    strangers: list[socket.socket] = []
    try:
        asyncio.run(run(strangers))
        for stranger in strangers:
            stranger.settimeout(60)
            with contextlib.suppress(ConnectionError):
                while stranger.recv(100):  # the head drops each
                    pass
    finally:
        for stranger in strangers:
            stranger.close()
    said = capfd.readouterr().err
    assert "127.0.0.1 was sent away: its connection ended before it proved" in said
    assert re.search(r"127.0.0.1 was sent away \d{3} times in all", said), said
    assert said.count("sent away") == 2, said


def test_a_stranger_that_sends_a_byte_now_and_then_is_dropped(monkeypatch):
    monkeypatch.setattr(shared_secret, "_SECONDS", 0.3)

    here, there = socket.socketpair()
    with here, there, ThreadPoolExecutor() as pool:
        verifying = pool.submit(shared_secret.verify_caller, here, SECRET)
        while not verifying.done():
            there.send(b"x")
            time.sleep(0.05)
        with pytest.raises(TimeoutError, match="no proof of the secret in time"):
            verifying.result()


def test_of_callers_the_oldest_are_dropped_first():
    callers, ends = Callers(at_most=3, of_an_address=2), {}
    with contextlib.ExitStack() as opened:
        for name in ("a1", "a2", "b1", "a3", "c1"):
            here, ends[name] = map(opened.enter_context, socket.socketpair())
            opened.enter_context(callers.waiting(here, name[0]))
            ends[name].setblocking(False)
        # a3 replaces a1, of the same address; then a2 is dropped, the oldest of all.
        assert [ends["a1"].recv(1), ends["a2"].recv(1)] == [b"", b""]
        for name in ("b1", "a3", "c1"):
            with pytest.raises(BlockingIOError):
                ends[name].recv(1)
        callers.drop_all()
        assert [end.recv(1) for end in ends.values()] == [b""] * 5


def exchange(change) -> list[Frame]:
    """Return the frames that a node accepts after a change of three frames of the head."""

    def opened(reader, writer, is_head=False) -> Link:
        return Link(reader, writer, b"k" * 32, is_head)

    async def run() -> list[Frame]:
        head, tap = b"", socket.socketpair()
        sender = opened(*await asyncio.open_connection(sock=tap[0]), is_head=True)
        for data in (b"one", b"two", b"three"):
            await sender.send(1, b"R", data)
        sender.close()
        with tap[1]:
            tap[1].setblocking(True)
            while part := await asyncio.to_thread(tap[1].recv, 1000):
                head += part
        size = HEADER.size + Seal.size
        cut = [size + 3, 2 * (size + 3)]
        frames = [head[: cut[0]], head[cut[0] : cut[1]], head[cut[1] :]]
        reader = asyncio.StreamReader()
        reader.feed_data(b"".join(change(frames)))
        reader.feed_eof()
        ends = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=ends[0])
        found = [frame async for frame in opened(reader, writer).frames()]
        writer.close()
        ends[1].close()
        return found

    return asyncio.run(run())


def test_a_frame_that_is_changed_repeated_or_left_out_ends_the_connection():
    def data(change):
        return [frame.data for frame in exchange(change)]

    def flipped(frame):
        return frame[:-1] + bytes([frame[-1] ^ 1])

    assert data(lambda f: f) == [b"one", b"two", b"three"]
    assert data(lambda f: [f[0], flipped(f[1]), f[2]]) == [b"one"]
    other_stream = HEADER.pack(2, b"R", 3)
    assert data(lambda f: [other_stream + f[0][HEADER.size :], f[1]]) == []
    assert data(lambda f: [f[0], f[0], f[2]]) == [b"one"]
    assert data(lambda f: [f[0], f[2]]) == [b"one"]
    assert data(lambda f: [f[1], f[0]]) == []
    assert data(lambda f: [f[0], b"\xff" * 200]) == [b"one"]


GUARDED = """
import subprocess, sys
from pathlib import Path
from collective.launch.agents import guard

def main():
    # The second is a process of a rank, which has a mark of its own.
    subprocess.run(["sh", "-c", "setsid sleep 1000 & echo $!"])
    inner = "from collective.launch.containment import *; import os, sys;" \
        "os.environ[VARIABLE] = Marks().make(); os.execvp('sh', ['sh', '-c', sys.argv[1]])"
    subprocess.run([sys.executable, "-c", inner, "setsid sleep 1000 & echo $!"])
    sys.stdout.flush()
    sys.stdin.readline()
    return 5

sys.exit(guard.guarded(main, Path(sys.argv[1])))
"""


@pytest.mark.parametrize("killed", [False, True])
def test_a_guarded_program_leaves_no_daemon(killed, tmp_path):
    (tmp_path / "job").mkdir()
    agent = subprocess.Popen(
        [sys.executable, "-c", GUARDED, str(tmp_path / "job")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    daemons = [int(agent.stdout.readline()) for _ in range(2)]
    if killed:
        agent.kill()
    agent.communicate("\n", timeout=240)  # this returns after its watchdog has ended
    assert agent.returncode == (-signal.SIGKILL if killed else 5)
    assert all(map(processes.has_ended, daemons)) and not list(tmp_path.iterdir())


def test_shared_memory_of_killed_processes_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(guard.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "sm_segment.n1.0.1.0").touch()
    for name in ("ompi.999999999", f"prted.{os.getpid()}", "other.999999999"):
        (tmp_path / name).mkdir()
    guard.remove_files(time.time() + 100)
    assert len(list(tmp_path.iterdir())) == 4
    guard.remove_files(time.time() - 100)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["other.999999999", f"prted.{os.getpid()}"]
