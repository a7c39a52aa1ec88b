"""Asks every host for an answer before mpirun does: its errors name the host."""

from __future__ import annotations

import argparse
import concurrent.futures
import subprocess
from collections.abc import Sequence

from collective.errors import CollectiveError
from collective.hosts import Host
from collective.launch import here

SECONDS = 30
_AT_ONCE = 32


def ssh_options(options: argparse.Namespace) -> list[str]:
    """What ``-p`` and ``-i`` are for ssh."""
    words = []
    if options.ssh_port:
        words += ["-p", str(options.ssh_port)]
    if options.ssh_identity_file:
        words += ["-i", options.ssh_identity_file]
    return words


def command(
    host: Host, options: argparse.Namespace, seconds: int, *words: str
) -> list[str]:
    """What to start to have words run by the shell of a host."""
    quiet = []
    if options.remote_shell == "ssh":
        # Never ask for a password: nobody would see the question.
        quiet = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={seconds}"]
    return [options.remote_shell, *quiet, *ssh_options(options), host.login, *words]


def check(hosts: Sequence[Host], options: argparse.Namespace) -> None:
    """Has each host but this one run ``true``.

    Raises:
        CollectiveError: Naming the hosts that did not, and why.
    """
    seconds = options.start_timeout or SECONDS
    others = [host for host in hosts if not here.is_here(host)]

    def ask(host: Host) -> str:
        try:
            done = subprocess.run(
                command(host, options, seconds, "true"),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds + 1,
            )
        except subprocess.TimeoutExpired:
            return f"no answer in {seconds} s"
        except OSError as error:
            return f"{options.remote_shell}: {error.strerror}"
        said = " ".join(done.stderr.split())[-200:]
        return (
            f"{said or 'no message'} (exit code {done.returncode})"
            if done.returncode
            else ""
        )

    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(ask, others))
    silent = [
        f"{host.name}: {answer}"
        for host, answer in zip(others, answers, strict=True)
        if answer
    ]
    if silent:
        first = next(h for h, answer in zip(others, answers, strict=True) if answer)
        words = command(first, options, seconds, "true")
        raise CollectiveError(
            "cannot reach every host:\n  " + "\n  ".join(silent),
            hint=f"this must work without a password: {' '.join(words)}",
        )
