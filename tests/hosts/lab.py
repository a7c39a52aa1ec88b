"""A few hosts on one machine, joined by links of a given speed.

A host is a network namespace with a host name of its own. A switch in a namespace of its own
joins them, so that nothing of them is visible outside. ``mpirun`` starts processes on a host
through an agent instead of ssh. Root and iproute2 are required. It is also a command::

    python -m tests.hosts.lab --hosts 2 --slots 1 --rate 10gbit python program.py
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests import launch
from tests.hosts.switch import Switch

PREFIX = "collective-"
NETWORK = "10.77.0"

SECOND = "10.79.0"  # the second network of hosts
_labs = itertools.count()


def why_not() -> str:
    """Return why hosts are impossible here; empty if they are possible."""
    if os.geteuid() != 0:
        return "hosts are network namespaces: only root may make them"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"there is no {program}: apt-get install iproute2"
    if shutil.which("unshare") is None:
        return "there is no unshare: apt-get install util-linux"
    try:
        with hosts(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted: {error.stderr.strip()}"


class Lab:
    """Existing hosts.

    Args:
        count: Number of hosts.
        rate: The send rate of each; None for no limit.
        folder: Folder for the agent and the host files.
        prefix: Prefix of the names of their namespaces.
        switch: The program that joins them; None if the kernel does.
    """

    def __init__(
        self,
        count: int,
        rate: str | None,
        folder: Path,
        prefix: str,
        switch: Switch | None = None,
    ):
        self.count = count
        self.rate = rate
        self.folder = folder
        self.prefix = prefix
        self.switch = switch
        self.agent = folder / "agent"
        self.agent.write_text(
            "#!/bin/bash\n"
            "# [-option ...] HOST COMMAND...: what mpirun takes for ssh.\n"
            "while [[ ${1:-} == -* ]]; do shift; done\n"
            f"name=$1 host=${{1#{NETWORK}.}}; shift\n"
            f"if [[ ! -e /run/netns/{self.name('$host')} ]]; then\n"
            "  exec 3<>/dev/tcp/$name/22 # there is none: fails as ssh does\n"
            "  exit 255\n"
            "fi\n"
            f"exec ip netns exec {self.name('$host')} unshare --uts \\\n"
            '  bash -c "hostname lab$host; $*"\n'
        )
        self.agent.chmod(0o755)

    def name(self, host: int | str) -> str:
        """Return the network namespace of a host, numbered from 1."""
        return f"{self.prefix}{host}"

    def on(self, host: int, command: list[str]) -> list[str]:
        """Return the command that runs another on one host, numbered from 1."""
        return [str(self.agent), f"{NETWORK}.{host}", shlex.join(command)]

    def ours(self, module: str, *words: str, agent: Path | None = None) -> list[str]:
        """Return the command that runs our launcher or doctor on the first host."""
        reach = ["--remote-shell", str(agent or self.agent)]
        start = [sys.executable, "-m", module, *reach, "--network-interfaces", "eth0"]
        return self.on(1, [*start, *words])

    def agent_with(self, host: int, modules: Path) -> Path:
        """Return an agent with which one host finds a folder of Python's modules first."""
        agent = modules / "agent"
        agent.write_text(
            f'#!/bin/bash\n[[ $1 = *.{host} ]] || exec {self.agent} "$@"\n'
            f"old='PYTHONPATH=' new='PYTHONPATH={modules}:'\n"
            f'exec {self.agent} "${{@//$old/$new}}"\n'
        )
        agent.chmod(0o755)
        return agent

    @contextlib.contextmanager
    def names(self, pattern: str) -> Iterator[None]:
        """Give the hosts other names for a while; ``$host`` stands for the number."""
        before = self.agent.read_text()
        self.agent.write_text(
            before.replace("hostname lab$host", f"hostname {pattern}")
        )
        try:
            yield
        finally:
            self.agent.write_text(before)

    def mpirun(self, slots: list[int], command: list[str], *more: str) -> list[str]:
        """Return the command that starts ranks, ``slots[i]`` of them on host i + 1.

        Args:
            slots: Ranks for each host, at least one.
            command: Program and arguments of each rank.
            more: Options of ``mpirun``.
        """
        file = self.folder / f"hosts-{'-'.join(map(str, slots))}"
        file.write_text(
            "".join(f"{NETWORK}.{i} slots={n}\n" for i, n in enumerate(slots, 1))
        )
        mpirun = launch.command("mpi", sum(slots))[0]
        network = f"{NETWORK}.0/24"
        options = [
            *["-np", str(sum(slots)), "--hostfile", str(file), "--bind-to", "none"],
            *["--prtemca", "plm_ssh_agent", str(self.agent)],
            *["--prtemca", "oob_tcp_if_include", network],
            *["--mca", "btl_tcp_if_include", network, "--mca", "pml", "ob1"],
            # Each host sees all the cores.
            *["--mca", "mpi_yield_when_idle", "1"],
        ]
        return self.on(1, [mpirun, *options, *more, *command])

    def mpi_variables(self, slots: list[int]) -> dict[str, str]:
        """Return variables for ``mpirun --hostfile $HOSTFILE`` on a host to reach all."""
        file = self.folder / "hosts"
        file.write_text(
            "".join(f"{NETWORK}.{i} slots={n}\n" for i, n in enumerate(slots, 1))
        )
        network = f"{NETWORK}.0/24"
        return {
            "HOSTFILE": str(file),
            "PRTE_MCA_plm_ssh_agent": str(self.agent),
            "PRTE_MCA_oob_tcp_if_include": network,
            "OMPI_MCA_btl_tcp_if_include": network,
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }

    @contextlib.contextmanager
    def cut(self, host: int) -> Iterator[None]:
        """Cut a host's link, so that no host receives from it; the agent still reaches it.

        Afterwards the link works again: the hosts have forgotten that it was silent.
        """
        port = ["ip", "-n", self.name("switch"), "link", "set", f"port{host}"]
        _run(*port, "down")
        try:
            yield
        finally:
            _run(*port, "up")
            for i in range(1, self.count + 1):
                _run("ip", "-n", self.name(i), "neigh", "flush", "dev", "eth0")
            deadline = time.monotonic() + launch.PATIENCE_SECONDS
            while not self._hears(host) and time.monotonic() < deadline:
                time.sleep(0.1)

    def _hears(self, host: int) -> bool:
        """Return whether the first of the other hosts refuses a packet of this one."""
        other = f"{NETWORK}.{2 if host == 1 else 1}"
        program = (
            "import errno, socket, sys; s = socket.socket(); s.settimeout(2);"
            f"sys.exit(s.connect_ex(('{other}', 9)) != errno.ECONNREFUSED)"
        )
        inside = ["ip", "netns", "exec", self.name(host), sys.executable, "-c", program]
        return subprocess.run(inside).returncode == 0

    @contextlib.contextmanager
    def at(self, rate: str) -> Iterator[None]:
        """Have every host send at another rate for a while, in the syntax of ``tc``."""
        names = [self.name(i) for i in range(1, self.count + 1)]
        before = self.rate
        for name in names:
            _shape(name, rate)
        try:
            yield
        finally:
            for name in names:
                _shape(name, before)

    def processes(self) -> list[int]:
        """Return the processes on the hosts."""
        numbers = range(1, self.count + 1)
        return [p for number in numbers for p in self.processes_of(number)]

    def processes_of(self, host: int) -> list[int]:
        """Return the processes on one host, numbered from 1."""
        return _processes(self.name(host))

    def end_all(self) -> None:
        """Kill the processes on the hosts."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@contextlib.contextmanager
def hosts(
    count: int, rate: str | None = None, *, bad: bool = False, second: bool = False
) -> Iterator[Lab]:
    """Make hosts, and remove them and all their processes at the end.

    Args:
        count: Number of hosts.
        rate: The send rate of each, in the syntax of ``tc``: ``1gbit``. None: no limit.
        bad: Whether the program ``Lab.switch`` joins them, which can act as a bad network;
            it has no rates.
        second: Whether each has an address in a second network, ``eth1``, which joins
            no hosts.

    Raises:
        subprocess.CalledProcessError: If namespaces are not permitted.
    """
    _remove_forgotten()
    prefix = f"{PREFIX}{os.getpid()}-{next(_labs)}-"  # of the namespaces' names
    switch = prefix + "switch"
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX) as folder,
        contextlib.ExitStack() as stack,
    ):
        try:
            _run("ip", "netns", "add", switch)
            _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "bridge", "up")
            joins = Switch() if bad else None
            for i in range(1, count + 1):
                name = f"{prefix}{i}"
                _run("ip", "netns", "add", name)
                if joins is None:
                    _connect(name, switch, i)
                else:
                    joins.add(name)
                _configure(name, i, rate, second)
            if joins is not None:
                stack.callback(joins.close)
                joins.start()
            yield Lab(count, rate, Path(folder), prefix, joins)
        finally:
            stack.close()  # the switch, before its devices are gone
            for name in _namespaces():
                if name.startswith(prefix):
                    _remove(name)


def _connect(name: str, switch: str, number: int) -> None:
    port = f"port{number}"
    wire = ["type", "veth", "peer", "name", "eth0", "netns", name]
    _run("ip", "-n", switch, "link", "add", port, *wire)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")


def _configure(name: str, number: int, rate: str | None, second: bool) -> None:
    devices = ["lo", "eth0"]
    if second:
        devices.append("eth1")
        pair = ["name", "eth1", "type", "veth", "peer", "name", "nowhere"]
        _run("ip", "-n", name, "link", "add", *pair)
        _run("ip", "-n", name, "link", "set", "nowhere", "up")
        _run("ip", "-n", name, "addr", "add", f"{SECOND}.{number}/24", "dev", "eth1")
    _run("ip", "-n", name, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
    for device in devices:
        _run("ip", "-n", name, "link", "set", device, "up")
    _shape(name, rate)


def _shape(name: str, rate: str | None) -> None:
    kind = ["noqueue"]
    if rate:
        kind = ["tbf", "rate", rate, "burst", "512kb", "latency", "50ms"]
    _run("tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", *kind)


def _run(*command: str) -> str:
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=120
    ).stdout


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines()]


def _processes(name: str) -> list[int]:
    return [int(process) for process in _run("ip", "netns", "pids", name).split()]


def _remove(name: str) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):
        for process in _processes(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        _run("ip", "netns", "del", name)


def _remove_forgotten() -> None:
    """Remove the hosts of a process that was killed before it could do so."""
    for name in _namespaces():
        owner = re.match(rf"{PREFIX}(\d+)-", name)
        if owner and not Path("/proc", owner[1]).exists():
            _remove(name)


def main() -> int:
    """Run a command on all slots of some hosts."""
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.lab")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--slots", type=int, default=1, help="ranks on each host")
    parser.add_argument("--rate", help="of each link, as 10gbit")
    parser.add_argument("--mca", nargs=2, action="append", default=[])
    parser.add_argument(
        "--inside",
        action="store_true",
        help="run it once, on the first host: mpirun --hostfile $HOSTFILE --bind-to "
        "none starts ranks on all hosts",
    )
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    with hosts(options.hosts, options.rate) as lab:
        more = [word for pair in options.mca for word in ("--mca", *pair)]
        slots, env = [options.slots] * options.hosts, launch.environment()
        command = lab.mpirun(slots, options.command, *more)
        if options.inside:
            command, env = lab.on(1, options.command), env | lab.mpi_variables(slots)
        code, printed = launch.run(command, env, options.timeout)
    print(printed, end="")
    return 124 if code is None else code


if __name__ == "__main__":
    sys.exit(main())
