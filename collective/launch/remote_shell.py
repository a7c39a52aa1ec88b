"""The program that starts a command on another host: ssh, or one that takes its place.

In a Slurm job this is srun (``srun-shell``).
"""

from __future__ import annotations

import argparse
import os
import shlex
from dataclasses import dataclass

from collective import hosts, python_command
from collective.hosts import Host
from collective.launch import slurm_job

CONNECT_SECONDS = 8


@dataclass(frozen=True)
class RemoteShell:
    """The way in which a host is reached."""

    program: str = "ssh"  # or a program with the arguments HOST COMMAND
    port: int | None = None  # ssh's -p
    identity_file: str = ""  # ssh's -i
    connect_seconds: int = CONNECT_SECONDS  # limit for ssh to connect

    @property
    def options(self) -> list[str]:
        """Return the options of ssh for the port and the identity file."""
        words = ["-p", str(self.port)] if self.port else []
        return [*words, "-i", self.identity_file] if self.identity_file else words

    def command(self, host: Host, module: str, *words: str) -> list[str]:
        """Return the command that runs a module of this package on a host.

        The module runs with the same Python, in the same folder. A command for this host
        needs no shell.
        """
        command = python_command.command(module, *words)
        if hosts.is_local(host):
            return command
        limits = []
        if self.program == "ssh":
            # Never ask for a password: nobody would see the question.
            timeout = f"ConnectTimeout={self.connect_seconds}"
            limits = ["-o", "BatchMode=yes", "-o", timeout]
        if path := os.environ.get("PYTHONPATH"):
            command = ["env", f"PYTHONPATH={path}", *command]
        remote = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"
        return [self.program, *limits, *self.options, host.login, remote]


def add_options(parser: argparse._ActionsContainer) -> None:
    """Add the options from which ``from_options`` makes a shell."""
    add = parser.add_argument
    add("-p", "--ssh-port", type=int, metavar="PORT", help="port of ssh")
    add("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")
    add("--remote-shell", default=os.environ.get("COLLECTIVE_REMOTE_SHELL"),
        metavar="PROGRAM", help="starts a command on a host (srun in a Slurm job, else ssh)")  # fmt: skip


def from_options(parsed: argparse.Namespace) -> RemoteShell:
    """Return the shell that the options describe, with ``--start-timeout``."""
    return RemoteShell(
        parsed.remote_shell or slurm_job.shell(os.environ) or "ssh",
        parsed.ssh_port,
        parsed.ssh_identity_file or "",
        parsed.start_timeout or CONNECT_SECONDS,
    )


def hint(command: list[str]) -> str:
    """Return the HINT for a host that could not start a command."""
    if command[0] == str(slurm_job.SHELL):
        return (
            "srun reaches the nodes of this Slurm job (squeue --me); for other hosts: "
            "--remote-shell ssh"
        )
    # Leave out our own command, the last word: it is long and explains nothing.
    return f"this must work without a password: {shlex.join([*command[:-1], 'true'])}"
