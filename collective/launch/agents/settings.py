"""The settings of an agent: its node, the head's address, and the job's secret."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from collective.environment import Environment
from collective.errors import UsageError
from collective.launch.options import LaunchOptions

PROTOCOL = 3
NO_HEAD = 124  # the exit code of timeout(1)
DEFAULT_SECONDS = 30
_EXAMPLE = "collectiverun --agent --nodes 2 --node 0 --head node0:7070 python train.py"
SECRET, SECRET_FILE = "COLLECTIVE_SECRET", "COLLECTIVE_SECRET_FILE"
FOLDER = "COLLECTIVE_AGENT_FOLDER"  # set by Ray and Spark (function)
_LEAST = 16  # least characters of a secret


@dataclass(frozen=True)
class Settings:
    """The settings of the agent of one node."""

    head: tuple[str, int]  # host and port
    nodes: int
    node: int
    slots: int  # ranks on this node
    secret: str
    version: str
    heartbeat: int  # seconds after which a silent end counts as lost
    seconds: int  # to wait for the other nodes
    # The job's folder on this node, if Ray or Spark has made one.
    folder: Path | None = None


def read(
    options: LaunchOptions,
    found: Environment,
    addresses: Sequence[str],
    variables: MutableMapping[str, str],
    version: str,
) -> Settings:
    """Read the settings from the command line, else from srun, TF_CONFIG or Kubernetes.

    Args:
        found: Rank and size of this process, if a launcher has started one process on each node.
        addresses: ``host:port`` of each of these processes, if known.
        variables: The environment; the secret is removed from it.

    Raises:
        UsageError: Something is missing, or contradicts the rest.
    """
    if found.local_size > 1:
        raise UsageError(
            f"{found.launcher} started {found.local_size} agents on this host",
            hint="one on each: srun --ntasks-per-node=1 collectiverun --agent ...",
        )
    several = found.size > 1
    nodes = options.nodes or (found.size if several else 0)
    node = options.node
    if node is None and several:
        node = found.rank
    if node is None:
        index = variables.get("JOB_COMPLETION_INDEX", "")
        node = int(index) if index.isdigit() else None
    head = options.head or (addresses[0] if addresses else "")
    if not nodes or node is None or not head:
        missing = [
            *(["--nodes N"] if not nodes else []),
            *(["--node I"] if node is None else []),
            *(["--head HOST:PORT"] if not head else []),
        ]
        raise UsageError(f"--agent: {', '.join(missing)} is missing", hint=_EXAMPLE)
    if not 0 <= node < nodes:
        raise UsageError(f"--agent: node {node} of {nodes} nodes", hint=_EXAMPLE)
    host, colon, port = head.rpartition(":")
    if not (colon and port.isdigit() and 0 < int(port) < 65536):
        raise UsageError(f"--head {head}: not HOST:PORT", hint=_EXAMPLE)
    return Settings(
        head=(host.strip("[]"), int(port)),
        nodes=nodes,
        node=node,
        slots=options.slots_per_host or 1,
        secret=_secret(variables),
        version=f"{version}, protocol {PROTOCOL}",
        heartbeat=options.heartbeat,
        seconds=options.start_timeout or DEFAULT_SECONDS,
        folder=Path(folder) if (folder := variables.pop(FOLDER, "")) else None,
    )


def _secret(variables: MutableMapping[str, str]) -> str:
    """Read the secret, and remove it from the variables; the file ``-`` is standard input."""
    secret, file = variables.pop(SECRET, ""), variables.pop(SECRET_FILE, "")
    try:
        if file == "-":
            secret = sys.stdin.readline()
        elif file:
            secret = Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{SECRET_FILE}={file} cannot be read: {error}",
            hint=f"a file with at least {_LEAST} random characters, the same on each node",
        ) from None
    secret = secret.strip()
    if len(secret) < _LEAST:
        what = f"a secret of {len(secret)} characters" if secret else "no secret"
        raise UsageError(
            f"--agent: {what}: agents run what the head sends, so both prove it",
            hint=f"the same on each node, at least {_LEAST} random characters: "
            f"{SECRET_FILE}=FILE (- is standard input) or {SECRET}",
        )
    return secret


def clean(variables: Mapping[str, str], kept: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of commands, without the variables that describe this agent.

    A command is not a rank of the launcher that started the agent, and mpirun would ask
    that launcher's server. The variables ``kept`` stay.
    """
    foreign = ("SLURM_", "PMI", "TF_CONFIG")
    left = {k: v for k, v in variables.items() if not k.startswith(foreign)}
    return {**left, **kept}


def print_agent(text: str) -> None:
    """Print a message of this agent."""
    print(f"agent on {socket.gethostname()}: {text}", file=sys.stderr, flush=True)
