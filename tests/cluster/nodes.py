"""The nodes of a cluster on one machine: as separate as hosts without ssh.

A node is a network namespace with a host name, an /etc/hosts, a /tmp and a /dev/shm of its
own: Unix sockets and files of one node are not visible on another, except below ``folder``.
It needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests import launch

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "collective-node-"
NETWORK = "10.79.0"
# If the checkout is below /tmp, too, it is mounted, so that its nodes see it.
_CHECKOUT = "mkdir -p {staged}{below} && mount --rbind {root} {staged}{below} &&"
# A pod has this name under a headless service.
_SETUP = """
mount --bind {folder}/hosts /etc/hosts && hostname {name} &&
mount -t tmpfs -o size=64m none /dev/shm && mkdir -p {folder} {staged} &&
mount -t tmpfs -o size=256m none {staged} && mkdir -p {staged}{below} &&
mount --bind {folder} {staged}{below} && {checkout}
mount --move {staged} /tmp && chmod 1777 /tmp &&
echo ready && exec sleep infinity
"""


class Nodes:
    """Nodes that are up; they are numbered from 1, and named ``node1`` and so on."""

    def __init__(self, count: int, folder: Path):
        self.count, self.folder = count, folder
        self.holders: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int) -> None:
        """Make the namespaces of one node, held by a process that sleeps."""
        staged = f"/mnt/{_name(number)}"
        below = str(ROOT).removeprefix("/tmp")
        checkout = _CHECKOUT.format(staged=staged, below=below, root=ROOT)
        setup = _SETUP.format(
            folder=self.folder,
            name=f"node{number}",
            staged=staged,
            below=str(self.folder).removeprefix("/tmp"),
            checkout=checkout if ROOT.is_relative_to("/tmp") else "",
        )
        # Not with "ip netns exec", which mounts a /sys without control groups.
        words = ["nsenter", f"--net=/run/netns/{_name(number)}", "unshare"]
        words += ["--uts", "--mount"]
        holder = subprocess.Popen(
            [*words, "bash", "-c", setup],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n", "no node: see the message above"
        self.holders[number] = holder

    def on(self, number: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs another on a node, in the checkout."""
        enter = ["nsenter", "--net", "--uts", "--mount"]
        enter += ["--target", str(self.holders[number].pid)]
        line = f"cd {ROOT} && exec {shlex.join(command)}"
        return [*enter, "bash", "-c", line]

    def run(
        self,
        number: int,
        command: Sequence[str],
        seconds: float = 120,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node to its end."""
        env = {**environment(), **variables}
        return launch.capture(self.on(number, command), seconds, env=env, cwd=ROOT)

    def on_node(self, number: int) -> dict[int, str]:
        """Return the command lines of a node's processes, by process id in order."""
        found = {}
        pids = map(int, _output("ip", "netns", "pids", _name(number)).split())
        for pid in sorted(pids):
            if pid != self.holders[number].pid:
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes()
                    found[pid] = words.replace(b"\0", b" ").decode()
        return found

    def processes(self) -> dict[int, str]:
        """Return the processes of all nodes."""
        found: dict[int, str] = {}
        for number in range(1, self.count + 1):
            found |= self.on_node(number)
        return found

    @contextlib.contextmanager
    def cut(self, number: int) -> Iterator[None]:
        """Cut a node's link, so that it and the others become silent for each other."""
        port = ["ip", "-n", _name("switch"), "link", "set", f"port{number}"]
        _output(*port, "down")
        try:
            yield
        finally:
            _output(*port, "up")

    def left(self, known: set[int], seconds: float = 15) -> dict[int, str]:
        """Return the processes that still run after a while, without known ones."""
        deadline = time.monotonic() + seconds
        while True:
            found = {k: v for k, v in self.processes().items() if k not in known}
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.2)

    def files(self, number: int) -> list[str]:
        """Return the files of a node in /tmp and /dev/shm."""
        done = self.run(number, ["ls", "/tmp", "/dev/shm"])
        known = {"/tmp:", "/dev/shm:", "", self.folder.name}
        known |= {*ROOT.parts[2:3]} if ROOT.is_relative_to("/tmp") else set()
        known |= {"__pycache__"}  # TensorFlow leaves this folder of generated files
        lines = [line for line in done.stdout.splitlines() if line not in known]
        return [line for line in lines if not line.startswith("__autograph_generated")]

    def end_all(self) -> None:
        """Kill the processes of the nodes, and the nodes."""
        for pid in [*self.processes(), *(h.pid for h in self.holders.values())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for holder in self.holders.values():
            holder.wait(10)


def environment() -> dict[str, str]:
    """Return the environment of a user on a node, outside of every job."""
    inside = re.compile("SLURM|OMPI|PMI|COLLECTIVE_|JOB_COMPLETION")
    env = {k: v for k, v in os.environ.items() if not inside.match(k)}
    path = f"{ROOT}/.venv/bin:{env['PATH']}"
    return env | {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


@contextlib.contextmanager
def nodes(count: int) -> Iterator[Nodes]:
    """Make nodes, and remove them with all their processes.

    Raises:
        subprocess.CalledProcessError: If namespaces are not permitted.
    """
    _remove_forgotten()
    switch = _name("switch")
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir="/tmp") as folder:
        made = Nodes(count, Path(folder))
        lines = ["127.0.0.1 localhost"]
        lines += [f"{NETWORK}.{i} node{i} job-{i - 1}.job" for i in range(1, count + 1)]
        (made.folder / "hosts").write_text("\n".join(lines) + "\n")
        try:
            _output("ip", "netns", "add", switch)
            _output("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            _output("ip", "-n", switch, "link", "set", "bridge", "up")
            for i in range(1, count + 1):
                _add(_name(i), switch, i)
                made.start(i)
            yield made
        finally:
            made.end_all()
            for name in [switch, *(_name(i) for i in range(1, count + 1))]:
                subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
                with contextlib.suppress(OSError):
                    Path("/mnt", name).rmdir()


def why_not() -> str:
    """Return why nodes are impossible here; empty if they are possible."""
    if os.geteuid() != 0:
        return "nodes are namespaces: only root may make them"
    try:
        with nodes(1):
            return ""
    except (OSError, AssertionError, subprocess.CalledProcessError) as error:
        return f"namespaces are not permitted, or there is no iproute2: {error}"


def _name(number: int | str) -> str:
    return f"{PREFIX}{os.getpid()}-{number}"


def _remove_forgotten() -> None:
    """Remove the nodes of a process that was killed before it could do so."""
    for line in _output("ip", "netns", "list").splitlines():
        owner = re.match(rf"{PREFIX}(\d+)-", line)
        if owner and not Path("/proc", owner[1]).exists():
            name = line.split()[0]
            for pid in _output("ip", "netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def _add(name: str, switch: str, number: int) -> None:
    _output("ip", "netns", "add", name)
    wire = ["type", "veth", "peer", "name", "eth0", "netns", name]
    _output("ip", "-n", switch, "link", "add", f"port{number}", *wire)
    _output(
        "ip", "-n", switch, "link", "set", f"port{number}", "master", "bridge", "up"
    )
    _output("ip", "-n", name, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _output("ip", "-n", name, "link", "set", device, "up")


def _output(*command: str) -> str:
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=30
    ).stdout
